"""The process that loads a model, for `weight_loading`: says when it is ready, then loads what it is asked to.

A request is `from_pretrained`'s path and its options; the answer, the bytes that the ledger has then.
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
    # Pays for whatever is imported late, and for what a first load leaves with the allocator.
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
