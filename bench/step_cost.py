"""What a cached step costs beside a full one: the dual cache's step against a pass over every position.

    python bench/step_cost.py [--quick] [--out FILE.json]

A random model in float32 on the CPU. Rounds of both kinds of step alternate, so that a slow spell of the machine hits
both; the figures are medians. The floor is what counting positions promises: block length over context. Peak memory is
the growth of the process's resident set over one call; the prediction is what the call books before it starts.
"""

import argparse
import json
import re
import statistics
from pathlib import Path

import torch

from tiered.core.features import Tier
from tiered.core.provenance import provenance
from tiered.forward.forward_bytes import weight_bytes
from tiered.models.llada import LLaDA
from tiered.policies.fast_dllm import FastDLLMDual
from tiered.policies.none import NoCache
from tiered.runtime import Runtime

BLOCK_LENGTH = 32
VOCABULARY = 8192


def random_model(width: int, layers: int, context: int) -> LLaDA:
    """A LLaDA of LLaDA-8B's proportions (MLP three times the width) with random weights."""
    torch.manual_seed(0)
    model = LLaDA.from_config(
        {
            "d_model": width,
            "n_layers": layers,
            "n_heads": width // 64,
            "mlp_hidden_size": 3 * width,
            "vocab_size": VOCABULARY,
            "max_sequence_length": context,
            "rope_theta": 500000.0,
            "mask_token_id": VOCABULARY - 1,
            "eos_token_id": VOCABULARY - 2,
            "pad_token_id": VOCABULARY - 2,
        }
    )
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=0.02)
    return model


def step_seconds(runtime: Runtime, prompt: torch.Tensor, steps: int) -> list[float]:
    """Wall time of each of `steps` forwards over one block behind `prompt`."""
    out = runtime.generate(
        prompt, max_new_tokens=BLOCK_LENGTH, block_length=BLOCK_LENGTH, steps=steps, stop_at_eos=False
    )
    return out.timings.steps


def resident_peak(restart: bool = False) -> int | None:
    """Peak resident bytes of this process since the last restart; None where the system does not say."""
    status, control = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if not status.exists():
        return None
    if restart:
        control.write_text("5")
    match = re.search(r"VmHWM:\s+(\d+) kB", status.read_text())
    return int(match[1]) * 1024 if match else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--quick", action="store_true", help="a smaller model and context, for a first look")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of full and cached steps")
    parser.add_argument("--out", type=Path, help="also write the last line there")
    arguments = parser.parse_args()
    width, layers, context = (256, 4, 1024) if arguments.quick else (512, 8, 2048)

    model = random_model(width, layers, context)
    full, dual = Runtime(model, policy=NoCache()), Runtime(model, policy=FastDLLMDual())
    prompt = torch.randint(0, VOCABULARY - 2, (1, context - BLOCK_LENGTH))
    floor = BLOCK_LENGTH / context
    sizes = f"{layers} layers, d {width}, {context} positions, block {BLOCK_LENGTH}"
    print(f"{sizes}, float32, {torch.get_num_threads()} threads")
    print(f"weights {weight_bytes(model.shape, 'float32') / 2**20:.0f} MiB, position floor {floor:.4f}")

    # The first call also pays for thread pools and the math library's workspaces, which are no part of any call's need.
    dual.generate(prompt[:, : 8 * BLOCK_LENGTH], max_new_tokens=BLOCK_LENGTH, steps=2, stop_at_eos=False)
    before = resident_peak(restart=True)
    report = dual.generate(prompt, max_new_tokens=BLOCK_LENGTH, steps=2, stop_at_eos=False).memory
    after = resident_peak()
    booked = {account.value: size for account, size in report.tiers[Tier.DEVICE].at_peak.items()}

    full_steps, dual_steps = [], []
    for _ in range(arguments.rounds):
        full_steps += step_seconds(full, prompt, steps=2)
        dual_steps += step_seconds(dual, prompt, steps=16)[1:]
    full_step, dual_step = statistics.median(full_steps), statistics.median(dual_steps)
    ratio = dual_step / full_step
    print(f"full step {1000 * full_step:.1f} ms, cached step {1000 * dual_step:.2f} ms")
    print(f"ratio {ratio:.4f}, {ratio / floor:.2f} times the floor")
    record = {
        "dual_over_full": ratio,
        "floor": floor,
        "over_floor": ratio / floor,
        "full_step_ms": 1000 * full_step,
        "dual_step_ms": 1000 * dual_step,
        "peak_bytes": None if before is None or after is None else after - before,
        "predicted_bytes": sum(booked.values()),
        "predicted_by_account": booked,
        "rounds": arguments.rounds,
        **provenance(),
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
