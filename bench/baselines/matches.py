"""Implementations of one algorithm: official code, policies with the options that follow it, and transformers."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tiered.core.checks import unknown_name

# Commit rules, as options of `generate`.
RULES: Mapping[str, dict[str, Any]] = {
    "one": {},
    "threshold": {"confidence_threshold": 0.9},
    "early": {"confidence_threshold": 0.9, "commit": "drift_aware", "early_threshold": 0.7},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Match:
    """Peers of one algorithm.

    Attributes:
        rules: keys of `RULES` that its official code has.
        agree: options by the peer's name, of peers that answer alike, token for token, unless rounding decides a
            ranking. See workloads/matches.py.
        others: options by the peer's name, of peers with the same schedule that may answer otherwise.
    """

    rules: tuple[str, ...]
    agree: dict[str, Any]
    others: dict[str, Any]


# Policies take these under the names of the official scripts, too.
DLLM: dict[str, Any] = {"prompt_interval_steps": 50, "gen_interval_steps": 7, "transfer_ratio": 0.25}
DKV: dict[str, Any] = {"cache_reloading_step": 8}
# Options of `PrefixCache`; None for no cache, with a full forward every step.
TRANSFORMERS: dict[str, dict[str, Any] | None] = {
    "transformers, no cache": None,
    "transformers, cache": {},
    "transformers, offloaded": {"offloading": True},
    "transformers, quantized": {"backend": "quanto"},
    "transformers, quantized hqq": {"backend": "hqq"},
    "transformers, quantized fp8": {"backend": "fp8"},
}
NO_CACHE: dict[str, Any] = {"none": {}, "transformers, no cache": None}
STORED = {name: options for name, options in TRANSFORMERS.items() if options}
# `dkv_greedy` is in none: it answers in random order.
MATCHES: Mapping[str, Match] = {
    "none": Match(rules=("one",), agree={"official, vanilla": {}} | NO_CACHE, others={}),
    "threshold": Match(rules=("threshold",), agree={"official, fast_plain": {}} | NO_CACHE, others={}),
    "prefix": Match(
        rules=("one", "threshold"),
        agree={"official, fast_prefix": {}, "fast_dllm_prefix": {}, "transformers, cache": {}},
        others=STORED,
    ),
    "dual": Match(rules=("one", "threshold"), agree={"official, fast_dual": {}, "fast_dllm_dual": {}}, others={}),
    "dllm_cache": Match(
        rules=("one",),
        agree={"official, dllm_cache": DLLM, "dllm_cache, parity": DLLM},
        others={"dllm_cache": DLLM},
    ),
    "dkv": Match(
        rules=("one",),
        agree={"official, dkv_decode": DKV, "dkv_decode, parity": DKV},
        others={"dkv_decode": DKV, "dkv_pd": DKV, "dkv_prefill": {}},
    ),
    # The window's preset has the options that equal the official schedule; k-means begins elsewhere.
    "polestar": Match(
        rules=("one", "threshold", "early"),
        agree={},
        others={"official, polestar": {}, "polestar-window": {}, "polestar": {}, "polestar-paper": {}},
    ),
}


def matches_of(names: Iterable[str], rules: Iterable[str], *, answer: int, block: int) -> Iterator[dict[str, Any]]:
    """Settings of every match under each of its `rules`, for answers of `answer` tokens. Raises `ValueError`."""
    for name in names:
        if name not in MATCHES:
            raise unknown_name("match", name, MATCHES)
        match = MATCHES[name]
        for rule in rules:
            if rule not in RULES:
                raise unknown_name("rule", rule, RULES)
            if rule in match.rules:
                call: dict[str, Any] = {"max_new_tokens": answer, "block_length": block} | RULES[rule]
                of: dict[str, Any] = {"match": name, "rule": rule, "call": call}
                yield of | {"peers": match.agree | match.others, "agree": len(match.agree)}


def official_of(policy: str) -> tuple[str, Any] | None:
    """The official implementation of a policy's algorithm, and its options there; None if there is none."""
    for match in MATCHES.values():
        peers = match.agree | match.others
        if policy in peers:
            found = ((peer.removeprefix("official, "), peers[peer]) for peer in peers if peer.startswith("official, "))
            return next(found, None)
    return None
