"""Caching policies: which rows a step recomputes, and when. One file each, registered by name."""

# Here, where it takes no torch to read it.
DEFAULT_POLICY = "auto"
