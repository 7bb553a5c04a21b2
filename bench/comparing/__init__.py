"""The parts of bench/compare.py: what is asked, the rows and their rounds, and the tables."""
