"""The bytes that Polestar holds in each tier, beside the dual cache: runs, and plans for LLaDA-8B.

A part of bench/polestar.py.
"""

from typing import Any

import torch
from step_cost import VOCABULARY, random_model

import tiered
from tiered.core.features import Account, Tier
from tiered.models.presets import read_preset
from tiered.policies.none import NoCache

BLOCK = 32


def measured_bytes(runtime: tiered.Runtime, prompt: torch.Tensor) -> dict[str, Any]:
    """Bytes of a run with an update in each of two blocks, beside the dual cache's."""
    measured: dict[str, Any] = {}
    call = {"max_new_tokens": 2 * BLOCK, "block_length": BLOCK, "steps": 8, "stop_at_eos": False}
    for name in ("fast_dllm_dual", "polestar"):
        out = runtime.with_policy(name).generate(prompt, **call)
        measured[name] = {
            tier.value: {account.value: size for account, size in report.at_peak.items()}
            for tier, report in out.memory.tiers.items()
            if report.at_peak
        }
    shape, positions = runtime.model.shape, prompt.shape[1] + 2 * BLOCK
    return {
        "positions": positions,
        "width": shape.width,
        "layers": shape.layers,
        "bytes": measured,
        "features_over_dual": _features(measured["polestar"][Tier.DEVICE])
        / _features(measured["fast_dllm_dual"][Tier.DEVICE]),
        "host_bytes_per_element": measured["polestar"][Tier.HOST][Account.HIDDEN]
        / ((shape.layers - 2) * positions * shape.width),
    }


def memory(runtime: tiered.Runtime, quick: bool) -> dict[str, Any]:
    """Bytes of two measured runs, and of plans."""
    width, layers, context = (256, 4, 1024) if quick else (512, 8, 4096)
    model = random_model(width, layers, context)
    prompt = torch.randint(0, VOCABULARY - 2, (1, context - 2 * BLOCK))
    runs = {
        "random": measured_bytes(tiered.Runtime(model, policy=NoCache()), prompt),
        "embedded": measured_bytes(runtime, torch.randint(0, 100, (1, 2048 - 2 * BLOCK))),
    }
    plans, llada = {}, read_preset("llada-8b") | {"max_sequence_length": 32768}
    for context in (4096, 16384, 32768):
        dual, polestar = (
            tiered.plan(llada, context=context, block_length=BLOCK, policy=name)
            for name in ("fast_dllm_dual", "polestar")
        )
        device, host = (polestar.tiers[tier].accounts for tier in (Tier.DEVICE, Tier.HOST))
        plans[context] = {
            "device": dict(device),
            "host": dict(host),
            "features_over_dual": _features(device) / _features(dual.tiers[Tier.DEVICE].accounts),
            "host_bytes_per_element": host[Account.HIDDEN]
            / ((polestar.shape.layers - 2) * context * polestar.shape.width),
        }
    return {"runs": runs, "llada-8b plans": plans}


def _features(accounts: Any) -> int:
    kept = (Account.KEY, Account.VALUE, Account.CENTROIDS, Account.STAGING, Account.HIDDEN)
    return sum(accounts.get(account, 0) for account in kept)
