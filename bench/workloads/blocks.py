"""Families that see blocks: recorded histories again, and the cost of the exact cache beside the rows that it feeds."""

import json
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
from measuring.provenance import ROOT
from measuring.worker import refusing
from safetensors.torch import load_file
from torch import Tensor

import tiered
from tiered.decoding.generators import Generators
from tiered.denoising import uncached
from tiered.forward.passes import Pass
from tiered.inputs import Prompts
from tiered.models.sdar import Sdar
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.models import VOCABULARY, drawn

GOLDENS = ROOT / "tests" / "goldens"
FAMILIES = ("sdar",)  # families that see blocks, and have recorded histories
LARGEST_DIFFERENCE = 5e-4  # of logits
PASSES = 3  # full ones, before and behind the call


def recorded(family: str) -> Iterator[dict[str, Any]]:
    """A row for every recorded case of `family`: "identical", and its forwards or the distance of its logits."""
    folder = GOLDENS / family
    runtime = tiered.from_pretrained(folder / f"{family}_tiny", dtype="float32")
    logits, sequences = load_file(folder / "logits.safetensors"), load_file(folder / "sampling.safetensors")
    for case, length in {name.split(".")[1]: _block(name) for name in logits}.items():
        expected = logits[f"{family}_tiny.{case}.logits"]
        found = runtime.logits(logits[f"{family}_tiny.{case}.input_ids"].long(), block_length=length)
        off = float((found - expected).abs().max())
        yield {"case": f"logits, {case}", "off": off, "identical": off <= LARGEST_DIFFERENCE}
    for case, told in json.loads((folder / "sampling.json").read_text()).items():
        if "quirk" in told:
            continue  # README.md there calls it an accident
        history, rows = _history(runtime, case, told, sequences)
        same = torch.equal(history, _changes(sequences[f"{case}.history"])) and rows == expected_rows(told)
        yield {"case": case, "forwards": len(rows), "identical": same}


def cost(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """One row: a call with the exact cache, over a full pass's share of the positions that it feeds."""
    context, blocks, block = settings["context"], settings["blocks"], settings["block"]
    positions = context + blocks * block
    runtime = Runtime(_random_model(settings["width"], settings["layers"], positions), policy=make_policy("auto"))
    generator = torch.Generator().manual_seed(settings["seed"])
    prompt = torch.randint(0, VOCABULARY - 2, (1, context), generator=generator)
    call = {"block_length": block, "block_steps": settings["steps"], "stop_at_eos": False}
    with refusing():
        runtime.generate(prompt[:, : 8 * block], max_new_tokens=block, **call)  # pays for thread pools and workspaces
        passes = [_full_pass(runtime, positions) for _ in range(PASSES)]
        out = runtime.generate(prompt, max_new_tokens=blocks * block, **call)
        passes += [_full_pass(runtime, positions) for _ in range(PASSES)]
    rows = sum(out.rows_per_step)
    floor = median(passes) * rows / positions
    yield {
        "seconds": out.timings.total, "full_seconds": median(passes), "floor_seconds": floor, "rows_fed": rows,
        "over_floor": out.timings.total / floor, "device_bytes": out.memory.peak_device_bytes, **out.steps_by_kind,
    }  # fmt: skip


def _full_pass(runtime: Runtime, positions: int) -> float:
    """Seconds of a forward in which every row sees every other, with logits of the last block's length."""
    ids = torch.zeros(1, positions, dtype=torch.long)
    # One block of all positions: attention is torch's own, as in a canvas.
    forward = uncached(runtime._call, Prompts(ids=ids, mask=torch.ones_like(ids, dtype=torch.bool)), positions)
    with torch.no_grad():
        began = time.perf_counter()
        forward.logits(Pass(ids, forward.rows, slice(positions - 32, positions)))
        return time.perf_counter() - began


def _random_model(width: int, layers: int, positions: int) -> Sdar:
    """SDAR-8B's proportions, with random weights, float32."""
    torch.manual_seed(0)
    heads = width // 64
    model = Sdar.from_config(
        {
            "hidden_size": width,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": max(1, heads // 4),
            "head_dim": 64,
            "intermediate_size": 3 * width,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": positions,
            "rope_theta": 1e6,
            "mask_token_id": VOCABULARY - 1,
            "eos_token_id": VOCABULARY - 2,
        }
    )
    return drawn(model)


def _history(
    runtime: Runtime, case: str, told: Mapping[str, Any], sequences: Mapping[str, Tensor]
) -> tuple[Tensor, list[float]]:
    """The canvas after each change, and the rows of each forward; tokens that were drawn are drawn again."""
    options: dict[str, Any] = dict(told["kwargs"]) | {"output_history": True, "seed": 0}
    options["stop_at_eos"] = "stopping_criteria_idx" in options
    drawn = iter(sequences[f"{case}.sampled"].long())
    if told["draw"] == "greedy":  # the likeliest token, with its probability at temperature 1
        options["temperature"] = 0.0

    def draw(streams: Generators, sequence: int, rows: Tensor, logits: Tensor, temperature: float) -> Tensor:
        return next(drawn)[rows]

    with patch.object(Generators, "draw", draw):
        out = runtime.generate(sequences[f"{case}.prompt"].long(), **options)
    assert out.history is not None
    return torch.stack(out.history).int(), out.rows_per_step


def expected_rows(told: Mapping[str, Any]) -> list[int]:
    """Rows of each forward here, by those of the official loop. There a forward of its own stores keys and values of a
    finished block. Here that block goes with the next step. The last block is not stored, because no step follows."""
    rows, finished = list[int](), 0
    for count, stores in zip(told["fwd_seq_lens"], told["stores_kv"], strict=True):
        if stores and rows:
            finished = count
        else:
            rows.append(finished + count)
            finished = 0
    return rows


def _changes(states: Tensor) -> Tensor:
    """The states without those that repeat the one before."""
    new = [True, *((states[1:] != states[:-1]).flatten(1).any(1).tolist())]
    return states[torch.tensor(new)].int()


def _block(name: str) -> int:
    """The block length in a case's name."""
    return int("".join(filter(str.isdigit, name.split(".")[1])))
