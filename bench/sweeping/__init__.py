"""The parts of bench/sweep.py: the grid, its points, what measures one, and the rows that are kept."""
