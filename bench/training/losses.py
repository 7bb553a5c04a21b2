"""The losses: cross entropy of the tokens asked for, and auxiliary ones without which lookup and chain stay at chance.

The auxiliary losses show two attention heads the place of a wanted digit. Linear probes ask rows for the tokens that
their digit follows from. They add nothing to the model: the probes are dropped at export.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from tiered.models.base import DiffusionModel
from training.batches import CHAIN_ID, EQUALS_ID, Batch
from training.lookup_batches import TABLE_START
from training.model import Tap
from training.noise import Noised
from training.tasks import KEY_TOKENS, LOOKUP_FRAME_TOKENS, PAIR_TOKENS

# The layer whose rows, queries and keys the auxiliary losses read, and the heads that learn where to look; left alone,
# heads stayed at the mean of all values.
POINTER_LAYER, POINTER_HEADS = 3, (1, 3)
AUXILIARY_WEIGHT = 0.3
# Numbers of tokens that a probe reads: both letters of a key; sign, operand, and two digits of the total before.
LOOKUP_FACTS, CHAIN_FACTS = 2, 4


def token_loss(
    model: DiffusionModel,
    hidden: Float[Tensor, "batch rows width"],
    target: Int[Tensor, "batch rows"],
    weight: Float[Tensor, "batch rows"],
) -> Float[Tensor, ""]:
    """Weighted mean cross entropy of the tokens whose weight is above 0, in nats; `hidden` is behind the last layer."""
    picked = weight > 0
    loss = F.cross_entropy(model.logits(hidden[picked]), target[picked], reduction="none") * weight[picked]
    # A batch may ask for hardly anything: the floor keeps it from weighing as much as all others.
    return loss.sum() / weight.sum().clamp(min=0.1)


def pointer_losses(batch: Batch, noised: Noised, probe: nn.Linear, tap: Tap) -> dict[str, Tensor]:
    """Losses of a batch of lookups, all with one prompt length and one answer length.

    `look`: cross entropy of attention from an asked digit to its own digit in the table.
    `know`: loss of the probe, which reads the key in front of a digit from the digit's row. Rows can be compared by key
    only once they know it.
    """
    prompt, answer, rows = int(batch.prompt[0]), int(batch.answer[0]), len(batch.ids)
    keys = answer // PAIR_TOKENS
    count = (prompt - LOOKUP_FRAME_TOKENS - KEY_TOKENS * keys) // PAIR_TOKENS
    table = batch.ids[:, TABLE_START : TABLE_START + PAIR_TOKENS * count].view(rows, 1, count, PAIR_TOKENS)
    wanted = batch.ids[:, prompt : prompt + answer].view(rows, keys, 1, PAIR_TOKENS)
    same_key = (table[..., :KEY_TOKENS] == wanted[..., :KEY_TOKENS]).all(-1)
    pair = same_key.float().argmax(-1)  # [batch, keys]: the wanted pair's number in the table
    digits = torch.arange(PAIR_TOKENS - 2, PAIR_TOKENS)
    target = (TABLE_START + PAIR_TOKENS * pair[..., None] + digits).flatten(1)
    answer_starts = prompt + PAIR_TOKENS * torch.arange(keys)
    slots = (answer_starts[:, None] + digits).flatten()
    asked = noised.asked[:, slots]
    heads = list(POINTER_HEADS)
    scores = tap.queries[:, heads][:, :, slots] @ tap.keys[:, heads].mT / tap.queries.shape[-1] ** 0.5
    look = torch.stack([mean_cross_entropy(scores[:, head][asked], target[asked]) for head in range(len(heads))])
    starts = torch.cat([TABLE_START + PAIR_TOKENS * torch.arange(count), answer_starts])
    known = probe(tap.hidden[:, (starts[:, None] + digits).flatten()]).view(rows, len(starts), 2, LOOKUP_FACTS, -1)
    letters = batch.ids[:, (starts[:, None] + torch.arange(KEY_TOKENS)).flatten()].view(
        rows, len(starts), 1, KEY_TOKENS
    )
    know = F.cross_entropy(known.flatten(0, 3), letters.expand(-1, -1, 2, -1).flatten())
    return {"look": look.mean(), "know": know}


def operand_losses(batch: Batch, noised: Noised, probe: nn.Linear, tap: Tap) -> dict[str, Tensor]:
    """Losses of a batch of short tasks. `operands`: loss of the probe, which reads sign, operand, and the total before
    from the rows of a chain's total. A total counts if the one before is visible."""
    ids, place = batch.ids, batch.places()
    chain = ids[:, 1:2] == CHAIN_ID
    row, at = (chain & (place >= 3) & F.pad(ids == EQUALS_ID, (1, -1))).nonzero(as_tuple=True)  # tens of totals
    before = torch.where(place[row, at] == 3, 2, at - 5)  # tens of the totals before: the first stands in the prompt
    usable = noised.asked[row, at] & ~noised.hidden[row, before] & ~noised.hidden[row, before + 1]
    row, at, before = row[usable], at[usable], before[usable]
    facts = torch.stack([ids[row, at - 3], ids[row, at - 2], ids[row, before], ids[row, before + 1]], 1)
    both = torch.stack([tap.hidden[row, at], tap.hidden[row, at + 1]], 1)
    known = probe(both).unflatten(-1, (CHAIN_FACTS, -1))
    wanted = facts[:, None].expand(-1, 2, -1).flatten()
    return {"operands": mean_cross_entropy(known.flatten(0, 2), wanted)}


def mean_cross_entropy(logits: Float[Tensor, "rows classes"], target: Int[Tensor, " rows"]) -> Float[Tensor, ""]:
    """The mean over rows; 0 for no rows."""
    return F.cross_entropy(logits, target, reduction="sum") / max(len(target), 1)
