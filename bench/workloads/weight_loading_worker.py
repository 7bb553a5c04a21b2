"""The process that loads a model, for `weight_loading`: it prints a line when it is ready, and one for each request.

A request has `from_pretrained`'s path and its options; the answer has the bytes in the ledger then.
"""

import json
import sys

import torch

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.features import Tier


def main() -> None:
    """Answer requests until stdin ends."""
    torch.set_num_threads(1)
    # Pays for late imports, and for memory that a first load leaves with the allocator.
    tiered.from_pretrained("embedded", policy="none", device="cpu").close()
    print(json.dumps({"torch": torch.__version__}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        memory = MemoryBudget(device=request["device"])
        runtime = tiered.from_pretrained(
            request["path"], policy="none", device="cpu", weights=request["weights"], memory=memory
        )
        held = {f"{tier}_bytes": runtime.ledger.held(tier) for tier in (Tier.DEVICE, Tier.HOST)}
        print(json.dumps(held), flush=True)
        runtime.close()


if __name__ == "__main__":
    main()
