"""The command line: `tiered generate | drift | regions | trace | plan | models`."""
