"""The live view, traces, and analyses of caches."""
