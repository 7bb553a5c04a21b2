"""Tensors have the shapes of the code's annotations. A process of its own checks them at run time, because bad
arguments must meet the library's own errors everywhere else."""

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
sys.path.append(sys.argv[2])
import tiered
from baselines import parity
from tiered.policies.registry import policies_for

torch.manual_seed(0)
ids = torch.randint(0, 480, (3, 14))
mask = torch.ones_like(ids)
mask[0, :5] = mask[1, 9:] = 0
runtime = tiered.from_pretrained(sys.argv[1], dtype="float32")
runtime.logits(ids, mask)
for number, policy in enumerate(policies_for("canvas")):
    for turn, options in enumerate(({}, {"confidence_threshold": 0.5}, {"factor": 1.0}, {"temperature": 0.5, "seed": 1},
                    {"cfg_scale": 0.5}, {"remasking": "random"}, {"output_history": True, "stop_at_eos": False})):
        if policy not in ("none", "polestar") and turn and "remasking" not in options and (turn + number) % 6:
            continue  # they take turns: each policy meets some, and each is met by many
        options |= {"max_new_tokens": 4, "block_length": 2}
        if runtime.with_policy(policy).policy.needs_order() and "remasking" not in options:
            continue
        if policy != "none" and {"factor", "temperature", "stop_at_eos"} & set(options):
            continue  # the loop knows of these, and no policy
        out = runtime.with_policy(policy).generate(ids, attention_mask=mask, **options)
for policy, given, options, streams in (
    (parity.policy("dllm_cache", guidance_interval=3), {}, {"cfg_scale": 0.5}, True),
    (parity.policy("dkv_greedy"), {}, {"remasking": "random", "seed": 1}, True),
    ("elastic_cache", {"similarity_threshold": 1.0, "window": 5}, {"cfg_scale": 0.5}, True),
):
    options |= {"max_new_tokens": 4, "block_length": 2}
    plain = runtime.with_policy(policy, **given).generate(ids, attention_mask=mask, **options)
    if streams:
        cap = plain.memory.peak_device_bytes - 20000
        short = tiered.from_pretrained(sys.argv[1], dtype="float32", policy=policy, memory=cap, **given)
        assert torch.equal(short.generate(ids, attention_mask=mask, **options).sequences, plain.sequences)
for given, options in (
    ({"clusters": 20}, {}),
    ({"codec": "raw", "refresh": "drift", "cluster_layers": 2}, {"cfg_scale": 0.5}),
):
    polestar = runtime.with_policy("polestar", **{"clusters": 3, "top_m": 1, "update_threshold": 0, **given})
    assert polestar.generate(ids, attention_mask=mask, max_new_tokens=4, block_length=2, **options).updates

from tiered.clustering.areas import cluster_areas, cut_clusters
from tiered.policies.polestar.drift import LayerKeys, Changed, DriftReference
from tiered.core.rows import Rows
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.offload.codec_bytes import Codec
from tiered.policies.polestar.members import Members
from tiered.tiers.record_bytes import RecordBytes
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers

hidden = torch.randn(runtime.model.shape.layers, *ids.shape, runtime.model.shape.width, dtype=runtime.dtype)
for rows, valid in zip(hidden, mask.bool().expand(len(hidden), -1, -1)):
    indices = cluster_areas(rows, ((0, 6), (9, 14)), 3, valid=valid)
    cut_clusters(rows, indices, 2)
    for codec in Codec:
        for tier, slots in (("host", 2), ("device", 0)):
            index, width, element = indices[0], rows.shape[2], rows.element_size()
            needed = RecordBytes(
                tier=Tier(tier), codec=codec, regions=1, rows=len(index.rows), clusters=index.clusters, record_rows=4,
                row_bytes=codec.row_bytes(width, element), centroid_bytes=width * element * codec.needs_base,
                slots=slots,
            )
            members = Members.of(index.rows.tolist(), index.sizes, rows.shape[1])
            clusters = [members.stored(0, cluster) for cluster in range(index.clusters)]
            with Tiers(Ledger(), device=rows.device) as tiers:
                stored = StoredRows(tiers, needed, 1)
                stored.store(0, clusters, rows[0, index.rows], index.centroids)
                stored.send(0, clusters[:1])
                stored.read(0, clusters, torch.zeros_like(rows[0]), [cluster.rows for cluster in clusters])
                tiers.stats(), tiers.check_integrity(), stored.check_integrity()
queries, keys = torch.randn(2, 4, 3, 8), LayerKeys(*torch.randn(2, 2, 2, 20, 8), torch.ones(2, 20, dtype=torch.bool))
rows, block = Rows.at(torch.tensor([[0, 1, 2], [2, 3, 4]]), torch.tensor([[True, True, False]] * 2)), Rows.span(7, 9)
reference = DriftReference.of(queries, keys, block)
changed = Changed(rows, keys.at(rows), slice(2))
_, reference = reference.measured(queries, keys, changed, updating=torch.tensor([True, False]))
changed = Changed(block, tuple(each[1:] for each in reference.block), slice(2))
reference.of_sequences([1]).measured(queries[1:], LayerKeys(keys.keys[1:], keys.values[1:]), changed)
changed = Changed(block, changed.last[:1], slice(2))
reference.of_sequences([1]).measured(queries[1:], LayerKeys(keys.keys[1:]), changed)
reference.append().recenter(queries[:, :, :1], keys, torch.tensor([[3], [3]]))
print("checked", tuple(out.sequences.shape))
"""


@pytest.mark.slow
def test_annotated_shapes_are_true():
    bench = Path(__file__).parents[1] / "bench"
    command = [sys.executable, "-c", SCRIPT, str(GOLDENS / "llada_tiny_gqa"), str(bench)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip() == "checked (3, 18)"
