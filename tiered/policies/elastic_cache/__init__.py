"""Elastic-Cache: tracked tokens, the drift of their attention, and steps that widen on their way."""
