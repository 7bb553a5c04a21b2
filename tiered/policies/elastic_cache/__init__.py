"""Elastic-Cache: tracked tokens, the change of their attention, and steps that widen from a layer on."""
