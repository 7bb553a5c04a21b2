"""Bytes before loading: what a model, a policy and a context will take in each tier."""
