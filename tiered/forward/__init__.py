"""The only path through the layers, and its feature stores: resident, or streamed from the host tier."""
