"""What a call books is what torch allocates: never less, and not much more."""

import gc
import weakref
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiered.features import Tier
from tiered.models.llada import LLaDA
from tiered.policies.registry import POLICIES, make_policy
from tiered.runtime import Runtime

# How much of what is booked is allocated, at the least.
TIGHT = 0.9
MODELS: dict[str, dict[str, Any]] = {
    "multi-head": {},
    "grouped": {"n_kv_heads": 1},
    "wide vocabulary": {"vocab_size": 16384},
    "wide MLP": {"mlp_hidden_size": 2048},
    "bfloat16": {"dtype": torch.bfloat16, "vocab_size": 8192},
}
CALLS: dict[str, dict[str, Any]] = {
    "short": {"prompt": 40, "max_new_tokens": 64},
    "long": {"prompt": 1500, "max_new_tokens": 32},
    "padded batch": {"prompt": 600, "max_new_tokens": 32, "batch": 3, "pads": 200},
    "guided": {"prompt": 300, "max_new_tokens": 32, "cfg_scale": 1.0},
    "sampled": {"prompt": 64, "max_new_tokens": 32, "temperature": 1.0, "batch": 2},
    "threshold": {"prompt": 64, "max_new_tokens": 32, "confidence_threshold": 0.5},
}
# bfloat16 is emulated on a CPU: a long prompt takes minutes there, and is booked by the same formula.
CASES = [
    (policy, model, call)
    for policy in POLICIES
    for model in MODELS
    for call in CALLS
    if model != "bfloat16" or call not in ("long", "padded batch")
]


class AllocatedBytes(TorchDispatchMode):
    """Bytes of all storages that operations make, counted until they are freed; `peak` is the most at one time."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, int] = {}
        self.peak = 0

    def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
        result = operation(*args, **(kwargs or {}))
        # What comes out as a view of what went in, weights for one, was there before.
        given = {leaf.untyped_storage()._cdata for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)}
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and (storage := leaf.untyped_storage())._cdata not in given:
                self.held[storage._cdata] = storage.nbytes()
                weakref.finalize(storage, self.held.pop, storage._cdata, None)
                self.peak = max(self.peak, sum(self.held.values()))
        return result


def random_model(*, dtype: torch.dtype = torch.float32, vocab_size: int = 2048, **config: int) -> LLaDA:
    sizes = {"d_model": 128, "n_layers": 2, "n_heads": 4, "mlp_hidden_size": 384, "vocab_size": vocab_size}
    tokens = {"mask_token_id": vocab_size - 1, "eos_token_id": vocab_size - 2, "pad_token_id": vocab_size - 2}
    model = LLaDA.from_config({**sizes, **tokens, "max_sequence_length": 4096, "rope_theta": 5e5, **config}).to(dtype)
    torch.manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return model


@pytest.mark.parametrize(("policy", "model", "call"), CASES)
def test_a_call_allocates_what_it_books(policy: str, model: str, call: str):
    options: dict[str, Any] = {"batch": 1, "pads": 0, "stop_at_eos": False, **CALLS[call]}
    ids = torch.randint(0, 1000, (options.pop("batch"), options.pop("prompt")))
    mask = torch.ones_like(ids)
    mask[0, : options.pop("pads")] = 0
    steps = None if "confidence_threshold" in options else 2 * options["max_new_tokens"] // 32
    runtime = Runtime(random_model(**MODELS[model]), policy=make_policy(policy))
    gc.collect()
    with AllocatedBytes() as allocated:
        out = runtime.generate(ids, attention_mask=mask, steps=steps, **options)
    booked = out.memory.peak_device_bytes
    assert TIGHT * booked <= allocated.peak <= booked
    assert runtime.ledger.held(Tier.DEVICE) == 0


def test_logits_allocate_what_they_book():
    runtime = Runtime(random_model(), policy=make_policy("none"))
    ids = torch.randint(0, 1000, (2, 200))
    runtime.ledger.restart_peaks()
    with AllocatedBytes() as allocated:
        runtime.logits(ids)
    booked = runtime.ledger.report().peak_device_bytes
    assert TIGHT * booked <= allocated.peak <= booked
