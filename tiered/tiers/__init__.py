"""Records, their homes below the device, and their copies to it, under one budget."""
