"""Bytes and time before loading: what a model, a policy and a context will take; and which policy a call runs under."""
