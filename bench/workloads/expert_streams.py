"""Experts that routers of a random mixture pick, and a call in which they come over a slowed link.

Random routers say little of trained ones: the figures are of the schedule, not of a model.
"""

import json
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from measuring.worker import refusing
from safetensors.torch import load_file, save_file
from simulation import Link, LinkSpeed, SimulatedThreads
from torch import Tensor

import tiered
from tiered.core.budget import MemoryBudget
from tiered.core.events import Asked
from tiered.core.features import Tier
from tiered.core.ops import Op
from tiered.core.rates import rates_of
from tiered.core.spans import Recorder, TimedRange, recording
from tiered.forward.forward import Forward
from tiered.forward.weight_bytes import WeightBytes
from tiered.kernels.expert_table import ExpertTable
from tiered.models.families import family_of
from tiered.models.mixture import Group, MixtureModel
from tiered.models.weight_form import RAW_WEIGHTS
from tiered.offload.lane import Lane
from tiered.output import GenerationOutput
from tiered.planning.call_bytes import CallBytes
from tiered.planning.times import forward_seconds
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.blocks import GOLDENS, LARGEST_DIFFERENCE
from workloads.models import VOCABULARY
from workloads.streamed_model import opened, shape_of, sizes_of
from workloads.weight_loading import peak_of_loading
from workloads.weight_streams import WaitingTransport, figures

BLOCK, BLOCKS = 32, 4
# The block length of each recorded case, by checkpoint; None if rows see the whole canvas.
RECORDED: dict[str, dict[str, int | None]] = {
    "llada_moe/lladamoe_tiny": {"full": None, "leftpad": None},
    "llada2/llada2_tiny": {"block32": 32, "block8_masks": 8, "block16_tail": 16},
    "sdar_moe/sdar_moe_tiny": {"block4": 4, "block8": 8},
}
MINI, MINI_CONTEXT = "llada2-mini", 8192


def recorded() -> Iterator[dict[str, Any]]:
    """A row for every recorded case of the official code: the distance of logits, and whether rows picked the same
    experts. Cases with histories are among the tests."""
    for checkpoint, cases in RECORDED.items():
        folder, _, name = checkpoint.partition("/")
        tensors = load_file(GOLDENS / folder / "logits.safetensors")
        runtime = tiered.from_pretrained(GOLDENS / checkpoint, policy="none", device="cpu")
        for case, block in cases.items():
            found, of = list[Tensor](), f"{name}.{case}."
            ids, mask, expected = (tensors.get(of + each) for each in ("input_ids", "attention_mask", "routes"))
            assert ids is not None and expected is not None, "every case has them"
            with patch.object(
                Forward, "note_picks", lambda _, layer, experts, picked, found=found: found.append(experts)
            ):
                logits = runtime.logits(ids.long(), mask, block_length=block)
            real = torch.ones_like(ids).bool() if mask is None else mask.bool()
            off = float((logits - tensors[of + "logits"])[real].abs().max())
            routes = torch.stack(found).view(expected.shape)[:, real]
            same = torch.equal(routes, expected[:, real].long())
            yield {"case": f"{name}, {case}", "off": off, "identical": off <= LARGEST_DIFFERENCE, "routed": same}


def picks(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row: the overlap of the experts of a forward over a block with earlier ones, and the recall of guesses.

    "of_step", "of_block": experts of a layer that a forward reaches, and all forwards of a block. "step_overlap",
    "block_overlap": share of them that the forward, or block, before had reached. "recall_last", "recall_router",
    "recall_both": share that the layer picked in the forward before, that its router finds likely a layer ahead, or
    either.
    """
    with refusing(), random_mixture(settings) as folder:
        runtime = tiered.from_pretrained(folder, policy="block_causal")
        model = runtime.model
        assert isinstance(model, MixtureModel)
        recorder = PassRecorder(model)
        answered(runtime, settings)
    over_block = [each for each in recorder.seen if each.rows == BLOCK]
    passes: dict[int, list[frozenset[int]]] = {}
    recalls: dict[str, list[float]] = {"last": [], "router": [], "both": []}
    likely: Collection[int] = ()
    for each in over_block:
        own, picked = passes.setdefault(each.layer, []), frozenset(each.picked)
        if own and each.layer != over_block[0].layer:  # no layer in front of the first has its router
            guesses = {"last": own[-1], "router": frozenset(likely), "both": own[-1].union(likely)}
            for name, guess in guesses.items():
                recalls[name].append(len(guess & picked) / len(picked))
        own.append(picked)
        likely = each.likely
    forwards = len(passes[over_block[0].layer]) // BLOCKS
    unions = [
        [frozenset[int]().union(*own[first : first + forwards]) for first in range(0, forwards * BLOCKS, forwards)]
        for own in passes.values()
    ]
    yield {
        "of_step": fmean(len(picked) for own in passes.values() for picked in own),
        "of_block": fmean(len(union) for own in unions for union in own),
        "step_overlap": fmean(len(a & b) / len(b) for own in passes.values() for a, b in pairwise(own)),
        "block_overlap": fmean(len(a & b) / len(b) for own in unions for a, b in pairwise(own)),
        **{f"recall_{name}": fmean(found) for name, found in recalls.items()},
        **{
            f"misses_over_belady_{100 * share:.0f}": over_belady(over_block, share, model)
            for share in settings["shares"]
        },
    }


def over_belady(seen: Sequence["Seen"], share: float, model: MixtureModel) -> float:
    """Fetches with slots for a share of the experts, without guesses, over those of Belady's rule. By this rule the
    expert with the furthest next use goes. No rule has fewer fetches."""
    experts = model.shape.experts
    assert experts is not None, "it is a mixture"
    slots = round(share * len(model.shape.recorded) * experts.count)
    used = [(each.layer, expert) for each in seen for expert in each.picked]
    following, after = [len(used)] * len(used), dict[tuple[int, int], int]()
    for place in reversed(range(len(used))):
        following[place] = after.get(used[place], len(used))
        after[used[place]] = place
    best, here = 0, dict[tuple[int, int], int]()
    for place, key in enumerate(used):
        if key not in here:
            best += 1
            if len(here) == slots:
                del here[max(here, key=here.__getitem__)]
        here[key] = following[place]
    ours, order, last = 0, dict[tuple[int, int], None](), dict[int, frozenset[int]]()
    for each in seen:
        last[each.layer] = frozenset(each.picked)
        for expert in each.picked:
            key = each.layer, expert
            if key in order:
                order.pop(key)
            else:
                ours += 1
                if len(order) == slots:
                    layer, oldest = leaving = next(iter(order))
                    order.pop(next(reversed(order)) if oldest in last[layer] else leaving)
            order[key] = None
    return ours / best


def stream(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row of a call with all experts on the device, and with slots for a share of them, over the link. The latter
    also goes without guesses, and with experts fetched and waited for one by one, as in TIDE (arXiv 2605.20179).

    The link is slow: a copy of the experts that a step reaches stands to its forward as with LLaDA2-mini in int4 on
    that card. Columns are those of `weight_streams.figures`, with copies of a forward's misses. Others are "plain_ms"
    (without guesses), "layers_ms" (a bound: all experts in each forward), "hit_share", and "foreseen_share".
    "bytes_over_misses" has bytes that came with guesses over those without.
    """
    policy, share = make_policy("block_causal"), settings["share"]
    with refusing(), random_mixture(settings) as folder:
        shape = shape_of(folder)
        assert shape.experts is not None, "it is a mixture"
        positions, answer = settings["context"] + BLOCKS * BLOCK, BLOCKS * BLOCK
        sizes = replace(sizes_of(shape, positions, RAW_WEIGHTS, block=BLOCK), answer=answer)
        whole = WeightBytes.of(shape, sizes.dtype, sizes.weights)
        resident = answered(opened(folder, policy, MemoryBudget(), device="cpu"), settings)
        alone = median(resident.timings.steps)
        reached = len(shape.recorded) * shape.experts.reached(float(BLOCK)) * whole.record
        link = Link(fetch=LinkSpeed(bandwidth=reached / (copy_over_forward(settings["link"]) * alone)))
        weights = whole.streaming(min(whole.most, round((1 - share) * whole.of_records)))
        call = replace(CallBytes.of(policy, sizes, MemoryBudget(), weights=whole), weights=weights)
        cap = MemoryBudget(device=call.total(Tier.DEVICE))

        def told(kind: type[SimulatedThreads], likely: Callable[..., Tensor | None]) -> GenerationOutput:
            with patch.object(MixtureModel, "likely", likely):
                return answered(opened(folder, policy, cap, device="cpu", transport=partial(kind, link=link)), settings)

        guessed = told(SimulatedThreads, MixtureModel.likely)
        plain, one_by_one = (told(kind, lambda *_: None) for kind in (SimulatedThreads, WaitingTransport))
        with patch.object(MixtureModel, "likely", lambda *_: None), recording(_Fetches()) as fetches:
            answered(opened(folder, policy, cap, device="cpu"), settings)
    for other in (guessed, plain, one_by_one):
        assert torch.equal(other.sequences, resident.sequences), "streamed experts answer as resident ones do"
    assert guessed.weights is not None and plain.weights is not None, "there is no room for all experts"
    copies = [link.fetch.seconds(nbytes) for nbytes in fetches.by_step()[-resident.num_forwards :]]
    way, used = guessed.weights.ways[Lane.FETCH], guessed.weights.experts_used
    yield figures(resident.timings.steps, guessed.timings.steps, one_by_one.timings.steps, copies, way) | {
        "plain_ms": 1e3 * fmean(plain.timings.steps),
        "layers_ms": 1e3 * max(alone, link.fetch.seconds(whole.of_records * whole.record)),
        "hit_share": guessed.weights.experts_resident / used,
        "foreseen_share": guessed.weights.experts_foreseen / used,
        "bytes_over_misses": way.nbytes / plain.weights.ways[Lane.FETCH].nbytes,
    }


def load(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row: `weight_loading.peak_of_loading` with room for as few experts as a step needs, in "form"."""
    with random_mixture(settings) as folder:
        yield peak_of_loading(folder, settings["form"], streamed=True)


def copy_over_forward(card: str) -> float:
    """The copy of the experts that a step of LLaDA2-mini in int4 reaches over its forward with all of them there."""
    plan = tiered.plan(MINI, context=MINI_CONTEXT, weights="int4", device=card)
    rates = rates_of(card)
    assert plan.weights is not None and plan.shape.experts is not None, "it is a mixture"
    seconds, _ = forward_seconds(make_policy("block_causal"), plan.sizes, BLOCK, 0, rates)
    reached = len(plan.shape.recorded) * plan.shape.experts.reached(float(BLOCK))
    return reached * plan.weights.record / rates.link_bytes_per_second / seconds


class _Fetches(Recorder):
    """Bytes of the fetches of each step."""

    def __init__(self) -> None:
        super().__init__()
        self._begins: list[int] = []  # by step, the events before it

    def enter(self, span: TimedRange) -> None:
        super().enter(span)
        if span.op is Op.STEP:
            self._begins.append(len(self.events))

    def by_step(self) -> list[int]:
        edges = pairwise([*self._begins, len(self.events)])
        return [sum(e.nbytes for e in self.events[begin:end] if isinstance(e, Asked)) for begin, end in edges]


class Seen(NamedTuple):
    """A pass over a layer: its rows, the experts that they picked, and those that they may pick in the next layer."""

    layer: int
    rows: int
    picked: Sequence[int]
    likely: Collection[int]


class PassRecorder:
    """Experts on the device in place of streamed ones; `seen` keeps the requests of a mixture."""

    def __init__(self, model: MixtureModel) -> None:
        self._model, self._rows, self.seen = model, 0, list[Seen]()
        model.streamed, model.likely = self, self.likely

    def likely(self, layer: int, hidden: Tensor) -> Tensor | None:
        self._rows = hidden.shape[:-1].numel()
        return MixtureModel.likely(self._model, layer, hidden)

    def groups(self, layer: int, picked: Sequence[int], likely: Mapping[int, int]) -> Iterable[Group]:
        self.seen.append(Seen(layer, self._rows, picked, likely))
        block, experts = self._model.blocks[layer], self._model.shape.experts
        assert experts is not None, "it is a mixture"
        return [(picked, ExpertTable.of_stacks(block.experts_in.weight, block.experts_out.weight, experts.count))]


def answered(runtime: Runtime, settings: Mapping[str, Any]) -> GenerationOutput:
    """The answer of `BLOCKS` blocks to a random prompt, after another one that pays for thread pools."""
    draws = torch.Generator().manual_seed(settings["seed"])
    prompt = torch.randint(0, VOCABULARY - 2, (1, settings["context"]), generator=draws)
    call = {"block_length": BLOCK, "block_steps": settings["steps"], "stop_at_eos": False}
    with runtime:
        runtime.generate(prompt, max_new_tokens=BLOCK, **call)
        return runtime.generate(prompt, max_new_tokens=BLOCKS * BLOCK, **call)


@contextmanager
def random_mixture(settings: Mapping[str, Any]) -> Iterator[Path]:
    """The folder of a random LLaDA2 in float32, gone behind the `with`. All layers except the first have a mixture.

    Rows of the embedding have a norm of √width. A branch adds about settings["branch"] times as much to a row.
    """
    width, branch = settings["width"], settings["branch"]
    config = {
        "model_type": "llada2_moe", "hidden_size": width, "num_hidden_layers": settings["layers"],
        "num_attention_heads": width // 64, "num_key_value_heads": max(1, width // 256), "head_dim": 64,
        "intermediate_size": 2 * width, "moe_intermediate_size": width // 4, "num_experts": settings["experts"],
        "num_experts_per_tok": settings["picked"], "n_group": 8, "topk_group": 4, "num_shared_experts": 1,
        "first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True, "partial_rotary_factor": 0.5,
        "vocab_size": VOCABULARY, "max_position_embeddings": settings["context"] + BLOCKS * BLOCK,
        "mask_token_id": VOCABULARY - 1, "eos_token_id": VOCABULARY - 2, "pad_token_id": VOCABULARY - 2,
        "torch_dtype": "float32",
    }  # fmt: skip
    draws = torch.Generator().manual_seed(0)
    scales = {".word_embeddings.weight": width**0.5, ".dense.weight": branch, ".down_proj.weight": branch}

    def drawn(name: str, size: Sequence[int]) -> Tensor:
        if len(size) == 1:
            return torch.ones(size)
        scale = next((scale for end, scale in scales.items() if name.endswith(end)), 1.0)
        return torch.randn(*size, generator=draws) * size[-1] ** -0.5 * scale

    weights = {name: drawn(name, size) for name, size in family_of(config).shape(config).weight_shapes.items()}
    with TemporaryDirectory() as folder:
        save_file(weights, Path(folder) / "model.safetensors", {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(config))
        yield Path(folder)
