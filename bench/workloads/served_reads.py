"""Reads of the device by the host in rounds of a scheduler, and launches of a layer of them, counted as in
`workloads.launches`."""

from collections import Counter
from statistics import mean, median
from typing import Any

import torch

from tiered.core.ops import Op
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from tiered.serving.scheduler import Scheduler
from workloads.launches import counting
from workloads.plain_layers import model_of

CALL = {"max_new_tokens": 8, "block_length": 8, "block_steps": 8, "stop_at_eos": False}
PROMPTS = (16, 24)  # tokens, in turns


def measure(family: str, policy: str, *, requests: int) -> dict[str, Any]:
    """Reads of a round in which all `requests` run: the median and the largest number. And means of its forwards, of
    the launches of their first layer, and of its reads by range and name.

    Requests of one block come at once, and one token of each is committed in a step. The whole round counts: forwards,
    proposals and commits, and blocks that begin and end.
    """
    runtime = Runtime(model_of(family, layers=2), policy=make_policy(policy), name="random")
    generator = torch.Generator().manual_seed(0)
    scheduler, reads, forwards = Scheduler(runtime, max_running=requests), list[int](), list[int]()
    with counting() as found:
        prompts = [torch.randint(0, 120, (1, PROMPTS[each % 2]), generator=generator) for each in range(requests)]
        running = [scheduler.submit(runtime.prepare(prompt, **CALL)) for prompt in prompts]
        while not any(request.over for request in running):
            before = found.reads.total(), scheduler.counts.forwards
            with found.span(Op.STEP):
                scheduler.step()
            reads.append(found.reads.total() - before[0])
            forwards.append(scheduler.counts.forwards - before[1])
    scheduler.close(cancel=True)
    by_name = Counter[str]()
    for (_, _, op, name), number in found.reads.items():
        by_name[f"{op.value} {name}"] += number
    of = {name: number / len(reads) for name, number in by_name.most_common()}
    launches = sum(number for (_, layer, *_), number in found.launches.items() if layer == 0) / sum(forwards)
    return {
        "rounds": len(reads), "reads": median(reads), "most_reads": max(reads), "forwards": mean(forwards), "read": of,
        "launches": launches,
    }  # fmt: skip
