"""The parts of bench/gpu_day.py: each is measured by a process of its own, case after case."""
