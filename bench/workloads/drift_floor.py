"""How far coding keys moves the attention of centroids, beside how far a step of decoding does: drift's noise floor."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from measuring.table import Row
from torch import Tensor

import tiered
from tiered.clustering.areas import cluster_areas
from tiered.core.features import Feature
from tiered.core.rows import Rows
from tiered.embedded import tasks
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.sizes import kv_codec
from tiered.models.base import DiffusionModel
from tiered.offload.codecs import CODECS
from tiered.policies.polestar.drift_reference import DriftReference
from tiered.policies.polestar.layer_state import centroid_queries
from tiered.policies.polestar.policy import Polestar


@torch.no_grad()
def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[Row]:
    """A row for each task: means over the clusters, layers and steps of calls without a cache, of the drift (KL, mean
    over heads) of a cluster's attention

        noise         by coding the keys of one state
        step          from a state to that behind the next commits, of raw keys
        coded_step    the same of coded keys

    and "chosen", the share of the clusters that drift most, as many as Polestar renews, which do so by either of the
    last two. `settings` has "model", "kv", "call" (options of `generate`) and "tasks" (name, size, how many).
    """
    runtime = tiered.from_pretrained(paths[settings["model"]], policy="none", device=settings["device"])
    rounded = CODECS[kv_codec(settings["kv"])].rounded  # pyright: ignore[reportAttributeAccessIssue]
    for task, size, count in settings["tasks"]:
        found = []
        for seed in range(settings["seed"], settings["seed"] + count):
            chat = [[{"role": "user", "content": tasks.sample(task, "test", seed, size=size).prompt}]]
            out = runtime.generate(chat, output_history=True, **settings["call"])
            states, answer = out.history or [], settings["call"]["max_new_tokens"]
            for ids, after in pairwise(states):
                found += drifts(runtime.model, runtime.hidden_states(ids)[:, 0], ids, after, answer, rounded)
        means = dict(
            zip(("noise", "step", "coded_step"), torch.cat(found, dim=1).double().mean(1).tolist(), strict=True)
        )
        chosen = fmean(alike(step, coded) for _, step, coded in found)
        yield {"task": task, "size": size, "examples": count} | means | {"chosen": chosen}


def alike(ours: Tensor, theirs: Tensor) -> float:
    """The share of the clusters that drift most by `ours` which do so by `theirs`."""
    most = min(Polestar().top_m, len(ours))
    return torch.isin(ours.topk(most).indices, theirs.topk(most).indices).double().mean().item()


def drifts(
    model: DiffusionModel, hidden: Tensor, ids: Tensor, after: Tensor, answer: int, rounded: Callable[[Tensor], Tensor]
) -> Iterator[Tensor]:
    """For each layer the noise, the step and the coded step of every cluster of the prompt, [3, clusters]."""
    now, then = passed(model, ids), passed(model, after)
    length = ids.shape[1]
    indices = cluster_areas(hidden, ((0, length - answer), (length, length)))
    columns = Rows.span(0, length)
    for layer, index in enumerate(indices):
        queries = centroid_queries(now, layer, index.centroids[None], index.medoids[None])
        keys, moved = now.keys(layer), then.keys(layer)

        def apart(old: Tensor, new: Tensor, queries: Tensor = queries) -> Tensor:
            reference = DriftReference.of(queries, old, torch.arange(length)[None])
            return reference.measured(queries, new, columns)[0]

        yield torch.cat([apart(keys, rounded(keys)), apart(keys, moved), apart(rounded(keys), rounded(moved))])


def passed(model: DiffusionModel, ids: Tensor) -> Forward:
    """A full pass over `ids`, which keeps the keys of every layer."""
    kept: dict[Feature, int] = dict.fromkeys((Feature.KEY, Feature.VALUE), model.shape.layers)
    dtype = next(model.parameters()).dtype
    store = FeatureStore(model.shape, kept, batch=1, length=ids.shape[1], dtype=dtype, device=ids.device)
    forward = Forward(model, store, torch.arange(ids.shape[1], device=ids.device)[None])
    forward.logits(ids, Rows.span(0, ids.shape[1]), slice(0, 1))
    return forward
