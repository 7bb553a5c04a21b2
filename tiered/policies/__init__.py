"""Caching policies, which decide the rows that a step recomputes. One file each, registered by name."""

# Defined here, so that reading it needs no torch.
DEFAULT_POLICY = "auto"
