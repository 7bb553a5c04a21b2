"""The fields of the JSON files that the report reads; those of a sweep's rows are in sweeping/rows.py."""

from reporting.fields import Field

TEXT, COUNT, SIZE = Field(kind=str), Field(kind=int, low=0), Field(kind=float, low=0)
MAYBE_SHARE = Field(kind=float, nullable=True, low=0, high=1)
SHARE = Field(kind=float, low=0, high=1)
OPTIONAL_SIZE = Field(kind=float, nullable=True, needed=False, low=0)
OPTIONAL_COUNT = Field(kind=int, nullable=True, needed=False, low=0)
TIERS = ("device", "host", "disk")

# What a point of a sweep is; the rest of a row is what was measured.
SETTINGS = (
    *("model", "policy", "policy_options", "clusters", "top_m", "update_threshold", "codec"),
    *("context", "batch", "budget", "budget_bytes", "confidence"),
)

MEMORY_CALL = {
    "name": TEXT,
    "policy": TEXT,
    "positions": COUNT,
    "batch": COUNT,
    "timeline": Field(kind=list),
    "checks": Field(kind=list),
    "layers": Field(kind=dict),
    "drift": Field(kind=list),
    "caps": Field(kind=dict, needed=False),
}
SAMPLE = {
    "forward": Field(kind=int, low=-1),
    "block": COUNT,
    "kind": Field(kind=str, choices=("refresh", "update", "step", "")),
    "seconds": SIZE,
    "tiers": Field(kind=dict),
}
CHECK = {
    "tier": Field(kind=str, choices=(*TIERS, "both")),
    "ledger": COUNT,
    "allocator": COUNT,
    "difference": Field(kind=float),
    "allowed": Field(kind=float, nullable=True, low=0),  # null: the allocator has to stay below the ledger
    "what": Field(kind=str, needed=False),
}
LAYER = {"copy_ms": SIZE, "hidden_ms": SIZE, "exposed_ms": SIZE, "bytes": SIZE}
DRIFT = {"forward": COUNT, "layer": COUNT, "mean": SIZE, "largest": SIZE}

THROUGHPUT_ROW = {
    "policy": TEXT,
    "context": COUNT,
    "batch": COUNT,
    "confidence": MAYBE_SHARE,
    "tokens_per_second": SIZE,
    **dict.fromkeys(("tokens_per_forward", "nfe", "ms_per_forward", "first_block_ms", "low", "high"), OPTIONAL_SIZE),
    **dict.fromkeys(("device_bytes", "host_bytes", "rounds"), OPTIONAL_COUNT),
}
# A row of a policy that does not fit the call.
THROUGHPUT_REFUSAL = {"policy": TEXT, "context": COUNT, "why": TEXT}
OPS_CALL = {"name": TEXT, "policy": TEXT, "positions": COUNT, "wall_ms": SIZE, "sum_ms": SIZE, "ops": Field(kind=list)}
OP = {"op": TEXT, "ms": SIZE, "share": SIZE, "count": COUNT}

COMPARE_ROW = {
    "policy": TEXT,
    "task": TEXT,
    "size": Field(kind=int, nullable=True, low=0),
    "commit": TEXT,
    "examples": Field(kind=int, low=1),
    "correct": COUNT,
    "exact_match": SHARE,
    "tokens_per_second": SIZE,
    "device_bytes": COUNT,
    **dict.fromkeys(("low", "high"), OPTIONAL_SIZE),
    "host_bytes": OPTIONAL_COUNT,
}
# A row of a policy that does not fit the call.
COMPARE_REFUSAL = {"policy": TEXT, "task": TEXT, "commit": TEXT, "why": TEXT}
OVERLAP_ROW = {"link": TEXT, "prefetch_layers": COUNT, "layers": Field(kind=dict)}
OVERLAP_LAYER = {"copy_ms": SIZE, "exposed_ms": SIZE}
