"""Finds the source of NaN or infinity after a forward went wrong, so that normal steps do not pay for it."""

from dataclasses import replace

import torch
from jaxtyping import Int
from torch import Tensor

from tiered.core.rows import parts_of
from tiered.forward.forward import Forward
from tiered.forward.forward_bytes import part_rows
from tiered.forward.parts import Border
from tiered.forward.passes import Pass
from tiered.models.logit_tiles import LogitTiles
from tiered.models.shape import VOCABULARY_TILE


def first_broken(forward: Forward, ids: Int[Tensor, "sequences length"], output: slice, final: Border) -> str | None:
    """The name of the first part that is not finite; None if all parts and the logits of the rows `output` are finite.

    The search goes over all rows of `ids` and overwrites the caches of `forward`. It reads from the device once a
    layer, and needs the room of the call's largest forward. `final`: as in `Pass`.
    """
    found: list[str] = []
    forward.attention_probe = forward.rows_probe = forward.router_probe = None

    def look(what: str, pass_: Pass) -> None:
        # In parts, because the CPU makes a float32 copy of other dtypes. Rows of padding are ignored.
        parts = pass_.hidden.split(part_rows(len(pass_.hidden)), dim=1)
        norms = torch.cat([torch.linalg.vector_norm(part, dim=-1, dtype=torch.float32) for part in parts], dim=1)
        if (mask := forward.limits.key_mask) is not None:
            norms = norms.where(pass_.rows.columns(mask), 0)
        if not norms.isfinite().all():
            found.append(f"the norm of {what}")

    def program(forward: Forward, layer: int, pass_: Pass) -> Pass:
        if layer == 0:
            look("a token's embedding", pass_)
        if not found:
            pass_ = forward.dense(layer, pass_)
            look(f"the output of layer {layer}", pass_)
        return pass_

    most, last = forward.most_rows, Pass(ids, forward.rows, output, final=final, program=program)
    if most < forward.length:  # a model whose rows read nothing behind them
        for part in parts_of(output.start, most):
            forward.logits(replace(last, rows=forward.rows[part], output=slice(0, 1)))
        last = replace(last, rows=forward.rows[output], output=slice(0, output.stop - output.start))
    tiles = LogitTiles.of(forward.model, forward.output(last)).by_tokens(VOCABULARY_TILE)
    if not all(logits.amax(dim=-1).isfinite().all() for _, logits in tiles) and not found:
        found.append("the product of the last norm and the output weights")
    return found[0] if found else None


def cause(found: str | None, dtype: torch.dtype, cfg_scale: float | None) -> tuple[str, str]:
    if found is None and cfg_scale is not None:
        return "the sum of guided logits", f"Both terms are finite, so cfg_scale = {cfg_scale:g} is too large; lower it"
    if found is None:
        return "a cached feature", "Every layer is finite with all rows computed anew; use policy = 'none'"
    if dtype == torch.float16:
        return found, f"float16 ends at {torch.finfo(dtype).max:g}; load with dtype = 'bfloat16' or 'float32'"
    return found, "A weight or a number in config.json is probably wrong; download the model again"
