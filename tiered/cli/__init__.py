"""The command line: `tiered generate | plan | models`."""
