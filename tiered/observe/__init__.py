"""Those who look on: the live view, traces, and analyses of what caching does."""
