"""The parts of bench/throughput.py: who answers what, and rounds of calls."""
