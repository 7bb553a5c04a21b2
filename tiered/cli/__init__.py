"""The command line: `tiered generate | serve | trace | plan | models | rates | warmup`."""
