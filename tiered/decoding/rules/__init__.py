"""Commit rules, which choose the candidates that a step fixes. They are found in the files here, and work with any
policy."""
