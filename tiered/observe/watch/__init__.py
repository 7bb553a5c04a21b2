"""The live view of a call: what the canvas, the caches and the tiers hold after every forward."""
