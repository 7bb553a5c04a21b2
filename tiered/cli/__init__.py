"""The command line: `tiered generate | drift | regions | plan | models`."""
