"""The only way through the layers, and the stores of what it leaves: resident, or in pages from the host tier."""
