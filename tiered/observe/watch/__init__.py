"""The live view of a call: the canvas, the caches and the tiers after every forward."""
