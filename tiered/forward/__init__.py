"""The only way through the layers, and the stores of what it leaves: resident, or streamed from the host tier."""
