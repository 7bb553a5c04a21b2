"""The parts of bench/report.py: files are read and checked, figures drawn, and pages written."""
