"""The program that compute-sanitizer watches: every kernel once, or the transports and tiers, small; it checks itself.

    python -P -m gpu_parts.sanitized kernels --device cuda
    python -P -m gpu_parts.sanitized transports --device cuda --schedules 100
    python -P -m gpu_parts.sanitized planted --device cuda      # an error that the tool has to find

The last line of stdout is `DONE` and JSON, which lists its work and its faults. Exit status 1: there are faults. After
`--limit` seconds it ends itself in any case, and prints the stack of every thread.
"""

import argparse
import faulthandler
import json
import sys
import time
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import Any

import residency_fuzz
import stored_rows_fuzz
import torch
from round_trip import round_trip
from simulation import compute

from gpu_parts.kernel_case import run_once, small_cases
from gpu_parts.moved_bytes import POISON
from gpu_parts.sanitizer import DONE
from gpu_parts.slow_transports import transport
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.kernels.choice import for_device
from tiered.kernels.decode_rows_ref import decode_rows
from tiered.kernels.row_base import RowBase
from tiered.kernels.row_code import RowCode
from tiered.offload.codec_bytes import Codec
from tiered.offload.device import synchronize
from tiered.offload.fence import Fence, Region
from tiered.offload.pinning import pick_pinner
from tiered.offload.transport import Copy, Lane
from tiered.tiers.record_bytes import RecordBytes, StoredCluster
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers

KIB = 1 << 10
SCHEDULES = (stored_rows_fuzz.run_schedule, residency_fuzz.run_schedule)  # in turn


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("kernels", "transports", "planted"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--schedules", type=int, default=2, help="random schedules, see stored_rows_fuzz.py and residency_fuzz.py"
    )
    parser.add_argument("--seconds", type=float, default=15.0, help="no schedule but the first begins after that many")
    parser.add_argument("--limit", type=float, default=60.0)
    asked = parser.parse_args(argv)
    faulthandler.dump_traceback_later(asked.limit, exit=True)
    device, end = torch.device(asked.device), time.monotonic() + asked.seconds
    if asked.what == "transports":
        ran = run_transports(device, asked.seed, schedules=asked.schedules, end=end)
    else:
        ran = {"kernels": run_kernels, "planted": run_planted}[asked.what](device)
    print(DONE + json.dumps(ran), flush=True)
    faulthandler.cancel_dump_traceback_later()
    return 1 if ran["wrong"] else 0


def run_kernels(device: torch.device) -> dict[str, Any]:
    """Every kernel at a tiny size; on a CPU by Triton's interpreter. Another part checks the results."""
    kernels = small_cases()
    for name, case in kernels.items():
        print(name, flush=True)
        run_once(case, device)
    return {"ran": list(kernels), "wrong": [] if kernels else ["there were no kernels"]}


def run_planted(device: torch.device) -> dict[str, Any]:
    """Decoding against a centroid that does not exist: the kernel reads 1 MiB behind the only one. The reference
    refuses the number on a CPU."""
    code, rows = RowCode.NVFP4, torch.zeros(1, 64, device=device)
    coded = torch.zeros(1, code.row_bytes(64, residual=True), dtype=torch.uint8, device=device)
    base = RowBase(rows.clone(), torch.full((1,), 1 << 12, device=device))
    for_device(decode_rows, device)(coded, code, rows, base=base)
    synchronize(device)
    return {"ran": ["planted"], "wrong": []}


def run_transports(device: torch.device, seed: int, *, schedules: int, end: float) -> dict[str, Any]:
    """Copies, tiers in every codec, then random schedules until `end` of the monotonic clock."""
    device = torch.empty(0, device=device).device  # with its number, as tensors have it
    checks = {"copies": partial(copies_are_right, device, seed)}
    checks |= {f"tiers {codec}": partial(tiers_are_right, device, seed, codec) for codec in Codec}
    wrong = []
    for name, right in checks.items():
        print(name, flush=True)
        if not right():
            wrong.append(f"{name}: bytes differ")
    answers = done = 0
    while done < schedules and (not done or time.monotonic() < end):
        outcome = SCHEDULES[done % len(SCHEDULES)](seed + done, device=device)
        if outcome.corrupt:
            wrong.append(f"schedule {seed + done}: {outcome.wrong} wrong answers; {'; '.join(outcome.errors)}")
        answers, done = answers + outcome.answers, done + 1
    return {"ran": list(checks), "schedules": done, "answers": answers, "wrong": wrong}


def copies_are_right(device: torch.device, seed: int) -> bool:
    """Six turns through one small buffer of host memory that each turn uses again: down, up, and out by a kernel.
    Fences order the jobs."""
    turns, size, count = 6, 4 * KIB, 8
    generator = torch.Generator(device).manual_seed(seed)
    given = torch.randint(256, (turns, count * size), dtype=torch.uint8, device=device, generator=generator)
    found, arrived = torch.full_like(given, POISON), torch.full_like(given[0], POISON)
    chunk = pick_pinner(device).allocate(2 * count * size)
    # Every second record of the buffer; the last one lies at an odd address.
    host = [chunk.bytes[2 * number * size + number // (count - 1) :][:size] for number in range(count)]
    there, landing = Fence(Region.HOST_SLOT), Fence(Region.FETCH_SLOT)

    def leave(turn: int) -> None:
        found[turn] = arrived

    with closing(transport(device)) as lanes:
        for turn in range(turns):
            ready = lanes.wait()  # `given` is there
            down = [Copy(row, place) for row, place in zip(given[turn].view(count, size), host, strict=True)]
            there.writes(lanes.copy(Lane.STORE, down, [*there.before_write(), ready]))
            up = [Copy(place, row) for row, place in zip(arrived.view(count, size), host, strict=True)]
            for part in (up[:-1], up[-1:]):  # in the order of their lane, so that the last one ends last
                event = lanes.copy(Lane.FETCH, part, [*there.before_read(), *landing.before_write()])
                there.reads(event)
            landing.writes(event)
            landing.reads(compute(lanes, partial(leave, turn), landing.before_read()))
        for event in landing.before_write():
            event.synchronize()
    return torch.equal(found, given)


def tiers_are_right(device: torch.device, seed: int, codec: Codec) -> bool:
    """Rows to host memory and back, against encoding and decoding on the spot."""
    count, rows, width, order = 6, 5, 96, [4, 1, 0, 5, 2, 3]
    generator = torch.Generator(device).manual_seed(seed)
    given = torch.randn(count * rows, width, device=device, generator=generator)
    centroids = given[:count].clone()
    clusters = [StoredCluster(0, number, slice(rows * number, rows * (number + 1))) for number in range(count)]
    needed = RecordBytes(
        tier=Tier.HOST,
        codec=codec,
        regions=1,
        rows=len(given),
        row_bytes=codec.row_bytes(width, given.element_size()),
        clusters=count,
        centroid_bytes=centroids[0].nbytes if codec.needs_base else 0,
        record_rows=8,
        slots=2,
    )
    found = torch.full_like(given, torch.nan)
    with Tiers(Ledger(), device=device) as tiers:
        stored = StoredRows(tiers, needed, sequences=1)
        stored.store(0, clusters, given, centroids)
        stored.read(0, [clusters[number] for number in order], found, [clusters[number].rows for number in order])
        tiers.synchronize()
        stored.check_integrity()
    wanted = [round_trip(part, codec, centroid) for part, centroid in zip(given.split(rows), centroids, strict=True)]
    return torch.equal(found, torch.cat(wanted))


if __name__ == "__main__":
    sys.exit(main())
