"""The bytes of a call before anything is loaded: whether it fits, the largest context, and changes that help."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from tiered.core.budget import MemoryBudget
from tiered.core.canvas import most_columns_in_blocks
from tiered.core.checks import check_integer, check_multiple, check_switch, plain_number
from tiered.core.features import Tier
from tiered.core.rates import Rates, rates_of
from tiered.forward.library_bytes import LARGEST_GPU, gpu_of
from tiered.forward.sizes import DEFAULT_BLOCK_LENGTH, RAW, CallShape, Gpu, kv_code
from tiered.models.checkpoint import Checkpoint
from tiered.models.families import family_of
from tiered.models.locate import find_directory, read_config
from tiered.models.quantised import require_readable
from tiered.models.rotation import rotation_of, stretched
from tiered.models.shape import ModelShape, named_dtype
from tiered.models.weight_form import RAW_WEIGHTS, WeightForm, form_of
from tiered.planning.advice import advise, code_savings
from tiered.planning.call_bytes import CallBytes
from tiered.planning.card import Plan, TierPlan, machine_of
from tiered.planning.checks import beyond_training, check_block, check_policy, check_positions
from tiered.planning.choice import choose
from tiered.planning.times import TOKENS_PER_FORWARD, CallTime, call_time
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
    weights: str | WeightForm = RAW,
    kv: str = RAW,
    tokens_per_forward: int = 1,
    rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
    **policy_options: Any,
) -> Plan:
    """Count the bytes of a call from the model's config.json alone; nothing is loaded or downloaded. A plan refuses
    every call that `generate` would always refuse.

    Args:
        path_or_config: a name, path or config that `tiered.models.locate.read_config` takes.
        context: positions of the canvas, prompt and answer together. A model with exact blocks takes whole ones.
        batch: sequences.
        policy: a name, with options as further keywords, or a policy; "auto" is decided as by `generate`.
        memory: cap of the device tier (`"24GiB"`), or a `MemoryBudget`; None for no cap.
        block_length: positions of a block; None for the checkpoint's, else 32, or a shorter answer's.
        max_new_tokens: positions of the answer; None for any number.
        cfg: whether classifier-free guidance doubles the sequences.
        sampled: whether proposing needs room: for a temperature above 0, a cut, entropy, or a rule that draws rewrites.
        device: this machine ("auto", "cpu", "cuda"; "cuda" without a GPU counts the most of any card), or one whose
            seconds are planned too: a GPU by name (`tiered.core.rates.DEVICES`), or a file of `tiered rates --out`.
        tokens_per_forward: tokens of a sequence that each forward is expected to commit.
        dtype, weights, kv, rope_theta, rope_scaling: as in `from_pretrained`.

    Raises:
        TypeError, ValueError: an argument is out of range, or contradicts another, the model or the policy. Or there is
            no such model, policy or option. The error names the allowed values.
    """
    check_arguments(plan, policy, policy_options)
    check_switch("cfg", cfg)
    check_switch("sampled", sampled)
    config = stretched(read_config(path_or_config), rope_theta, rope_scaling)
    asked, (rates, gpu) = make_policy(policy, **policy_options), _machine(device)
    name, shape = _name(path_or_config, config), family_of(config).shape(config)
    context, batch, block, answer = _positions(shape, name, context, batch, max_new_tokens, block_length)
    sizes = CallShape(
        shape=shape,
        batch=batch,
        context=context,
        block_length=block,
        answer=answer,
        dtype=named_dtype(dtype, shape.dtype),
        weights=_form(weights, path_or_config, config, shape),
        kv=kv_code(kv, shape),
        gpu=gpu,
        guidance=cfg,
        sampled=sampled,
    )
    _check(asked, sizes, name)
    tokens = min(_size("tokens_per_forward", tokens_per_forward), block)
    budget = MemoryBudget.of(memory)
    choice = choose(asked, sizes, budget)
    workload = Workload(choice.policy, sizes)
    needed = workload.needed(budget)
    accounts = needed.tiers(budget)
    made = Plan(
        model=name,
        family=family_of(config).name,
        machine=machine_of(device, gpu, rates),
        sizes=sizes,
        policy=choice.policy.name,
        policy_options=choice.policy.options,
        why=choice.why,
        tiers={tier: TierPlan(accounts=accounts[tier], cap=budget.cap(tier)) for tier in Tier},
        largest_context=_largest_context(workload, budget),
        stretch=_stretch(config, shape),
        streams=needed.streams,
        weights=needed.weights,
        hidden=HiddenBytes.of(sizes) if needed.records is None and not shape.block_causal else None,
        buffers=tuple(needed.declared),
        advice=tuple(advise(workload, budget)),
        rates=rates,
        tokens_per_forward=tokens,
        times=_times(workload, needed, rates, tokens),
    )
    return replace(made, warnings=_warnings(workload, budget, made.shown_time))


def _times(workload: Workload, needed: CallBytes, rates: Rates | None, tokens: int) -> tuple[CallTime, ...]:
    """Calls with increasing tokens a forward, `tokens` among them; empty without `rates`."""
    if rates is None:
        return ()
    counts = [each for each in sorted({*TOKENS_PER_FORWARD, tokens}) if each <= workload.sizes.block_length]
    return tuple(call_time(workload.policy, workload.sizes, needed, rates, tokens_per_forward=each) for each in counts)


def _warnings(workload: Workload, budget: MemoryBudget, time: CallTime | None) -> tuple[str, ...]:
    warnings = [beyond_training(workload.sizes.shape, workload.sizes.context), code_savings(workload, budget)]
    if time is not None and time.tokens_per_second < 1:
        warnings.append(
            f"{time.tokens_per_second:.2g} tokens a second by this estimate, {time.tokens_per_forward} a forward: a "
            "call of these sizes is too slow to be of use"
        )
    return tuple(filter(None, warnings))


def _positions(
    shape: ModelShape, name: str, context: int, batch: int, max_new_tokens: int | None, block_length: int | None
) -> tuple[int, int, int, int | None]:
    """The context, the sequences, the length of a block and that of the answer, None for any."""
    context, batch = _size("context", context), _size("batch", batch)
    answer = None if max_new_tokens is None else _size("max_new_tokens", max_new_tokens)
    given = None if block_length is None else _size("block_length", block_length)
    if shape.block_length is None:
        block = given or min(DEFAULT_BLOCK_LENGTH, context if answer is None else answer)
    else:
        block = check_block(shape, given, name=name)
    if answer is not None and context <= answer:
        raise ValueError(f"context = {context} has no room for a prompt and max_new_tokens = {answer}")
    if shape.block_causal:  # counted as in `tiered.prepare`
        rounded, answer = most_columns_in_blocks(context, block, answer, batch)
        context = max(context, min(rounded, shape.max_context // block * block))
    return context, batch, block, answer


def _form(weights: str | WeightForm, source: object, config: Mapping[str, Any], shape: ModelShape) -> WeightForm:
    """The form of the weights by its name. With "raw", weights that are coded in the files keep their code."""
    form, method = WeightForm.of(weights), require_readable(config)
    if method is None:
        return form
    directory = find_directory(source) if isinstance(source, str | Path) else None
    if directory is None or not any(directory.glob("*.safetensors")):
        if form != RAW_WEIGHTS:
            return form
        raise ValueError(
            f"the weights are quantised by {method}, and only the files say how: plan their directory, or name the "
            "code: weights = 'fp8', 'int8', 'nvfp4' or 'int4'"
        )
    names = family_of(config).read(config).parameter_names
    return form_of(form, Checkpoint(directory, shape, config).codes, names, shape)


def _name(path_or_config: str | Path | Mapping[str, Any], config: Mapping[str, Any]) -> str:
    if isinstance(path_or_config, Mapping):
        return str(config.get("_name_or_path") or f"a {family_of(config).name} config")
    return str(path_or_config)


def _stretch(config: Mapping[str, Any], shape: ModelShape) -> str:
    """How the rotation is stretched; "" if it is not."""
    rotation = rotation_of(config, head_dim=shape.head_dim, positions=shape.trained_context)
    if rotation.factor == 1:
        return ""
    return "rope_theta" if rotation.kind == "default" else f"{rotation.kind}:{rotation.factor:g}"


def _machine(device: str) -> tuple[Rates | None, Gpu | None]:
    """The rates of `device`, None for a machine without a name; and the GPU of a call, None for a CPU."""
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


def _check(policy: Policy, sizes: CallShape, name: str) -> None:
    shape, context, block = sizes.shape, sizes.context, sizes.block_length
    if sizes.answer is not None:
        check_multiple("max_new_tokens", sizes.answer, block, f"block_length = {block}")
    if context < block:
        raise ValueError(f"context = {context} has no room for block_length = {block}")
    check_positions(shape, context, "context =")
    # The rule is unknown, so assume the least demanding one that fits the model's noise.
    masks = shape.noise == "mask"
    guidance = "cfg = True" if sizes.guidance else None
    check_policy(policy, shape, name=name, block_length=block, guidance=guidance, ordered=masks, rewrites=not masks)


def _size(name: str, value: Any) -> int:
    value = plain_number(value)
    check_integer(name, value, least=1)
    return value
