"""Where the bytes of a call are: by tier and account, forward by forward, checked against what is allocated.

    python bench/memory.py                      # some minutes; writes bench/results/memory.json
    python bench/memory.py --quick --out FILE   # a small model, a few seconds

The ledger says what every tier holds. Beside it stands what torch allocates: every operation of another, equal call is
watched, and storages are told apart by the module that asked for them. What is kept (features, rings, records and the
memory that they lie in) has to agree within 1 % and a page. What passes take is booked before they begin, at the most
that they can take: there allocations have to stay below, and the table says by how much. The growth of the process's
resident set stands in the file.

A random model and the embedded one, in float32. One call has a device budget that its features do not fit. The exit
status is 1 where ledger and allocations differ by more than is allowed.
"""

import argparse
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from cost_card import Rates, cost_card, machine_rates
from memory_checks import checks
from memory_timeline import MemoryTimeline
from rich.console import Console
from rich.table import Table
from step_cost import VOCABULARY, random_model, resident_peak

import tiered
from tiered.core.byte_size import format_bytes
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.provenance import provenance
from tiered.core.whole_file import write_then_rename
from tiered.decoding.observers import Inspector
from tiered.embedded import tasks
from tiered.forward.forward_bytes import weight_bytes
from tiered.offload.lane import Lane
from tiered.policies.registry import make_policy

BLOCK = 32
RESULTS = Path(__file__).resolve().parent / "results" / "memory.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """What is measured.

    Attributes:
        name: of the row.
        runtime: with a ledger of its own.
        ids, options: of `generate`.
    """

    name: str
    runtime: tiered.Runtime
    ids: torch.Tensor
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def positions(self) -> int:
        """Columns of the canvas."""
        return self.ids.shape[1] + self.options["max_new_tokens"]

    def run(self, inspector: Inspector) -> tiered.GenerationOutput:
        """The call, looked at by `inspector`."""
        return self.runtime.generate(self.ids, inspector=inspector, **self.options)


def measure(call: Call) -> dict[str, Any]:
    """The timeline of a call, its copies and drift by layer, and the checks."""
    call.run(MemoryTimeline(call.runtime.ledger))  # thread pools and workspaces are no part of any call's need
    timeline = MemoryTimeline(call.runtime.ledger)
    before = resident_peak(restart=True)
    out = call.run(timeline)
    after = resident_peak()
    return {
        "name": call.name,
        "policy": call.runtime.policy.name,
        "positions": call.positions,
        "batch": len(out.sequences),
        "caps": {tier.value: call.runtime.ledger.budget.cap(tier) for tier in Tier},
        "peaks": {tier.value: report.peak for tier, report in out.memory.tiers.items()},
        "moved": dict(out.memory.moved),
        "resident_growth": None if before is None or after is None else after - before,
        "timeline": [sample.as_dict() for sample in timeline.samples],
        "checks": checks(call.run, call.runtime.ledger),
        "layers": copies_by_layer(out),
        "drift": drift_by_layer(out),
    }


def copies_by_layer(out: tiered.GenerationOutput) -> dict[str, dict[str, float]]:
    """What each layer's fetches took, and what of it compute waited for."""
    layers = {} if out.tiers is None else out.tiers.layers
    return {
        str(layer): {
            "copy_ms": ways[Lane.FETCH].busy_ns / 1e6,
            "hidden_ms": ways[Lane.FETCH].hidden_ns / 1e6,
            "exposed_ms": ways[Lane.FETCH].exposed_ns / 1e6,
            "bytes": ways[Lane.FETCH].nbytes,
        }
        for layer, ways in sorted(layers.items())
        if ways[Lane.FETCH].jobs
    }


def drift_by_layer(out: tiered.GenerationOutput) -> list[dict[str, Any]]:
    """The drift of the clusters of each layer at each update: their mean and the largest."""
    rows = []
    for update in out.updates:
        drift = [of_cluster for of_sequence in update.drift for of_cluster in of_sequence]
        if drift:
            at = {"forward": update.forward, "layer": update.layer}
            rows.append(at | {"mean": sum(drift) / len(drift), "largest": max(drift)})
    return rows


def calls(quick: bool) -> Iterable[Call]:
    """All calls, made one after the other: each has a ledger, and the budgeted one follows from the one before."""
    width, layers, context = (256, 4, 1024) if quick else (512, 8, 2048)
    model = random_model(width, layers, context)
    prompt = torch.randint(0, VOCABULARY - 2, (1, context - 64), generator=torch.Generator().manual_seed(0))
    generation = {"max_new_tokens": 64, "block_length": BLOCK, "steps": 32, "stop_at_eos": False}

    def random_call(name: str, policy: str, budget: tiered.MemoryBudget | None = None) -> Call:
        ledger = Ledger(budget)
        ledger.allocate({Account.WEIGHTS: weight_bytes(model.shape, "float32")})
        runtime = tiered.Runtime(model, policy=make_policy(policy), ledger=ledger)
        one_block = {"block_length": 64} if policy == "elastic_cache" else {}
        return Call(name=name, runtime=runtime, ids=prompt, options=generation | one_block)

    for policy in ("fast_dllm_dual", "polestar", "dllm_cache", "elastic_cache"):
        yield random_call(f"{policy}, random model", policy)
    room = random_call("", "fast_dllm_dual").runtime.generate(prompt, **generation).memory
    # A quarter of what the dual cache takes beside the weights has no room.
    weights = room.tiers[Tier.DEVICE].at_peak[Account.WEIGHTS]
    budget = tiered.MemoryBudget(device=weights + int(0.75 * (room.peak_device_bytes - weights)), host="4GiB")
    yield random_call("fast_dllm_dual, random model, three quarters of its room", "fast_dllm_dual", budget)
    embedded = tiered.from_pretrained("embedded", policy="polestar", update_threshold=1, device="cpu")
    size = 256 if quick else 1024
    assert embedded.tokenizer is not None, "the embedded model has one"
    chat = [{"role": "user", "content": tasks.sample("lookup", "test", 0, size=size).prompt}]
    ids = torch.tensor([embedded.tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)])
    answer = {"max_new_tokens": 64, "block_length": BLOCK, "stop_at_eos": False}
    yield Call(name=f"polestar, embedded model, lookup in {size}", runtime=embedded, ids=ids, options=answer)


def cards(call: Call, rates: Rates) -> str:
    """What the call's passes take at the least: one over everything, and one over a block."""
    shape, element, block = call.runtime.model.shape, call.runtime.dtype.itemsize, call.options["block_length"]
    lines = [f"{call.name}, {call.positions} positions"]
    for name, rows in (("full pass", call.positions), ("block step", block)):
        card = cost_card(
            shape, batch=len(call.ids), context=call.positions, rows=rows, output_rows=block, dtype_bytes=element
        )
        lines.append(f"  {name}: {card}, floor {1e3 * card.floor(rates):.2f} ms")
    return "\n".join(lines)


def table(records: Sequence[Mapping[str, Any]]) -> Table:
    """The checks of all calls."""
    grid = Table(title="ledger and allocations", title_justify="left")
    for column in ("call", "what", "ledger", "allocated", "differ by", "allowed", ""):
        grid.add_column(column, justify="left" if column in ("call", "what", "") else "right", overflow="fold")
    for record in records:
        for check in record["checks"]:
            allowed = "below" if check["allowed"] is None else format_bytes(check["allowed"])
            share = 100 * check["difference"] / max(1, check["ledger"])
            grid.add_row(
                record["name"],
                f"{check['tier']}: {check['what']}",
                format_bytes(check["ledger"]),
                format_bytes(check["allocator"]),
                f"{share:+.2f} %",
                allowed,
                "agrees" if check["agrees"] else "DIFFERS",
            )
    return grid


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smaller model and context, for a first look")
    parser.add_argument("--out", type=Path, help=f"file of the figures (default: {RESULTS.name} in bench/results/)")
    arguments = parser.parse_args()
    if arguments.out is not None and not arguments.out.resolve().parent.is_dir():
        parser.error(f"--out {arguments.out}: there is no folder {arguments.out.parent}")
    path = arguments.out or (None if arguments.quick else RESULTS)
    records, rates = [], machine_rates(torch.device("cpu"), torch.float32)
    print(f"this machine: {rates}")
    for call in calls(arguments.quick):
        print(cards(call, rates), flush=True)
        records.append(measure(call))
    Console(width=140).print(table(records))
    record = {"device": "cpu", "calls": records} | provenance()
    if path is not None:
        write_then_rename(path, lambda part: part.write_text(json.dumps(record) + "\n"))
    print(json.dumps(record))
    return 0 if all(check["agrees"] for call in records for check in call["checks"]) else 1


if __name__ == "__main__":
    sys.exit(main())
