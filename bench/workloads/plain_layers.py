"""Plain layers of dense families: their launches, and the time of their Python without kernels.

Models are so small that their arithmetic does not count. A step has eight rows of 24 columns.
"""

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from tiered.core.features import Feature
from tiered.core.ops import Op
from tiered.core.rows import Rows
from tiered.core.spans import span
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.parts import CanvasLimits
from tiered.forward.passes import Pass
from tiered.forward.sizes import CallShape
from tiered.kernels import choice, projection
from tiered.kernels.gate_mul_ref import gate_mul
from tiered.kernels.projection import adjoining, project
from tiered.kernels.row_code import RowCode
from tiered.models.base import DiffusionModel
from tiered.models.families import family_of
from workloads.launches import CUDA, counting
from workloads.models import in_records

COLUMNS, BLOCK = 24, 8
ROWS = Rows.span(8, 16)
LAYERS = 17  # of the timed model; the last one does less, and is not timed
TOKENS = {"vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125, "torch_dtype": "bfloat16"}
_OFFICIAL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
CONFIGS: dict[str, dict[str, Any]] = {
    "llada": {
        "d_model": 32,
        "n_layers": 3,
        "n_heads": 4,
        "n_kv_heads": 4,
        "mlp_hidden_size": 48,
        "max_sequence_length": 256,
    }
    | TOKENS,
    "Dream": {**_OFFICIAL, "num_key_value_heads": 2, "max_position_embeddings": 256} | TOKENS,
    "gidd": {**_OFFICIAL, "max_position_embeddings": 256} | TOKENS,
    "sdar": {**_OFFICIAL, "num_key_value_heads": 2, "max_position_embeddings": 256, "block_size": BLOCK} | TOKENS,
}


def model_of(family: str, layers: int = 3) -> DiffusionModel:
    """A random model of `family`, float32, whose matrices lie in records as loading puts them."""
    of_layers = "n_layers" if family == "llada" else "num_hidden_layers"
    config: Mapping[str, Any] = {"model_type": family, **CONFIGS[family], of_layers: layers}
    model = family_of(config).resolve_loader().from_config(config)
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        if parameter.dim() > 1:
            parameter.normal_(std=0.3, generator=generator)
    return in_records(model)


def forward_of(model: Any, kv: RowCode | None = None, columns: int = COLUMNS) -> Forward:
    """A forward with keys and values of all columns in every layer, in a code; nothing is in there yet."""
    shape = model.shape
    kept: dict[Feature, int] = {Feature.KEY: shape.layers, Feature.VALUE: shape.layers}
    dtype = str(model.wte.weight.dtype).removeprefix("torch.")
    sizes = CallShape(shape=shape, batch=1, context=columns, block_length=columns, dtype=dtype, kv=kv)
    store = FeatureStore(sizes, kept, torch.device("cpu"))
    limits = CanvasLimits(shape, columns, block_length=BLOCK if shape.block_causal else 0)
    return Forward(model, store, torch.arange(columns)[None], limits)


def pass_of(rows: Rows) -> Pass:
    """A plain step over `rows`, with logits of all of them."""
    return Pass(torch.zeros(1, COLUMNS, dtype=torch.int64), rows, slice(0, rows.count))


def launches(family: str, rows: Rows = ROWS) -> tuple[Counter[int | None], int]:
    """Launches of a plain step of a model in bfloat16, by layer, None for launches outside of layers; and the host's
    reads inside layers."""
    forward = forward_of(in_records(model_of(family).to(torch.bfloat16)))
    with torch.no_grad(), counting() as found, found.span(Op.FORWARD):
        forward.logits(pass_of(rows))
    layers = Counter[int | None]()
    for (_, layer, *_), number in found.launches.items():
        layers[layer] += number
    return layers, sum(number for (_, layer, *_), number in found.reads.items() if layer is not None)


def host_time(family: str, *, rounds: int) -> dict[str, Any]:
    """The median time of a plain layer's Python, and of as many bare launchers, which take turns.

    `without_kernels` leaves kernels out. The rest is as on CUDA: the layer path, the launchers of kernels up to the
    launch, and torch's operations. Checks and the memory of results are a part of it. Products, of 8 rows and matrices
    of 32 x 96, are computed. The bare launcher is that of `gate_mul` for one element, the smallest one. Time is that of
    the calling thread, so a busy machine lengthens it little.
    "calls" of functions in a layer are the same on every machine.
    """
    launched = launches(family)[0][0]
    forward, pass_ = forward_of(model_of(family, LAYERS)), pass_of(ROWS)
    one = torch.ones(1, 1)
    bare = choice.for_device(gate_mul, CUDA)

    def of_layers() -> float:
        forward.begin(pass_)
        passed, began = replace(pass_, hidden=forward.embedded(pass_)), time.thread_time_ns()
        for layer in range(LAYERS - 1):
            forward.enter(layer)
            with span(Op.LAYER, layer):
                passed = forward.dense(layer, passed, waits=True)
        return (time.thread_time_ns() - began) / (LAYERS - 1)

    def of_launchers() -> float:
        began = time.thread_time_ns()
        for _ in range(launched * (LAYERS - 1)):
            bare(one, one)
        return (time.thread_time_ns() - began) / (LAYERS - 1)

    with torch.inference_mode(), without_kernels():
        # The first round pays for objects that are made once.
        times = [(of_layers(), of_launchers()) for _ in range(rounds + 1)][1:]
        calls = counted_calls(of_layers) / (LAYERS - 1)
    layer, launchers = (median(of) / 1e3 for of in zip(*times, strict=True))
    ratio = median(of / over for of, over in times)
    return {"launches": launched, "layer_us": layer, "bare_us": launchers, "over_bare": ratio, "calls": calls}


def counted_calls(run: Callable[[], object]) -> int:
    """Calls of functions of Python and of C in `run`."""
    found = Counter[str]()

    def count(frame: Any, event: str, argument: Any) -> None:
        found[event] += 1

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return found["call"] + found["c_call"]


@contextmanager
def without_kernels() -> Iterator[None]:
    """Let tensors of the host go the way of those on CUDA, but start no kernel. `tiered.kernels.launch.launch` does
    nothing, so memory that a kernel would write stays as it was. Products are torch's own."""
    changed: dict[str, Callable[[Any], Any]] = {
        "launch": lambda original: _nothing,
        "for_device": lambda original: lambda reference, device: original(reference, CUDA),
        "project_joined": lambda original: _joined,
    }
    with ExitStack() as stack:
        stack.enter_context(patch.object(projection, "FEW_ROWS", range(0)))
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "tiered"]:
            for name, change in changed.items():
                if callable(original := vars(module).get(name)):
                    stack.enter_context(patch.object(module, name, change(original)))
        yield


def _nothing(*arguments: Any, **options: Any) -> None:
    """In place of a launch."""


def _joined(hidden: Tensor, weights: Any) -> Tensor | None:
    """`project_joined` as on CUDA."""
    whole = adjoining(weights)
    return None if whole is None else project(hidden, whole)
