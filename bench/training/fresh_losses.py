"""Auxiliary losses of `FRESH_TASKS`: the prompt's rows learn which keys are printed, and attention finds the next one.

Without them a small model finds by chance alone that a key's row can know whether the answer has the key.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.batches import Batch
from training.fresh_batches import keys_of, seen_keys
from training.losses import POINTER_HEADS, mean_cross_entropy
from training.model import Tap
from training.noise import Noised
from training.tasks import KEY_TOKENS


def fresh_losses(task: str, batch: Batch, noised: Noised, probe: nn.Linear, tap: Tap) -> dict[str, Tensor]:
    """`spent`: loss of the probe, which reads in the row of a key's last token whether the answer shows the key.
    `point`: cross entropy of attention from the key that is printed next to the same key in the prompt."""
    keys, prompt, answer = keys_of(task, batch), int(batch.prompt[0]), int(batch.answer[0])
    seen = seen_keys(noised.hidden, batch)
    spent = (keys.same & seen[:, :, None]).any(1)
    read = probe(tap.hidden[:, keys.start + KEY_TOKENS - 1])[..., 0]
    both = [F.softplus(side).sum() / max(len(side), 1) for side in (-read[spent], read[~spent])]

    target = keys.start[keys.same.float().argmax(-1)]
    known = F.pad(seen[:, :-1], (1, 0), value=True)
    slots = slice(prompt, prompt + answer)
    asked = known.repeat_interleave(KEY_TOKENS, 1) & noised.hidden[:, slots]
    column = (target[..., None] + torch.arange(KEY_TOKENS)).flatten(1)
    heads = list(POINTER_HEADS)
    scores = tap.queries[:, heads, slots] @ tap.keys[:, heads].mT / tap.queries.shape[-1] ** 0.5
    point = torch.stack([mean_cross_entropy(scores[:, head][asked], column[asked]) for head in range(len(heads))])
    return {f"spent {task}": sum(both, torch.zeros(())) / 2, f"point {task}": point.mean()}
