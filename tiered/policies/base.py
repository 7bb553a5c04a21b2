"""The contract of a caching policy: the features that it keeps, and the rows that each step recomputes
(docs/adding.md).

A policy is a frozen dataclass of options. `start` makes the state of one call, which gives the `Pass` of every forward
and observes every commit.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from jaxtyping import Bool, Int
from torch import Tensor

from tiered.core.buffers import Buffer
from tiered.core.canvas import Canvas
from tiered.core.features import Account, Feature
from tiered.core.rows import Rows
from tiered.forward.forward_bytes import forward_buffers
from tiered.forward.library_bytes import library_buffers
from tiered.forward.passes import LayerProgram, Pass, StepKind
from tiered.forward.sizes import CallShape
from tiered.models.shape import CANVAS, ModelShape, Sight
from tiered.tiers.record_bytes import RecordBytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The state of the loop before a forward.

    Attributes:
        canvas: tokens, commit times and pads of every sequence; read-only.
        block: number of the current block; `start` and `stop` are its columns.
        number: forwards done in this block; 0 at its beginning.
        first_row, last_row: span of rows whose logits the commit rule needs: the block, or one row earlier in a family
            that predicts position p from row p − 1.
        forwards: forwards of each sequence so far, its own clock.
        active: True for sequences in this forward; the others have no token left to commit in the block, and wait.
        next_commits: 1, 2, … at the columns committed after this forward, in order, and 0 elsewhere, under random
            remasking. None if the rule needs the logits.
        guidance: whether there is classifier-free guidance.
        remasked: True at a block's first forward under a noise mask (`ModelShape.sight`). Features cached before the
            block were computed under another mask, and the forward must recompute them.
        rewrites: whether a token may be committed more than once.
    """

    canvas: Canvas
    block: int
    start: int
    stop: int
    number: int = 0
    first_row: int
    last_row: int
    forwards: tuple[int, ...] = ()
    active: tuple[bool, ...] = ()
    next_commits: Int[Tensor, "batch block"] | None = None
    guidance: bool = False
    remasked: bool = False
    rewrites: bool = False

    @classmethod
    def first(cls, canvas: Canvas, block: int, shape: ModelShape, *, begun: bool, **more: Any) -> "Step":
        """The first step of `block`. `begun`: whether the call has had a forward; `more`: other fields."""
        start, stop = canvas.block_span(block)
        rows = {"first_row": start - shape.prediction_shift, "last_row": stop - shape.prediction_shift}
        remasked = shape.sight == "noise" and begun
        return cls(canvas=canvas, block=block, start=start, stop=stop, remasked=remasked, **rows, **more)

    def due(self, interval: int | None) -> tuple[bool, ...]:
        """True for active sequences with a multiple of `interval` forwards. In a call's first step all are due, and
        none after it if `interval` is None."""
        return tuple(
            here and (not forwards or (interval is not None and forwards % interval == 0))
            for here, forwards in zip(self.active, self.forwards, strict=True)
        )

    def over(self, start: int, stop: int, kind: StepKind) -> Pass:
        """A pass over columns `start` to `stop`, which include the needed rows."""
        assert start <= self.first_row and self.last_row <= stop, (start, stop, self)
        return self.of_rows(self.canvas.rows[start:stop], slice(self.first_row - start, self.last_row - start), kind)

    def of_rows(self, rows: Rows, output: slice, kind: StepKind, program: LayerProgram | None = None) -> Pass:
        """A pass over any rows; `output`: places of the rows whose logits are needed."""
        return Pass(self.canvas.tokens, rows, output, kind, self.start, program)

    def written(self, start: int, stop: int, kind: StepKind) -> Pass:
        """A pass over columns `start` to `stop`, whose tokens are final, for their keys and values alone, without
        logits."""
        return Pass(self.canvas.tokens, self.canvas.rows[start:stop], slice(0, 0), kind, stop)


class PolicyState(ABC):
    """The mutable state of a policy in one call, made by `Policy.start`."""

    def before_block(self, step: Step) -> Iterable[Pass]:
        """The forwards that a block needs before its first step, in order, over rows with final tokens
        (`Step.written`)."""
        return ()

    @abstractmethod
    def rows(self, step: Step) -> Pass:
        """The next forward, made by a method of `step`."""

    # Not abstract, because most policies need neither of these two.
    def observe(self, step: Step, committed: Bool[Tensor, "batch block"]) -> None:  # noqa: B027
        """Called after every commit; `committed`: True for tokens of the block that this step fixed."""

    def keep(self, sequences: list[int]) -> None:  # noqa: B027
        """Keep the state of only these sequences (ascending); called at a block's end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """A policy's needs beside its features and a plain step.

    Attributes:
        buffers: returns the device buffers of the policy's state and programs.
        records: returns the bytes of the hidden states in the tiers; None for no records.
        on_host: features of `Policy.features` that are kept in the host tier and streamed, even if the device has room.
        logit_rows: most rows of a sequence whose logits a step computes; None for the block's rows.
        most_rows: most rows of a sequence that go through a layer in one step; None for the whole canvas.
        reads_keys: whether the policy reads a layer's keys (`Forward.keys`), which may have to be decoded.
        skips_guidance: whether any step leaves sequences without guidance (`Pass.guided`).
    """

    buffers: Callable[[], Sequence[Buffer]] = tuple
    records: Callable[[], RecordBytes] | None = None
    on_host: frozenset[Feature] = frozenset()
    logit_rows: int | None = None
    most_rows: int | None = None
    reads_keys: bool = False
    skips_guidance: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Policy(ABC):
    """Options of a caching policy. Raises `ValueError` or `TypeError` on construction for options out of range."""

    name: ClassVar[str]
    # By default for canvases only, because the features of block-causal models do not go stale.
    sights: ClassVar[frozenset[Sight]] = CANVAS

    def __str__(self) -> str:
        changed = ", ".join(f"{name}={value!r}" for name, value in self.changed.items())
        return f"{self.name}({changed})" if changed else self.name

    @property
    def defaults(self) -> Mapping[str, Any]:
        return {each.name: each.default for each in fields(self)}

    @property
    def options(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.defaults}

    @property
    def changed(self) -> dict[str, Any]:
        return {name: value for name, value in self.options.items() if value != self.defaults[name]}

    def features(self, shape: ModelShape) -> Mapping[Feature, int]:
        """Number of layers of each feature on the device: `shape.layers`, or 1 for a workspace that each layer
        overwrites. `KEY` and `VALUE` are required."""
        return {Feature.KEY: shape.layers, Feature.VALUE: shape.layers}

    def needs(self, sizes: CallShape) -> Needs:
        """Needs of a call of these `sizes` beside `features` and a plain step."""
        return Needs()

    def buffers(self, sizes: CallShape) -> list[Buffer]:
        """Device buffers of a call beside weights, records and slots, with all features on the device."""
        needs = self.needs(sizes)
        logit_rows, most_rows = needs.logit_rows or sizes.block_length, needs.most_rows or sizes.context
        keeps_difference = sizes.guidance and needs.skips_guidance
        whole = keeps_difference or sizes.whole_logits
        buffers = forward_buffers(sizes, self.features(sizes.shape), logit_rows, most_rows, whole)
        if keeps_difference:  # for steps without the unconditional half
            difference = (sizes.batch, logit_rows, sizes.shape.vocab_size)
            buffers.append(Buffer("difference of guidance", Account.LOGITS, difference, "float32"))
        if sizes.kv is not None and (needs.reads_keys or sizes.compared):
            keys = (sizes.sequences, sizes.shape.kv_heads, sizes.context, sizes.shape.head_dim)
            buffers.append(Buffer("keys of a layer, decoded", Account.ACTIVATIONS, keys, sizes.dtype))
        return [*buffers, *needs.buffers(), *library_buffers(sizes)]

    def needs_order(self) -> bool:
        """True if passes need `Step.next_commits`, which allows only rules that choose without logits."""
        return False

    @abstractmethod
    def start(self) -> PolicyState:
        """Fresh state for one call."""
