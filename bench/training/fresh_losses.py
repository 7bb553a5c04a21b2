"""Auxiliary losses of `FRESH_TASKS`: the prompt's rows know what is printed, and the next key is looked at there.

Without them a small model has to find by chance that a key's row can tell whether the answer has the key.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor, nn

from training.batches import Batch
from training.fresh_batches import Keys, keys_of, seen_keys
from training.losses import POINTER_HEADS, mean_cross_entropy
from training.model import Tap
from training.noise import Noised


def fresh_losses(task: str, batch: Batch, noised: Noised, probe: nn.Linear, tap: Tap) -> dict[str, Tensor]:
    """`spent`: what the probe reads in the row of a key's last letter, which is whether the answer shows the key.
    `point`: cross entropy of attention of the key that is printed next, which shall look at it in the prompt."""
    keys, prompt, answer = keys_of(task, batch), int(batch.prompt[0]), int(batch.answer[0])
    seen = seen_keys(noised.hidden, batch, keys.letters)
    spent = ((keys.code[:, :, None] == keys.printed[:, None]) & seen[:, None]).any(-1)
    rows = torch.arange(len(spent))[:, None]
    read = probe(tap.hidden[rows, keys.start + keys.letters - 1])[..., 0]
    both = [F.softplus(side).sum() / max(len(side), 1) for side in (-read[spent], read[~spent])]

    target, known = _next_in_prompt(task, keys)
    known = known & F.pad(seen[:, :-1], (1, 0), value=True)
    slots = slice(prompt, prompt + answer)
    asked = known.repeat_interleave(keys.letters, 1) & noised.hidden[:, slots]
    column = (target[..., None] + torch.arange(keys.letters)).flatten(1)
    heads = list(POINTER_HEADS)
    scores = tap.queries[:, heads, slots] @ tap.keys[:, heads].mT / tap.queries.shape[-1] ** 0.5
    point = torch.stack([mean_cross_entropy(scores[:, head][asked], column[asked]) for head in range(len(heads))])
    return {f"spent {task}": sum(both, torch.zeros(())) / 2, f"point {task}": point.mean()}


def _next_in_prompt(task: str, keys: Keys) -> tuple[Int[Tensor, "batch printed"], Bool[Tensor, "batch printed"]]:
    """The column in which each printed key begins in the prompt, and whether there is one.

    On a way it is the name of the key in the entry before.
    """
    same = keys.code[:, None] == keys.printed[:, :, None]
    if task == "follow":
        entry = keys.code[:, ::3].repeat_interleave(3, 1)
        before = F.pad(keys.printed[:, :-1], (1, 0), value=-1)
        same &= (entry[:, None] == before[:, :, None]) & (torch.arange(keys.code.shape[1]) % 3 > 0)
    return keys.start.gather(1, same.float().argmax(-1)), same.any(-1)
