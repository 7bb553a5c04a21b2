"""A model of LLaDA-8B's shape with random weights, drawn on the device: for speed and bytes, not for answers."""

from functools import cache
from typing import Any

import torch

from gpu_parts.setting import Setting
from tiered.core.budget import MemoryBudget
from tiered.core.buffers import dtype_name
from tiered.core.features import Account
from tiered.core.ledger import Ledger
from tiered.forward.weight_records import WeightRecords
from tiered.models.checkpoint import assign
from tiered.models.llada import LLaDA
from tiered.models.presets import read_preset
from tiered.models.weight_form import RAW_WEIGHTS, weight_bytes
from tiered.policies.base import Policy
from tiered.runtime import Runtime

# More than any call here asks for. RoPE's angles are made for each call, so the model is the same one.
_POSITIONS = 1 << 18
_STD = 0.02
_TINY = {
    **{"d_model": 64, "n_layers": 3, "n_heads": 4, "n_kv_heads": 4, "mlp_hidden_size": 192, "torch_dtype": "float32"},
    **{"vocab_size": 512, "embedding_size": 512, "mask_token_id": 511, "eos_token_id": 510, "pad_token_id": 510},
}


def llada_config(setting: Setting) -> dict[str, Any]:
    """LLaDA-8B's config.json for many positions, in bfloat16; the tiny one has 64 wide layers, in float32."""
    return read_preset("llada-8b") | {"max_sequence_length": _POSITIONS} | (_TINY if setting.tiny else {})


@cache
def random_llada(setting: Setting) -> LLaDA:
    """The model, made once in a process. Its 15 GiB are drawn on the device: the host never holds them."""
    return _drawn(setting, llada_config(setting))


@cache
def few_layers(setting: Setting, layers: int, dtype: torch.dtype | None = None) -> LLaDA:
    """A model of `layers` such layers, or of as many as the whole model has; `dtype`: None for that of the model."""
    config = llada_config(setting)
    own = {} if dtype is None else {"torch_dtype": dtype_name(dtype)}
    return _drawn(setting, config | own | {"n_layers": min(layers, config["n_layers"])})


def _drawn(setting: Setting, config: dict[str, Any]) -> LLaDA:
    """A random model whose layers are one piece of memory each, as loading puts them: their products are joined."""
    model = without_weights(config)
    dtype = getattr(torch, model.shape.dtype)
    model, draws = model.to(dtype), torch.Generator(setting.on).manual_seed(setting.seed)
    records = WeightRecords(model, dtype, RAW_WEIGHTS)
    for layer in records.layers:
        records.assign(layer, torch.empty(records.layer.nbytes, dtype=torch.uint8, device=setting.on))
    for name, parameter in [*model.named_parameters()]:
        if parameter.is_meta:
            assign(model, name, torch.empty_like(parameter, device=setting.on))
    with torch.no_grad():
        for parameter in model.parameters():
            draw(parameter, draws)
    return model


def draw(weight: torch.Tensor, draws: torch.Generator) -> None:
    """Fill `weight`, which is a norm's if it has one dimension."""
    if weight.dim() == 1:
        weight.fill_(1.0)
    else:
        weight.normal_(std=_STD, generator=draws)


def without_weights(config: dict[str, Any]) -> LLaDA:
    """A model on the meta device."""
    with torch.device("meta"):
        return LLaDA.from_config(config)


def random_runtime(setting: Setting, policy: Policy, memory: MemoryBudget | None = None) -> Runtime:
    """A runtime of the model with a ledger of its own, in which the weights are booked.

    Raises:
        TierCapacityError: the weights alone exceed `memory`.
    """
    model, ledger = random_llada(setting), Ledger(memory)
    ledger.allocate({Account.WEIGHTS: weight_bytes(model.shape, model.shape.dtype)})
    return Runtime(model, policy=policy, ledger=ledger, name="random LLaDA")


def random_ids(setting: Setting, length: int) -> torch.Tensor:
    """Token ids [1, length], none of them special."""
    # Special tokens stand at the end of the tiny vocabulary, and behind 126080 in the real one.
    most = min(llada_config(setting)[f"{name}_token_id"] for name in ("mask", "eos", "pad"))
    return torch.randint(0, most, (1, length), generator=torch.Generator().manual_seed(setting.seed))
