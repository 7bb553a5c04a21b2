"""Bytes of a memory timeline by tier and account."""

from typing import Any

# From the bottom of a stack up: what stays, then what is kept for the answer, then what passes need.
ACCOUNTS = (
    *("weights", "key", "value", "hidden", "attn_out", "ffn_out"),
    *("centroids", "staging", "spare", "logits", "activations"),
)
TIERS = {"device": "Device", "host": "Host", "disk": "Disk"}


def total(sample: dict[str, Any], tier: str) -> int:
    """Bytes of a tier in a sample."""
    return sum(sample["tiers"].get(tier, {}).values())


def account_series(call: dict[str, Any], tier: str) -> dict[str, list[int]]:
    """Bytes by account that ever held any, from the bottom up, one for each sample."""
    samples = [sample["tiers"].get(tier, {}) for sample in call["timeline"]]
    names = sorted({name for sample in samples for name in sample}, key=_order)
    series = {name: [sample.get(name, 0) for sample in samples] for name in names}
    return {name: sizes for name, sizes in series.items() if any(sizes)}


def cap_of(call: dict[str, Any], tier: str) -> int | None:
    """The budget of a tier; None: there is none."""
    cap = (call.get("caps") or {}).get(tier)
    return cap if isinstance(cap, int) and not isinstance(cap, bool) else None


def paint(account: str) -> str:
    """The colour of an account."""
    return f"var(--{account if account in ACCOUNTS else 'blank'})"


def _order(account: str) -> tuple[int, str]:
    return (ACCOUNTS.index(account) if account in ACCOUNTS else len(ACCOUNTS), account)
