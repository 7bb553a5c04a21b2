"""Measurements, a module each: the points, the measurement of one, and tables of the rows."""
