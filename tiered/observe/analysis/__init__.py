"""Analyses of what caching does to a model's features while it denoises."""
