"""Commit rules: which candidates a step fixes. One file each, registered by name, usable with any policy."""
