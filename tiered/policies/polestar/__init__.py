"""The cache of hidden states in clusters of rows, which are kept as records and recomputed when their attention
drifts."""
