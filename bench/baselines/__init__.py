"""Peers of this library: transformers' own model and caches, with the official samplers' loop, and official code."""
