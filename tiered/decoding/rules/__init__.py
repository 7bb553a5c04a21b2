"""Commit rules: which candidates a step fixes. Found in the files here by name, usable with any policy."""
