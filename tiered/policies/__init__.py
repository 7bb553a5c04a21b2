"""Caching policies, which decide the rows that a step recomputes, and their registry."""

# Defined here, so that reading it needs no torch.
DEFAULT_POLICY = "auto"
