"""The bytes of a call before anything is loaded: what fits, how far the context goes, and what to change."""

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.core.budget import MemoryBudget
from tiered.core.checks import check_multiple, check_switch, plain_number, unknown_name
from tiered.core.errors import TierCapacityError
from tiered.core.features import Account, Tier
from tiered.forward.stream_costs import StreamCosts
from tiered.models.config_source import read_config
from tiered.models.families import Family, family_of
from tiered.models.shape import BYTES_PER_ELEMENT, ModelShape
from tiered.planning.advice import PLAINER, Advice, advise
from tiered.planning.call_sizes import DEFAULT_BLOCK_LENGTH, check_policy, check_positions
from tiered.planning.card import plan_card
from tiered.planning.hidden_costs import HiddenCosts
from tiered.planning.library_costs import gpu_of
from tiered.planning.workload import LARGEST_SIZE, Workload, kv_bytes_per_token
from tiered.policies import DEFAULT_POLICY

if TYPE_CHECKING:
    from tiered.policies.base import Policy


@dataclass(frozen=True, slots=True, kw_only=True)
class TierPlan:
    """Bytes of one tier by account, and its cap (None: uncapped)."""

    accounts: Mapping[Account, int]
    cap: int | None

    @property
    def total(self) -> int:
        """Bytes in all."""
        return sum(self.accounts.values())

    @property
    def fits(self) -> bool:
        """Whether the total stays within the cap."""
        return self.cap is None or self.total <= self.cap


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What one call takes in each tier. Prints as a card.

    Attributes:
        model: what was asked for, by name.
        family: name of the model family.
        workload: the model's sizes, what the policy keeps, and the call's sizes.
        policy: name of the policy.
        policy_options: its options.
        tiers: bytes and cap of every tier: what the runtime books. Of a policy that keeps hidden states, what it books
            at most, since the sizes of clusters are not known before; with a disk tier, the share of the disk is close.
        largest_context: positions that fit every cap with all else equal, in whole blocks, up to what the model was
            made for; 0 where not even one block fits, None where no cap limits them.
        streams: the features of which some layers are streamed from the tiers below, so that the device's cap holds;
            None: all are on the device.
        hidden: what hidden states would take if the policy kept them, part of no tier's total; None: it does.
        warnings: what is allowed and still worth knowing.
        advice: what would make it fit; empty where it does.
    """

    model: str
    family: str
    workload: Workload
    policy: str
    policy_options: Mapping[str, Any]
    tiers: Mapping[Tier, TierPlan]
    largest_context: int | None
    streams: StreamCosts | None
    hidden: HiddenCosts | None
    warnings: tuple[str, ...]
    advice: tuple[Advice, ...]

    @property
    def shape(self) -> ModelShape:
        """Sizes of the model."""
        return self.workload.shape

    @property
    def fits(self) -> bool:
        """Whether every tier stays within its cap."""
        return all(tier.fits for tier in self.tiers.values())

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        return kv_bytes_per_token(self.shape, self.workload.dtype)

    def require_fit(self) -> None:
        """Raise `TierCapacityError`, with the advice as its hint, for the first tier that is too small."""
        for name, tier in self.tiers.items():
            if tier.cap is not None and tier.total > tier.cap:
                hint = "; or ".join(advice.text for advice in self.advice)
                raise TierCapacityError(tier.total, tier.cap, name, hint, tier.total)

    def as_dict(self) -> dict[str, Any]:
        """Plain types only, for JSON. Sizes are bytes, contexts positions."""
        shape, workload = self.shape, self.workload
        return {
            "model": self.model,
            "family": self.family,
            "parameters": shape.parameters,
            "layers": shape.layers,
            "width": shape.width,
            "heads": shape.heads,
            "kv_heads": shape.kv_heads,
            "head_dim": shape.head_dim,
            "vocab_size": shape.vocab_size,
            "max_context": shape.max_context,
            "noise": shape.noise,
            "context": workload.context,
            "batch": workload.batch,
            "cfg": workload.guidance,
            "sampled": workload.sampled,
            "block_length": workload.block_length,
            "max_new_tokens": workload.answer,
            "dtype": workload.dtype,
            "policy": self.policy,
            "policy_options": dict(self.policy_options),
            "fits": self.fits,
            "tiers": {
                name.value: {
                    "accounts": {account.value: size for account, size in tier.accounts.items()},
                    "total": tier.total,
                    "cap": tier.cap,
                    "fits": tier.fits,
                }
                for name, tier in self.tiers.items()
            },
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "largest_context": self.largest_context,
            "streamed": None if self.streams is None else self.streams.as_dict(),
            "if_hidden_states_were_kept": None if self.hidden is None else self.hidden.as_dict(),
            "warnings": list(self.warnings),
            "advice": [advice.as_dict() for advice in self.advice],
        }

    def __str__(self) -> str:
        return plan_card(self)


def plan(
    path_or_config: str | Path | Mapping[str, Any],
    *,
    context: int,
    batch: int = 1,
    policy: "str | Policy" = DEFAULT_POLICY,
    memory: MemoryBudget | int | str | None = None,
    block_length: int | None = None,
    max_new_tokens: int | None = None,
    dtype: str = "auto",
    cfg: bool = False,
    sampled: bool = False,
    device: str = "auto",
    **policy_options: Any,
) -> Plan:
    """Count the bytes of a call from the model's config.json alone; nothing is loaded or downloaded. What `generate`
    refuses of every such call, a plan refuses too.

    Args:
        path_or_config: a name, path or config that `tiered.models.config_source.read_config` takes.
        context: positions of the canvas, prompt and answer together, up to what the model was made for. A longer one
            is planned from a config that allows it.
        batch: sequences.
        policy: name of a policy, with its options as further keywords, or a policy.
        memory: cap of the device tier (`"24GiB"`), or a `MemoryBudget`.
        block_length: positions of a block; None: 32, or the answer's where that is shorter.
        max_new_tokens: positions of the answer, for policies that keep some features of it alone; None: any number.
        dtype: of weights and activations; "auto" takes the checkpoint's.
        cfg: classifier-free guidance, which doubles the sequences.
        sampled: whether proposing tokens takes room beside the logits: at a temperature above 0, where `top_p` or
            `top_k` cut, with `confidence="entropy"`, and under the rule `ancestral`.
        device: as for `from_pretrained`: libraries take room on CUDA devices. "cuda" on a machine without one counts
            the most that any card takes.

    Raises:
        TypeError, ValueError: an argument out of range or at odds with another, with the model or with the policy; no
            such model, policy or option. Names what is allowed.
    """
    # Imported here so that importing this module, as `tiered plan --help` does, needs no torch.
    from tiered.policies.registry import check_arguments, make_policy

    check_arguments(plan, policy, policy_options)
    check_switch("cfg", cfg)
    check_switch("sampled", sampled)
    config = read_config(path_or_config)
    family = family_of(config)
    shape = family.shape(config)
    chosen = make_policy(policy, **policy_options)
    budget = MemoryBudget.of(memory)
    name = _name(path_or_config, config, family)
    answer = None if max_new_tokens is None else _size("max_new_tokens", max_new_tokens)
    workload = Workload(
        shape=shape,
        policy=chosen,
        batch=_size("batch", batch),
        context=_size("context", context),
        block_length=_block(block_length, context if answer is None else answer),
        dtype=_dtype(dtype, shape),
        answer=answer,
        guidance=cfg,
        sampled=sampled,
        gpu=gpu_of(device),
    )
    _check(workload, name)
    accounts = workload.accounts(budget)
    kept = make_policy("polestar").hidden()
    return Plan(
        model=name,
        family=family.name,
        workload=workload,
        policy=chosen.name,
        policy_options=asdict(chosen),
        tiers={tier: TierPlan(accounts=accounts[tier], cap=budget.cap(tier)) for tier in Tier},
        largest_context=_largest_context(workload, budget),
        streams=workload.costs(budget).streams,
        hidden=HiddenCosts.of(workload, kept) if workload.hidden is None and kept is not None else None,
        warnings=tuple(_warnings(family)),
        advice=tuple(advise(workload, budget, {name: make_policy(name) for name in PLAINER})),
    )


def _name(path_or_config: str | Path | Mapping[str, Any], config: Mapping[str, Any], family: Family) -> str:
    if isinstance(path_or_config, Mapping):
        return str(config.get("_name_or_path") or f"a {family.name} config")
    return str(path_or_config)


def _largest_context(workload: Workload, budget: MemoryBudget) -> int | None:
    if all(budget.cap(tier) is None for tier in Tier):
        return None
    block = workload.block_length
    largest = workload.largest("context", budget, multiple=block)
    return None if largest + block >= LARGEST_SIZE else min(largest, workload.shape.max_context // block * block)


def _check(workload: Workload, name: str) -> None:
    """Refuse what no call can be."""
    shape, context, block = workload.shape, workload.context, workload.block_length
    if workload.answer is not None:
        check_multiple("max_new_tokens", workload.answer, block, f"block_length = {block}")
        if context <= workload.answer:
            raise ValueError(f"context = {context} has no room for a prompt and max_new_tokens = {workload.answer}")
    if context < block:
        raise ValueError(f"context = {context} has no room for block_length = {block}")
    check_positions(shape, context, "context =")
    # Of all the rules that the model's noise goes with, one that asks for least: a plan knows none.
    masks = shape.noise == "mask"
    check_policy(
        workload.policy,
        shape,
        name=name,
        block_length=block,
        guidance="cfg = True" if workload.guidance else None,
        ordered=masks,
        rewrites=not masks,
    )


def _warnings(family: Family) -> Iterator[str]:
    if family.loader is None:
        yield f"{family.name} can be planned, but not loaded yet"


def _block(block_length: int | None, longest: int) -> int:
    return min(DEFAULT_BLOCK_LENGTH, longest) if block_length is None else _size("block_length", block_length)


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
