"""A plain step can be recorded once and replayed for later ones, as a CUDA graph would be. Its arguments stay in place,
and a few buffers have the new numbers. By tables of addresses one recorded step serves other calls, too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from long_cases import and_long
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from workloads.launches import counting
from workloads.models import in_records
from workloads.plain_layers import CONFIGS, forward_of

import tiered
from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.forward.forward import Forward
from tiered.forward.passes import Pass, StepKind
from tiered.forward.together import Batch
from tiered.kernels import block_attention
from tiered.kernels.attention_splits import bucket
from tiered.kernels.row_code import RowCode
from tiered.runtime import Runtime

# Operations that end on the host, or whose result has as many rows as the device finds.
READS = ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero", "equal", "item")


def address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class Recorded(TorchDispatchMode):
    """The operations of a step and its launches of kernels, with the tensors that they read and made."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[tuple[Any, Any, Any, Any]] = []
        self._inside = False

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = operation(*args, **(kwargs or {}))
        if not self._inside:
            self._calls.append((operation, args, kwargs or {}, made))
        return made

    @contextmanager
    def kernels(self) -> Iterator[None]:
        """Record launches in Triton's interpreter, without the operations of the interpreter itself."""
        from triton.runtime.interpreter import GridExecutor

        start: Any = GridExecutor.__call__

        def started(executor: Any, *args: Any, **kwargs: Any) -> None:
            self._calls.append((partial(start, executor), args, kwargs, executor.grid))
            self._inside = True
            start(executor, *args, **kwargs)
            self._inside = False

        with patch.object(GridExecutor, "__call__", started), self:
            yield

    @property
    def operations(self) -> list[tuple[str, Any]]:
        """Names, with the shapes that they made, without views; of kernels, with grid, arguments and dtypes."""

        def plain(values: Any, attribute: str) -> Any:
            return tree_map(lambda each: getattr(each, attribute) if isinstance(each, Tensor) else each, values)

        return [
            (operation.args[0].fn.__name__, (made, plain((args, kwargs), "dtype")))
            if isinstance(operation, partial)
            else (str(operation), plain(made, "shape"))
            for operation, args, kwargs, made in self._calls
            if isinstance(operation, partial) or not operation.is_view
        ]

    @property
    def given(self) -> set[int]:
        """Addresses that the step reads or writes, of memory that it did not make."""
        made, given = set[int](), set[int]()
        for _, args, kwargs, results in self._calls:
            given |= {address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)} - made
            made |= {address(each) for each in tree_leaves(results) if isinstance(each, Tensor)} - given
        return given

    def replay(self) -> None:
        """Run them again, from the same tensors into the same tensors."""
        for operation, args, kwargs, made in self._calls:
            if isinstance(operation, partial):
                operation(*args, **kwargs)
                continue
            again, own = (
                operation(*args, **kwargs),
                {address(each) for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)},
            )
            for new, old in zip(tree_leaves(again), tree_leaves(made), strict=True):
                if isinstance(old, Tensor) and address(old) not in own:  # no view, and nothing written in place
                    old.copy_(new)


class StepBuffers:
    """The numbers that each plain step changes: tokens, columns, whether they count, and the border of final tokens."""

    def __init__(self, pass_: Pass) -> None:
        sequences, rows = len(pass_.ids), pass_.rows.count
        self.ids, self.final = torch.empty_like(pass_.ids), torch.empty(sequences, dtype=torch.int64)
        self.index = torch.empty(sequences, rows, dtype=torch.int64)
        self.valid = torch.empty(sequences, rows, dtype=torch.bool)

    def filled(self, pass_: Pass) -> Pass:
        self.ids.copy_(pass_.ids)
        self.index.copy_(pass_.rows.index.expand_as(self.index))
        self.valid.copy_(pass_.rows.flags.expand_as(self.valid))
        border = torch.as_tensor(pass_.final)
        self.final.copy_(border.expand_as(self.final))
        return replace(pass_, ids=self.ids, rows=Rows.at(self.index, self.valid), final=self.final)


class Replaying:
    """Takes the place of `Forward.logits`: replays each plain step of a call beside computing it."""

    def __init__(self, original: Callable[[Forward, Pass], Tensor], exact: bool) -> None:
        self._original, self._exact = original, exact
        self._recorded: dict[tuple[int, ...], tuple[StepBuffers, Recorded, Tensor]] = {}
        self.replayed = 0

    def __call__(self, forward: Forward, pass_: Pass) -> Tensor:
        expected = self._original(forward, pass_)
        if pass_.kind is not StepKind.STEP or pass_.program is not None or not pass_.output.stop:
            return expected
        key = (len(pass_.ids), pass_.rows.count, pass_.output.start, pass_.output.stop)
        if key not in self._recorded:
            buffers, recorded = StepBuffers(pass_), Recorded()
            for stored in self.stored(forward):
                # A row with limits of its own weighs columns behind them with 0: they must be numbers.
                stored.nan_to_num_()
            fixed = buffers.filled(pass_)
            with recorded:
                logits = self._original(forward, fixed)
            assert not [name for name, _ in recorded.operations if any(read in name for read in READS)]
            self._recorded[key] = buffers, recorded, logits
            return expected
        buffers, recorded, logits = self._recorded[key]
        fixed = buffers.filled(pass_)
        with Recorded() as again:
            eager = self._original(forward, fixed)
        assert again.operations == recorded.operations
        assert again.given == recorded.given
        stored = [each.clone() for each in self.stored(forward)]
        self.scramble(forward, fixed.rows)
        recorded.replay()
        self.replayed += 1
        assert torch.equal(logits, eager)
        assert all(map(torch.equal, self.stored(forward), stored))
        if self._exact:
            assert torch.equal(logits, expected)
        else:
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
        return expected

    @staticmethod
    def stored(forward: Forward) -> list[Tensor]:
        layers = range(forward.model.shape.layers)
        return [forward.store.view(feature, layer) for feature in (Feature.KEY, Feature.VALUE) for layer in layers]

    @staticmethod
    def scramble(forward: Forward, rows: Rows) -> None:
        """Fill the rows that the step writes with NaN, before it is replayed."""
        for feature in (Feature.KEY, Feature.VALUE):
            for layer in range(forward.model.shape.layers):
                kept = forward.store.rows(feature, layer, rows)
                forward.store.write(feature, layer, rows, torch.full_like(kept, torch.nan))


# Model, policy, whether a span has the same bits as its columns one by one, options of the call.
CALLS: dict[str, tuple[str, dict[str, Any], bool, dict[str, Any]]] = {
    "dual": ("embedded", {"policy": "fast_dllm_dual"}, True, {}),
    "guided": ("embedded", {"policy": "fast_dllm_dual"}, True, {"cfg_scale": 0.5}),
    "polestar": ("embedded", {"policy": "polestar"}, True, {}),
    # Whole blocks go through torch's attention; rows with limits of their own through ours.
    "blocks": ("embedded-blocks", {"policy": "block_causal"}, False, {}),
}
PROMPTS = ["sort: Nora Ben Ivan Cleo Ada", "copy: Ada Ben"]


@pytest.mark.parametrize("call", CALLS)
def test_a_recorded_step_serves_the_steps_after_it(call: str, monkeypatch: pytest.MonkeyPatch):
    name, loading, exact, options = CALLS[call]
    runtime: Runtime = tiered.from_pretrained(name, device="cpu", dtype="float32", **loading)
    block = {} if name == "embedded-blocks" else {"block_length": 8}
    replaying = Replaying(Forward.logits, exact)
    expected = runtime.generate(PROMPTS, max_new_tokens=16, stop_at_eos=False, **block, **options)
    monkeypatch.setattr(Forward, "logits", lambda forward, pass_: replaying(forward, pass_))
    out = runtime.generate(PROMPTS, max_new_tokens=16, stop_at_eos=False, **block, **options)
    assert torch.equal(out.sequences, expected.sequences)
    assert replaying.replayed >= 8


def test_an_address_that_moves_is_seen(monkeypatch: pytest.MonkeyPatch):
    """Without buffers of its own a step reads other memory each time, and the test above says so."""
    runtime: Runtime = tiered.from_pretrained("embedded", policy="fast_dllm_dual", device="cpu", dtype="float32")
    replaying = Replaying(Forward.logits, True)
    monkeypatch.setattr(Forward, "logits", lambda forward, pass_: replaying(forward, pass_))
    monkeypatch.setattr(StepBuffers, "filled", lambda _, pass_: replace(pass_, ids=pass_.ids.clone()))
    with pytest.raises(AssertionError):
        runtime.generate(PROMPTS, max_new_tokens=32, block_length=8, stop_at_eos=False)


# Columns of the canvases of two calls that share forwards, and the first column of the block of each. In the other
# round one canvas is longer, one shorter.
ROUNDS = [((24, 40), (8, 24)), ((56, 32), (40, 16))]


@pytest.mark.skipif(torch.cuda.is_available(), reason="Triton is not in its interpreter")
@pytest.mark.parametrize(
    ("family", "splits", "kv"),
    and_long([("sdar", 2, RowCode.FP8), ("gidd", 1, None)], [(family, 1, None) for family in CONFIGS]),
)
@torch.inference_mode()
def test_a_recorded_step_serves_other_calls(
    family: str, splits: int, kv: RowCode | None, random_model: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
):
    """The stores of other calls lie elsewhere and have other sizes; a table says where, which is written in place."""
    pytest.importorskip("triton")
    monkeypatch.setattr(block_attention, "shared_splits", lambda *_, **__: splits)
    model = in_records(random_model({"model_type": family, **CONFIGS[family]}))
    generator = torch.Generator().manual_seed(0)

    def asked(columns: tuple[int, ...], starts: tuple[int, ...]) -> list[tuple[Forward, Pass]]:
        """Steps of calls whose keys and values are all there."""
        found = []
        for length, start in zip(columns, starts, strict=True):
            forward, ids = forward_of(model, kv, length), torch.randint(0, 120, (1, length), generator=generator)
            forward.logits(Pass(ids, forward.rows, slice(0, 8)))
            found.append((forward, Pass(ids.flip(1), Rows.span(start, start + 8), slice(0, 8))))
        return found

    recorded_calls, calls = (asked(*round_) for round_ in ROUNDS)
    with counting():
        recorded, first = Recorded(), Batch(recorded_calls)
        with recorded.kernels():
            logits = first.logits()
        again, other = Recorded(), Batch(calls)
        with again.kernels():
            expected = other.logits()
        assert again.operations == recorded.operations
        kept = [(forward, Replaying.stored(forward)) for forward, _ in calls]
        written = [[each.clone() for each in stored] for _, stored in kept]
        for forward, pass_ in calls:
            Replaying.scramble(forward, pass_.rows)
        for into, new in zip(first.inputs, other.inputs, strict=True):
            into.copy_(new)
        recorded.replay()
        assert torch.equal(logits, expected)
        for (_, stored), before in zip(kept, written, strict=True):
            assert all(map(torch.equal, stored, before))


def test_buckets_are_few_and_none_is_much_too_large():
    """Four to a doubling from 1024 columns on, and none below 256; a part of a split may hold no column."""
    found = {columns: bucket(columns) for columns in range(1, 1 << 16)}
    assert all(below < columns <= most for columns, (below, most) in found.items())
    assert all(most - below == 256 or most <= 1.25 * (below + 1) for below, most in found.values())
    assert len(set(found.values())) == 4 + 4 * 6
