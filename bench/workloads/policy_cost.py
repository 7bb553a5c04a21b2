"""Costs of a policy's steps, refreshes, updates and whole run, beside a full pass and the dual cache."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import mean, median
from typing import Any, NamedTuple

from measuring.worker import refusing

from tiered.core.ops import Op
from tiered.core.spans import recording
from tiered.output import GenerationOutput
from tiered.policies.base import Policy, StepKind
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.subjects import loaded, prompts, variant_named
from workloads.timing import Timing

BLOCK_FORWARDS = 7  # forwards of the block-only call, whose steps are all alike
KINDS = (StepKind.REFRESH, StepKind.UPDATE, StepKind.STEP)  # of policies for canvases
TIMED = (
    *(f"{kind.value}_{figure}" for kind in KINDS for figure in ("ms", "over_full", "over_floor")),
    *("full_ms", "layer_ms", "block_only_layer_ms", "overhead", "run_ms", "run_over_none", "run_over_dual"),
)


class Pass(NamedTuple):
    """A forward with its commit. `chosen_ms`: ms to choose rows, and in all layers except the last, that of logits."""

    kind: StepKind
    rows: float
    ms: float
    chosen_ms: float


def passes(runtime: Runtime, policy: Policy, prompt: Any, **call: Any) -> tuple[GenerationOutput, list[Pass]]:
    """A call, and its forwards."""
    timing = Timing()
    with recording(timing):
        out = runtime.with_policy(policy).generate(prompt, stop_at_eos=False, **call)
    layers, plans = [0] * out.num_forwards, dict[int, int]()
    for each in timing.ranges:
        if each.forward is not None:
            if each.op is Op.POLICY:  # the first of a forward; the second learns from its commit
                plans.setdefault(each.forward, each.ns)
            elif each.op is Op.LAYER and each.layer != runtime.model.shape.layers - 1:
                layers[each.forward] += each.ns
    figures = zip(timing.kinds, out.rows_per_step, out.timings.steps, layers, strict=True)
    return out, [
        Pass(StepKind(kind), rows, 1e3 * seconds, (plans[number] + ns) / 1e6)
        for number, (kind, rows, seconds, ns) in enumerate(figures)
    ]


def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """`settings` has those of a model, "policy" (a variant's name), "positions" (prompt and answer), "answer" and
    "block" (tokens). The policy, a full pass, the block-only step and the dual cache take turns."""
    positions, answer, block = (settings[name] for name in ("positions", "answer", "block"))
    variant, runtime = variant_named(settings["policy"]), loaded(settings, paths, positions)
    prompt, in_blocks = prompts(settings, positions - answer), {"max_new_tokens": answer, "block_length": block}

    def full() -> list[Pass]:
        return passes(runtime, make_policy("none"), prompt, **in_blocks, block_steps=1)[1]

    with refusing():
        policy, call = variant.make(), variant.call(answer=answer, block=block)
        passes(runtime, policy, prompt, **call, block_steps=1)  # pays for thread pools and workspaces
        some = full()
        duals = [passes(runtime, make_policy("fast_dllm_dual"), prompt, **in_blocks)[0]]
        run, own = passes(runtime, policy, prompt, **call)
        plain = [each for each in own if each.kind is StepKind.STEP]
        beside = block_only(runtime, settings, round(median(each.rows for each in plain))) if plain else []
        duals.append(passes(runtime, make_policy("fast_dllm_dual"), prompt, **in_blocks)[0])
    full_ms = median(each.ms for each in [*some, *full()])
    figures = {"full_ms": full_ms} | whole_run(run, duals, full_ms) | overhead(plain, beside, settings["layers"])
    for kind in dict.fromkeys(each.kind for each in own):
        figures |= of_kind(kind, [each for each in own if each.kind is kind], positions, full_ms)
    yield figures


def block_only(runtime: Runtime, settings: Mapping[str, Any], rows: int) -> list[Pass]:
    """The dual cache's steps over the last `rows` positions, which are one block."""
    length = max(rows, 2)  # a refresh, and a step
    call = {"max_new_tokens": length, "block_length": length, "steps": min(BLOCK_FORWARDS, length)}
    return passes(runtime, make_policy("fast_dllm_dual"), prompts(settings, settings["positions"] - length), **call)[1][
        1:
    ]


def of_kind(kind: StepKind, own: Sequence[Pass], positions: int, full_ms: float) -> dict[str, Any]:
    """Rows and time of a kind of forward, over a full pass, and over the share of the positions that it recomputes."""
    ms = median(each.ms for each in own)
    # Forward by forward, because a policy's rows may differ from one to the next.
    over_floor = median(each.ms / each.rows for each in own) * positions / full_ms
    figures = {"forwards": len(own), "rows": median(each.rows for each in own), "ms": ms, "over_full": ms / full_ms}
    return {f"{kind.value}_{name}": figure for name, figure in (figures | {"over_floor": over_floor}).items()}


def whole_run(run: GenerationOutput, duals: Sequence[GenerationOutput], full_ms: float) -> dict[str, Any]:
    """Time and rows of all forwards over the dual cache's, before and behind, and over those of as many full passes."""
    count, ms, rows = run.num_forwards, 1e3 * run.timings.total, sum(run.rows_per_step)
    return {
        "forwards": count,
        "run_ms": ms,
        "run_rows": rows,
        "run_over_dual": run.timings.total / mean(dual.timings.total for dual in duals),
        "rows_over_dual": rows / sum(duals[0].rows_per_step),
        "run_over_none": ms / (count * full_ms),
        "rows_over_none": rows / (count * run.sequences.shape[1]),
    }


def overhead(plain: Sequence[Pass], beside: Sequence[Pass], layers: int) -> dict[str, float]:
    """The cost of selecting, gathering and scattering rows: a layer of a plain step over one of the block-only step."""
    if not plain or layers < 2:
        return {}
    own, block = (median(each.chosen_ms for each in steps) / (layers - 1) for steps in (plain, beside))
    return {"layer_ms": own, "block_only_layer_ms": block, "overhead": own / block}
