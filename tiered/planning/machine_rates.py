"""The rates of this machine, measured in a second or two."""

from collections.abc import Callable

import torch
import torch.nn.functional as F

from tiered.core.buffers import dtype_name
from tiered.core.features import Feature
from tiered.core.rates import Rates
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.models.llada import LLaDA
from tiered.offload.device import best_seconds, multiprocessors

_SIDE = {"cpu": 768, "cuda": 8192}  # rows and columns of the matrices that are multiplied
_BYTES = {"cpu": 1 << 26, "cuda": 1 << 30}  # bytes that are summed and copied: more than any cache holds
_FEW, _MANY = 32, 512  # rows of a step, and of a part of a refresh
_LAYERS = 8  # layers of the smallest model: hardly any work, but all launches of a layer


@torch.no_grad()
def machine_rates(device: torch.device, dtype: torch.dtype) -> Rates:
    """The rates of `device` in `dtype`, each the best of a few tries. It times products and attention over many
    rows and few, the sum of a long vector, its copy from the host, and layers with hardly any work."""
    side, nbytes = _SIDE[device.type], _BYTES[device.type]
    matrix = torch.ones(side, side, dtype=dtype, device=device)
    vector = torch.ones(nbytes // dtype.itemsize, dtype=dtype, device=device)
    source = torch.ones_like(vector, device="cpu", pin_memory=device.type == "cuda")

    wide = torch.ones(4 * side, side, dtype=dtype, device=device)
    few = torch.ones(_FEW, 4 * side, dtype=dtype, device=device)
    heads = torch.ones(1, 4, 4 * side, 64, dtype=dtype, device=device)

    def attend(rows: int) -> None:
        F.scaled_dot_product_attention(heads[:, :, :rows], heads, heads)

    def rate(flops: float, work: Callable[[], object]) -> float:
        return flops / best_seconds(work, device)

    attention = 4 * heads.numel()  # FLOP of a row
    products = rate(2 * side**3, lambda: matrix @ matrix), rate(2 * _FEW * wide.numel(), lambda: few @ wide)
    attentions = [rate(rows * attention, lambda rows=rows: attend(rows)) for rows in (_MANY, _FEW)]
    works = (vector.sum, lambda: vector.copy_(source, non_blocking=True), _least_step(device, dtype))
    total, copy, least = (best_seconds(work, device) for work in works)
    return Rates(
        flops_per_second=products[0],
        half_rows=_half_rows(*products),
        attention_flops_per_second=attentions[0],
        attention_half_rows=_half_rows(*attentions),
        bytes_per_second=nbytes / total,
        link_bytes_per_second=nbytes / copy,
        layer_seconds=least / _LAYERS,
        source=f"measured on {device} in {dtype_name(dtype)}",
        measured=True,
        multiprocessors=multiprocessors(device) if device.type == "cuda" else 0,
    )


def _half_rows(most: float, of_few: float) -> float:
    """Number of rows at which the rate is half of `most`, if `_FEW` rows reach `of_few`."""
    return max(0.0, _FEW * (most / of_few - 1))


def _least_step(device: torch.device, dtype: torch.dtype) -> Callable[[], object]:
    """A plain step of two rows through the smallest layers."""
    size = dict.fromkeys(("d_model", "mlp_hidden_size", "vocab_size"), 32) | {"n_heads": 2, "n_layers": _LAYERS}
    tokens = {"mask_token_id": 3, "eos_token_id": 2, "pad_token_id": 2, "max_sequence_length": 64}
    with torch.device(device):
        model = LLaDA.from_config(size | tokens).to(dtype)
        ids, positions = torch.zeros(1, 64, dtype=torch.int64), torch.arange(64)[None]
    kept: dict[Feature, int] = {Feature.KEY: _LAYERS, Feature.VALUE: _LAYERS}
    name = dtype_name(dtype)
    sizes = CallShape(shape=model.shape, batch=1, context=64, block_length=64, dtype=name)
    forward = Forward(model, FeatureStore(sizes, kept, device), positions)
    return lambda: forward.logits(Pass(ids, forward.rows[8:10], slice(0, 2)))
