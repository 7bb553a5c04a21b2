"""The live view of a call, and traces."""
