"""Answers and logits of caches that renew as many rows by different selectors, beside the model without a cache."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Bool, Float, Float64, Int
from measuring.statistics import interval
from measuring.table import Row
from measuring.worker import refusing
from torch import Tensor
from training import tasks

import tiered
from tiered.clustering.allocation import auto_clusters
from tiered.core.checks import unknown_name
from tiered.core.modes import call_modes
from tiered.core.rows import parts_of
from tiered.decoding.asking import next_pass
from tiered.decoding.observers import Inspector
from tiered.forward.forward import Forward
from tiered.forward.passes import StepKind
from tiered.output import GenerationOutput
from tiered.policies.base import Policy, Step
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.selection import SELECTORS, Selecting, renewed_rows

NONE, FROZEN, ALL = "none", "frozen", "all"
# Arms without a share: without a cache; without updates; and with updates of all rows.
REFERENCES: Mapping[str, float] = {NONE: 1.0, FROZEN: 0.0, ALL: 1.0}
# Polestar's rules: in front of C, "auto", or "rows" for a cluster of each row.
RULES: Mapping[str, str] = {"polestar-": "polestar", "fresh-": "polestar-fresh"}
ALONE = "oracle_output"  # an arm whose calls have one prompt
PROMPTS_AT_ONCE = 8  # of a call, with equally many tokens
# A share is asked no more once its interval of right answers is as narrow as that of 200 prompts half of which are
# right. Prompts between two looks at it.
NARROW, LOOK = 0.14, 25
ATTENDED = "attended"  # the policy: it updates in every step, and begins as many blocks with a refresh as the others


def check_arm(name: str) -> None:
    """Raise `ValueError` for an unknown arm."""
    for rule in RULES:
        clusters = name.removeprefix(rule)
        if name.startswith(rule) and (clusters in ("auto", "rows") or (clusters.isdecimal() and int(clusters))):
            return
    if name not in (known := (*REFERENCES, *SELECTORS, ATTENDED)):
        raise unknown_name(
            "selector", name, [*known, *(f"{rule}{count}" for rule in RULES for count in ("auto", "rows"))]
        )


def policy_of(arm: str, share: float, interval: int, *, seed: int, areas: Sequence[int]) -> Policy:
    """The policy of an arm in a call with `areas`, the numbers of rows in front of a block and behind it. An update
    renews `share` of them. Polestar's M is the number of clusters with as many rows on average, and at least 1."""
    if arm == NONE:
        return make_policy(NONE)
    rows = sum(areas)
    if arm == ATTENDED:
        return make_policy(ATTENDED, attended_rows=renewed_rows(share, rows), refresh_blocks=1)
    rule = next((rule for rule in RULES if arm.startswith(rule)), None)
    if rule is None:
        selector = "random" if arm in REFERENCES else arm
        return Selecting(selector=selector, share=share, interval=interval, seed=seed)
    clusters = arm.removeprefix(rule)
    count = rows if clusters == "rows" else auto_clusters(*areas) if clusters == "auto" else min(int(clusters), rows)
    given = clusters if clusters in ("auto", "rows") else count
    # Its T is one commit below an update, and its members are raw, so that no code blurs the comparison.
    top_m = renewed_rows(share, count)
    return make_policy(RULES[rule], clusters=given, top_m=top_m, update_threshold=interval - 1, codec="raw")


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[Row]:
    """A row for each of `settings["shares"]` (per cent; None for an arm without one).

    Beside them `settings` has "model", "task", "size" (of its examples; None for drawn sizes), "split", "selector" (the
    arm), "interval", "seed", and "call" (options of `generate`). "prompts" is their largest number; logits of the first
    "kl_prompts" are compared. A row has "right", 1 or 0 for each prompt, by which arms are paired. For "renewed" see
    `renewed_share`, for "kl" see `forced_kl`.
    """
    with refusing():
        runtime = tiered.from_pretrained(paths[settings["model"]], policy=NONE, device=settings["device"])
        found = {share: Figures() for share in settings["shares"]}
        for first in range(0, settings["prompts"], LOOK):
            wide = {share: figures for share, figures in found.items() if not figures.narrow()}
            if not wide:
                break
            for prompts in asked_together(runtime, settings, first):
                add_answers(runtime, prompts, wide, settings)
    for share, figures in found.items():
        yield {"share": share} | figures.row()


@dataclass(frozen=True, slots=True)
class Asked:
    """A prompt of a study: the seed it is drawn by, its tokens, and whether its logits are compared."""

    seed: int
    tokens: int
    compared: bool
    example: tasks.Example
    chat: list[dict[str, str]]


def asked_together(runtime: Runtime, settings: Mapping[str, Any], first: int) -> Iterator[list[Asked]]:
    """The prompts in order, from the `first` one to the next look. Prompts of a call have equally many tokens, and
    their logits are all compared or not."""

    def asked(number: int) -> Asked:
        seed, compared = settings["seed"] + number, number < settings["kl_prompts"] and settings["selector"] != NONE
        example = tasks.sample(settings["task"], settings["split"], seed, size=settings["size"])
        chat = [{"role": "user", "content": example.prompt}]
        tokens = runtime.prepare([chat], **settings["call"]).prompts.ids.shape[1]
        return Asked(seed, tokens, compared, example, chat)

    most = 1 if settings["selector"] == ALONE else PROMPTS_AT_ONCE
    prompts = map(asked, range(first, min(first + LOOK, settings["prompts"])))
    for _, equal in groupby(prompts, lambda each: (each.tokens, each.compared)):
        alike = list(equal)
        yield from (alike[part] for part in parts_of(len(alike), most))


def add_answers(
    runtime: Runtime,
    prompts: Sequence[Asked],
    found: Mapping[float | None, "Figures"],
    settings: Mapping[str, Any],
) -> None:
    """Answer prompts of one call with each share."""
    arm, call, first = settings["selector"], settings["call"], prompts[0]
    chats = [each.chat for each in prompts]
    areas = first.tokens, call["max_new_tokens"] - call["block_length"]
    none = forced(runtime, chats, call) if first.compared else []
    for share, figures in found.items():
        part = REFERENCES[arm] if share is None else share / 100
        own = runtime.with_policy(policy_of(arm, part, settings["interval"], seed=first.seed, areas=areas))
        out, layers = own.generate(chats, **call), runtime.model.shape.layers
        # Rows count where they enter a layer, and all other arms choose theirs inside the first one.
        counted = 1.0 if arm == ATTENDED else 1 - 1 / layers
        figures.add([each.example for each in prompts], out, first.tokens, call["block_length"], counted)
        if none:
            figures.kl += forced_kl(forced(own, chats, call, none))


@dataclass(slots=True)
class Figures:
    """Figures of every prompt, in order. "updates" and "renewed" are of its call, the second if it had an update."""

    right: list[bool] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    renewed: list[float] = field(default_factory=list)
    kl: list[float] = field(default_factory=list)

    def add(
        self, examples: Sequence[tasks.Example], out: GenerationOutput, prompt: int, block: int, counted: float
    ) -> None:
        """Count the answers to prompts of `prompt` tokens, in blocks of `block`; `counted` as in `renewed_share`."""
        assert out.text is not None, "embedded models have a tokenizer"
        count, updates = len(examples), out.steps_by_kind.get("update", 0)
        self.right += [tasks.score(*each) for each in zip(examples, out.text, strict=True)]
        self.tokens += [prompt] * count
        self.forwards += out.forwards
        self.updates += [updates] * count
        if updates:
            self.renewed += [renewed_share(out, block, counted)] * count

    def narrow(self) -> bool:
        """True if the share of right answers is known well enough."""
        low, high = interval(sum(self.right), len(self.right)) if self.right else (0, 1)
        return high - low <= NARROW

    def row(self) -> Row:
        """Columns of a row."""
        figures = {"updates": self.updates, "renewed": self.renewed, "kl": self.kl}
        return {
            "examples": len(self.right),
            "correct": sum(self.right),
            "right": "".join(str(int(right)) for right in self.right),
            "prompt_tokens": fmean(self.tokens),
            "nfe": fmean(self.forwards),
        } | {name: fmean(values) for name, values in figures.items() if values}


def renewed_share(out: GenerationOutput, block: int, counted: float) -> float:
    """The share of the rows outside a block that an update renews, on average over updates and layers. The first layer
    does not count: its keys and values are those of tokens and never stale. `counted`: share of the renewed rows that
    the output counts."""
    rows, forwards, length = sum(out.rows_per_step), out.num_forwards, out.sequences.shape[1]
    refreshes, updates = out.steps_by_kind.get("refresh", 0), out.steps_by_kind["update"]
    beside = (rows - refreshes * length - (forwards - refreshes) * block) / counted
    return beside / (updates * (length - block))


@dataclass(frozen=True, slots=True)
class Forced:
    """A forward of a call: its logits, those of `none`, the pending tokens, and the numbers of its sequences. `none` is
    its own logits in a call that is not forced. A sequence that has ended, and waits for the others of its block, has
    no token pending."""

    logits: Float[Tensor, "batch block vocab"]
    none: Float[Tensor, "batch block vocab"]
    pending: Bool[Tensor, "batch block"]
    numbers: Sequence[int]


class Active(Inspector):
    """Collects the active sequences of each forward."""

    def __init__(self) -> None:
        self.seen: list[Bool[Tensor, " batch"]] = []

    def after_forward(
        self,
        step: Step,
        kind: StepKind,
        ids: Int[Tensor, "sequences length"],
        forward: Forward,
        active: Bool[Tensor, " batch"],
    ) -> None:
        self.seen.append(active)


@call_modes
def forced(runtime: Runtime, chats: Any, call: Mapping[str, Any], none: Sequence[Forced] = ()) -> list[Forced]:
    """The forwards of a call. With the forwards of `none` its logits decide the tokens, so that all arms see the same
    canvases."""
    seen, inspector = list[Forced](), Active()
    with runtime.begin(runtime.prepare(chats, **call), inspector=inspector) as (denoiser, _):
        canvas, steps = denoiser.canvas, denoiser.steps()
        try:
            forward, pass_ = next_pass(steps)
            while True:
                start = pass_.final
                assert isinstance(start, int), "one border, since prompts have equally many tokens"
                pending = canvas.pending(start, start + canvas.block_length).clone()
                logits = forward.logits(pass_)
                theirs = none[len(seen)].none if none else logits
                seen.append(Forced(logits.clone(), theirs.clone(), pending, canvas.numbers))
                forward, pass_ = next_pass(steps, theirs.clone())
        except StopIteration:
            pass
    assert not none or len(seen) == len(none), "the same tokens take the same steps"
    pairs = zip(seen, inspector.seen, strict=True)
    return [replace(each, pending=each.pending & active[:, None]) for each, active in pairs]


def forced_kl(seen: Sequence[Forced]) -> list[float]:
    """KL of an arm's distribution of a token from that of `none`, on the canvases of `none`, by sequence. It is the
    mean over the pending tokens of a forward, and then over forwards."""
    found: dict[int, list[float]] = {number: [] for number in seen[0].numbers}
    for each in seen:
        for number, kl, pending in zip(each.numbers, token_kl(each.none, each.logits), each.pending, strict=True):
            if pending.any():
                found[number].append(float(kl[pending].mean()))
    return [fmean(values) for values in found.values()]


def token_kl(theirs: Float[Tensor, "*rows vocab"], ours: Float[Tensor, "*rows vocab"]) -> Float64[Tensor, "*rows"]:
    """KL(theirs ‖ ours) by row."""
    theirs, ours = (each.double().log_softmax(-1) for each in (theirs, ours))
    return torch.where(theirs.isfinite(), theirs.exp() * (theirs - ours), 0).sum(-1)
