"""The one way to measure: points in processes of their own, in rounds, kept as rows. See bench/measure.py."""
