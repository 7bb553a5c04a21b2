"""The shapes that the code's annotations promise are those that tensors have: checked at run time, in a process of its
own, since bad arguments must meet the library's own errors everywhere else."""

import subprocess
import sys
from pathlib import Path

import pytest

GOLDENS = Path(__file__).parent / "goldens" / "llada"
SCRIPT = """
import sys
import torch
from jaxtyping import install_import_hook

install_import_hook("tiered", "beartype.beartype")
import tiered
from tiered.policies.registry import POLICIES

ids = torch.randint(0, 480, (3, 14))
mask = torch.ones_like(ids)
mask[0, :5] = mask[1, 9:] = 0
runtime = tiered.from_pretrained(sys.argv[1], dtype="float32")
runtime.logits(ids, mask)
for policy in POLICIES:
    for options in ({}, {"confidence_threshold": 0.5}, {"factor": 1.0}, {"temperature": 0.5, "seed": 1},
                    {"cfg_scale": 0.5}, {"remasking": "random"}, {"output_history": True, "stop_at_eos": False}):
        options |= {"max_new_tokens": 16, "block_length": 8}
        out = runtime.with_policy(policy).generate(ids, attention_mask=mask, **options)
print("checked", tuple(out.sequences.shape))
"""


@pytest.mark.slow
def test_annotated_shapes_are_true():
    command = [sys.executable, "-c", SCRIPT, str(GOLDENS / "llada_tiny_gqa")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "checked (3, 30)"
