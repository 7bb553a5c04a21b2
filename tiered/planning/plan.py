"""The bytes of a call before anything is loaded: what fits, how far the context goes, and what to change."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.canvas import most_columns_in_blocks
from tiered.core.checks import check_multiple, check_switch, plain_number, unknown_name
from tiered.core.features import Tier
from tiered.core.rates import Rates, rates_of
from tiered.forward.library_bytes import LARGEST_GPU, gpu_of
from tiered.forward.sizes import AUTO, DEFAULT_BLOCK_LENGTH, RAW, CallSizes, Gpu, kv_code
from tiered.models.checkpoint import Checkpoint
from tiered.models.config_source import read_config
from tiered.models.families import Family, family_of
from tiered.models.locate import find_directory
from tiered.models.quantised import require_readable
from tiered.models.rotation import rotation_of, stretched
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.models.weight_form import RAW_WEIGHTS, WeightForm, held_form
from tiered.planning.advice import advise, too_slow
from tiered.planning.card import Plan, TierPlan, machine_of
from tiered.planning.checks import beyond_training, check_block, check_policy, check_positions
from tiered.planning.choice import choose, choose_form
from tiered.planning.times import TOKENS_PER_FORWARD, call_time
from tiered.planning.workload import LARGEST_SIZE, HiddenBytes, Workload
from tiered.policies import DEFAULT_POLICY
from tiered.policies.base import Policy
from tiered.policies.registry import check_arguments, make_policy


def plan(
    path_or_config: str | Path | Mapping[str, Any],
    *,
    context: int,
    batch: int = 1,
    policy: str | Policy = DEFAULT_POLICY,
    memory: MemoryBudget | int | str | None = None,
    block_length: int | None = None,
    max_new_tokens: int | None = None,
    dtype: str = "auto",
    cfg: bool = False,
    sampled: bool = False,
    device: str = "auto",
    weights: str | WeightForm = "auto",
    kv: str = "raw",
    tokens_per_forward: int = 1,
    rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
    **policy_options: Any,
) -> Plan:
    """Count the bytes of a call from the model's config.json alone; nothing is loaded or downloaded. What `generate`
    refuses of every such call, a plan refuses too.

    Args:
        path_or_config: a name, path or config that `tiered.models.config_source.read_config` takes.
        context: positions of the canvas, prompt and answer together, up to what the model was made for, or its
            rotation is stretched to. A model that sees blocks takes whole ones: `context` is rounded up as `generate`
            does, and in a batch as for the prompt lengths that take the most.
        batch: sequences.
        policy: name of a policy, with its options as further keywords, or a policy. What it leaves open is chosen as
            `generate` chooses it: by the rates of `device`, or by nominal ones where it names no machine, for a call
            whose prompts are all as long as the canvas has room for.
        memory: cap of the device tier (`"24GiB"`), or a `MemoryBudget`.
        block_length: positions of a block; None: what the checkpoint was made for, else 32, or the answer's where that
            is shorter.
        max_new_tokens: positions of the answer, for policies that keep some features of it alone; None: any number.
        dtype: of weights and activations; "auto" takes the checkpoint's.
        cfg: classifier-free guidance, which doubles the sequences.
        sampled: whether proposing tokens takes room beside the logits: at a temperature above 0, where `top_p` or
            `top_k` cut, with `confidence="entropy"`, and under a rule that draws what it rewrites.
        device: the machine that the plan is for. "auto", "cpu" and "cuda" mean this one, as for `from_pretrained`;
            "cuda" on a machine without a GPU counts the most that libraries take on any card. A GPU by name
            (`tiered.core.rates.DEVICES`), as its maker describes it, or a file that `tiered rates --out` wrote, brings
            the time of the call as well.
        tokens_per_forward: that the call is expected to commit in each, of a sequence; by default one, as `generate`
            does.
        weights, kv, rope_theta, rope_scaling: as for `from_pretrained`.

    Raises:
        TypeError, ValueError: an argument out of range or at odds with another, with the model or with the policy; no
            such model, policy or option. Names what is allowed.
    """
    check_arguments(plan, policy, policy_options)
    check_switch("cfg", cfg)
    check_switch("sampled", sampled)
    config = stretched(read_config(path_or_config), rope_theta, rope_scaling)
    family = family_of(config)
    shape = family.shape(config)
    chosen = make_policy(policy, **policy_options)
    budget = MemoryBudget.of(memory)
    name = _name(path_or_config, config, family)
    rates, gpu = _machine(device)
    context, batch = _size("context", context), _size("batch", batch)
    answer = None if max_new_tokens is None else _size("max_new_tokens", max_new_tokens)
    code = kv_code(kv, shape)
    block = _block(shape, block_length, context if answer is None else answer, name)
    batch, context = _size("batch", batch), _size("context", context)
    if answer is not None and context <= answer:
        raise ValueError(f"context = {context} has no room for a prompt and max_new_tokens = {answer}")
    if shape.block_causal:  # as `tiered.prepare` counts them
        rounded, answer = most_columns_in_blocks(context, block, answer, batch)
        context = max(context, min(rounded, shape.max_context // block * block))
    sizes = CallSizes(
        shape=shape,
        batch=batch,
        context=context,
        block_length=block,
        dtype=_dtype(dtype, shape),
        weights=RAW_WEIGHTS if weights == AUTO else WeightForm.of(weights),
        kv=None if code == AUTO else code,
        answer=answer,
        guidance=cfg,
        sampled=sampled,
        gpu=gpu,
    )
    _check(chosen, sizes, name)
    tokens = min(_size("tokens_per_forward", tokens_per_forward), sizes.block_length)
    form_why = ""
    held = _held(path_or_config, config, shape) if str(weights) in (AUTO, RAW) else None
    if held is not None:
        sizes = replace(sizes, weights=held)
    elif weights == AUTO:
        form, form_why = choose_form(chosen, shape, sizes.dtype, gpu, budget, rates=rates)
        sizes = replace(sizes, weights=form)
    choice = choose(chosen, sizes, budget, kv_open=code == AUTO, tokens_per_forward=tokens, rates=rates)
    chosen, sizes = choice.policy, replace(sizes, kv=choice.kv)
    workload = Workload(chosen, sizes)
    accounts, needed = workload.accounts(budget), workload.needed(budget)
    times = () if rates is None else tuple(
        call_time(chosen, sizes, needed, rates, tokens_per_forward=each)
        for each in sorted({*TOKENS_PER_FORWARD, tokens})
        if each <= sizes.block_length
    )  # fmt: skip
    shown = next((time for time in times if time.tokens_per_forward == tokens), None)
    warnings = (beyond_training(shape, sizes.context), form_why, choice.kv_why, too_slow(shown))
    return Plan(
        model=name,
        machine=machine_of(device, gpu, rates),
        stretch=_stretch(config, shape),
        family=family.name,
        sizes=sizes,
        policy=chosen.name,
        policy_options=chosen.options,
        why=choice.why,
        tiers={tier: TierPlan(accounts=accounts[tier], cap=budget.cap(tier)) for tier in Tier},
        largest_context=_largest_context(workload, budget),
        streams=needed.streams,
        weights=needed.weights,
        hidden=HiddenBytes.of(sizes) if needed.records is None and not shape.block_causal else None,
        advice=tuple(advise(workload, budget)),
        rates=rates,
        tokens_per_forward=tokens,
        times=times,
        warnings=tuple(filter(None, warnings)),
    )


def _held(source: object, config: Mapping[str, Any], shape: ModelShape) -> WeightForm | None:
    """The form that the checkpoint's files hold the weights in; None: they are raw."""
    method = require_readable(config)
    if method is None:
        return None
    directory = find_directory(source) if isinstance(source, str | Path) else None
    if directory is None:
        raise ValueError(
            f"the weights are quantised by {method}, and only the files say how: plan their directory, or name the "
            "code: weights = 'fp8', 'int8', 'nvfp4' or 'int4'"
        )
    return held_form(Checkpoint(directory, shape, config).codes, shape)


def _name(path_or_config: str | Path | Mapping[str, Any], config: Mapping[str, Any], family: Family) -> str:
    if isinstance(path_or_config, Mapping):
        return str(config.get("_name_or_path") or f"a {family.name} config")
    return str(path_or_config)


def _stretch(config: Mapping[str, Any], shape: ModelShape) -> str:
    """How the rotation is stretched; "": it is not."""
    rotation = rotation_of(config, head_dim=shape.head_dim, positions=shape.trained_context)
    if rotation.factor == 1:
        return ""
    return "rope_theta" if rotation.kind == "default" else f"{rotation.kind}:{rotation.factor:g}"


def _machine(device: str) -> tuple[Rates | None, Gpu | None]:
    """How fast it is, where that is known; and what a call computes on."""
    name = str(device)
    if name in ("auto", "cpu") or name.partition(":")[0] == "cuda":
        return None, gpu_of(device)
    rates = rates_of(device)
    return rates, replace(LARGEST_GPU, multiprocessors=rates.multiprocessors) if rates.multiprocessors else None


def _largest_context(workload: Workload, budget: MemoryBudget) -> int | None:
    if all(budget.cap(tier) is None for tier in Tier):
        return None
    block = workload.sizes.block_length
    largest = workload.largest("context", budget, multiple=block)
    most = workload.sizes.shape.max_context // block * block
    return None if largest + block >= LARGEST_SIZE else min(largest, most)


def _check(policy: Policy, sizes: CallSizes, name: str) -> None:
    """Refuse what no call can be."""
    shape, context, block = sizes.shape, sizes.context, sizes.block_length
    if sizes.answer is not None:
        check_multiple("max_new_tokens", sizes.answer, block, f"block_length = {block}")
    if context < block:
        raise ValueError(f"context = {context} has no room for block_length = {block}")
    check_positions(shape, context, "context =")
    # Of all the rules that the model's noise goes with, one that asks for least: a plan knows none.
    masks = shape.noise == "mask"
    guidance = "cfg = True" if sizes.guidance else None
    check_policy(policy, shape, name=name, block_length=block, guidance=guidance, ordered=masks, rewrites=not masks)


def _block(shape: ModelShape, block_length: int | None, longest: int, name: str) -> int:
    given = None if block_length is None else _size("block_length", block_length)
    if shape.block_length is not None:
        return check_block(shape, given, name=name)
    return given or min(DEFAULT_BLOCK_LENGTH, longest)


def _size(name: str, value: Any) -> int:
    value = plain_number(value)
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} = {value!r}; a positive int is allowed")
    if value < 1:
        raise ValueError(f"{name} = {value}; a positive int is allowed")
    return value


def _dtype(dtype: object, shape: ModelShape) -> str:
    name = str(dtype).removeprefix("torch.")
    if name != "auto" and name not in BYTES_PER_ELEMENT:
        raise unknown_name("dtype", name, ["auto", *BYTES_PER_ELEMENT])
    return shape.dtype if name == "auto" else name
