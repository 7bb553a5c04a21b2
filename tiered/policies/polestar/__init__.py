"""The cache of hidden states: clusters of rows, kept as records, and recomputed when their attention drifts."""
