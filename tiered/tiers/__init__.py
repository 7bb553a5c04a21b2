"""Records, where they live below the device, and how they come to it, under one budget."""
