"""Bytes and time of a model, a policy and a context before loading; and the choice of a call's policy."""
