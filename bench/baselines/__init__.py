"""What people would use without this library: transformers' own model and caches, with the official samplers' loop."""
