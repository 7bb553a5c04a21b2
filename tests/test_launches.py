"""What a layer of a plain step launches on CUDA: numbers that may only fall."""

import importlib
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Flow, Forward
from tiered.kernels import choice

TOKENS = {"vocab_size": 128, "mask_token_id": 127, "eos_token_id": 126, "pad_token_id": 125, "torch_dtype": "bfloat16"}
OFFICIAL = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 48}
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
    "Dream": {**OFFICIAL, "num_key_value_heads": 2, "max_position_embeddings": 256} | TOKENS,
    "gidd": {**OFFICIAL, "max_position_embeddings": 256} | TOKENS,
}
# Every family: two products of the attention's output and the MLP's, three of queries, keys and values, two norms, two
# rotations, two writes, attention, its heads joined, two branches added. LLaDA and Dream: two products and a gate.
# Dream: three biases. GIDD: a product, ReLU and its square, two norms more; six products and two branches are scaled.
LAUNCHES = {"llada": 18, "Dream": 21, "gidd": 28}
KERNELS = ("capped_attention", "rms_norm", "rotate", "scatter_rows", "silu_mul")
ROWS = {
    "span": Rows.span(8, 16),
    "scattered": Rows.at(torch.arange(8, 16)[None], torch.ones(1, 8, dtype=torch.bool)),
}


class Launches(TorchDispatchMode):
    """Counts what writes memory: no views, no allocations. A Triton kernel counts once, whatever interprets it does."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self._inside = False

    def of_kernel(self, launch: Callable[..., None]) -> Callable[..., None]:
        """`launch` as one launch."""

        def counted(kernel: Any, *arguments: Any, **options: Any) -> None:
            self.names[kernel.__name__] += 1
            self._inside = True
            try:
                launch(kernel, *arguments, **options)
            finally:
                self._inside = False

        return counted

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        if not self._inside and not name.startswith(("empty", "new_empty")):
            given = {tensor.untyped_storage().data_ptr() for tensor in tensors((args, kwargs))}
            made = any(tensor.untyped_storage().data_ptr() not in given for tensor in tensors(out))
            self.names[name] += made or func._schema.is_mutable
        return out


def tensors(tree: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Counts while it is entered; everything runs as on CUDA."""
    pytest.importorskip("triton")
    importlib.import_module("tiered.models.gidd")  # families are imported when they are asked for
    counted = Launches()
    for name, module in list(sys.modules.items()):
        if name.startswith("tiered.") and module is not choice and hasattr(module, "for_device"):
            monkeypatch.setattr(module, "for_device", lambda reference, device: choice._triton(reference))
    for kernel in KERNELS:
        module = importlib.import_module(f"tiered.kernels.{kernel}")
        monkeypatch.setattr(module, "launch", counted.of_kernel(module.launch))
    return counted


def forward_of(model: Any) -> Forward:
    """Keys and values of 24 columns in every layer; nothing is in there yet."""
    shape = model.shape
    kept: dict[Feature, int] = {Feature.KEY: shape.layers, Feature.VALUE: shape.layers}
    store = FeatureStore(shape, kept, batch=1, length=24, dtype=model.wte.weight.dtype, device=torch.device("cpu"))
    return Forward(model, store, torch.arange(24)[None])


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("family", LAUNCHES)
def test_a_layer_of_a_plain_step(family: str, rows: Rows, launches: Launches, random_model: Callable[[Any], Any]):
    model = random_model({"model_type": family, **CONFIGS[family]}).to(torch.bfloat16)
    layers = []

    def counting(forward: Forward, layer: int, flow: Flow) -> Flow:
        launches.names.clear()
        flow = forward.dense(layer, flow)
        layers.append(launches.names.copy())
        return flow

    with torch.inference_mode(), launches:
        forward_of(model).logits(torch.zeros(1, 24, dtype=torch.int64), rows, slice(0, 8), counting)
    assert [layer.total() for layer in layers[:-1]] == [LAUNCHES[family]] * 2, layers[0]


@pytest.mark.parametrize("rows", ROWS.values(), ids=ROWS)
@pytest.mark.parametrize("family", LAUNCHES)
def test_kernels_answer_as_their_references(
    family: str, rows: Rows, random_model: Callable[[Any], Any], request: pytest.FixtureRequest
):
    """Logits in float32 of a step behind a pass over all columns."""
    model = random_model({"model_type": family, **CONFIGS[family]})
    ids = torch.randint(0, 120, (1, 24), generator=torch.Generator().manual_seed(0))

    @torch.inference_mode()
    def answer() -> Tensor:
        forward = forward_of(model)
        forward.logits(ids, Rows.span(0, 24), slice(0, 8))
        return forward.logits(ids.flip(1), rows, slice(0, 8))

    expected = answer()
    request.getfixturevalue("launches")
    torch.testing.assert_close(answer(), expected, rtol=1e-4, atol=1e-4)
