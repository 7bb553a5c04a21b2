"""The tier manager: records of cached rows over device, host and disk, under one budget."""
