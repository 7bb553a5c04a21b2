"""Prompts of unequal lengths as one batch."""

from typing import Any

import torch


def padded(*lengths: int) -> dict[str, Any]:
    """Prompts of these lengths, padded on the left: `inputs` and `attention_mask` of a call."""
    longest = max(lengths)
    ids, mask = torch.full((len(lengths), longest), 499), torch.zeros(len(lengths), longest, dtype=torch.long)
    for row, length in enumerate(lengths):
        prompt = torch.randint(0, 480, (length,), generator=torch.Generator().manual_seed(length))
        ids[row, longest - length :], mask[row, longest - length :] = prompt, 1
    return {"inputs": ids, "attention_mask": mask}
