"""Drift's noise floor: the move of centroids' attention by coding keys, beside the move by a step of decoding."""

from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Float32
from measuring.table import Row
from torch import Tensor
from training import tasks

import tiered
from tiered.clustering.allocation import chosen_clusters
from tiered.clustering.areas import cluster_areas
from tiered.core.rows import Rows
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.row_code import RowCode
from tiered.models.base import DiffusionModel
from tiered.policies.polestar.drift import Changed, DriftReference, LayerKeys
from workloads.input_rows import hidden_states


@torch.no_grad()
def measure(settings: Mapping[str, Any], *, paths: Mapping[str, str]) -> Iterator[Row]:
    """A row for each task. It has the drift of a cluster's attention (KL, mean over heads), the mean over the clusters,
    layers and steps of calls without a cache:

        noise         by coding the keys of one state
        step          from a state to that behind the next commits, of raw keys
        coded_step    the same of coded keys

    And it has "chosen": the share of the clusters that Polestar would renew by raw keys which it would also renew by
    coded ones. `settings` has "model", "kv", "call" (options of `generate`) and "tasks" (name, size, count).
    """
    runtime = tiered.from_pretrained(paths[settings["model"]], policy="none", device=settings["device"])
    code = RowCode(settings["kv"])

    def rounded(
        keys: Float[Tensor, "batch kv_heads length head_dim"],
    ) -> Float[Tensor, "batch kv_heads length head_dim"]:
        return CodedRows.of(keys, code).values()

    for task, size, count in settings["tasks"]:
        found = []
        for seed in range(settings["seed"], settings["seed"] + count):
            chat = [[{"role": "user", "content": tasks.sample(task, "test", seed, size=size).prompt}]]
            out = runtime.generate(chat, output_history=True, **settings["call"])
            states = [hidden_states(runtime, ids)[:, 0] for ids in out.history or ()]
            for now, then in pairwise(states):
                found += drifts(runtime.model, now, then, settings["call"]["max_new_tokens"], rounded)
        means = dict(
            zip(("noise", "step", "coded_step"), torch.cat(found, dim=1).double().mean(1).tolist(), strict=True)
        )
        chosen = fmean(alike(step, coded) for _, step, coded in found)
        yield {"task": task, "size": size, "examples": count} | means | {"chosen": chosen}


def alike(ours: Tensor, theirs: Tensor) -> float:
    """The share of the clusters that drift most by `ours` which also drift most by `theirs`."""
    most = chosen_clusters("auto", len(ours), single=False)
    return torch.isin(ours.topk(most).indices, theirs.topk(most).indices).double().mean().item()


def drifts(
    model: DiffusionModel,
    now: Float[Tensor, "layers length width"],
    then: Float[Tensor, "layers length width"],
    answer: int,
    rounded: Callable[[Tensor], Tensor],
) -> Iterator[Float32[Tensor, "3 clusters"]]:
    """For each layer the noise, the step and the coded step of every cluster of the prompt. `now` and `then` are the
    layers' input rows in two states."""
    length = now.shape[1]
    columns, rotary = Rows.span(0, length), model.rotary(torch.arange(length)[None])
    for layer, index in enumerate(cluster_areas(now, ((0, length - answer), (length, length)))):
        at = rotary.at(Rows.at(index.medoids[None]))
        queries = model.queries(layer, model.attention_norm(layer, index.centroids[None]), at)
        keys, moved = (
            model.keys_values(layer, model.attention_norm(layer, hidden[layer][None]), rotary)[0]
            for hidden in (now, then)
        )

        def apart(old: Tensor, new: Tensor, queries: Tensor = queries) -> Tensor:
            reference = DriftReference.of(queries, LayerKeys(old), columns)
            return reference.measured(queries, LayerKeys(new), Changed(columns, (old,), slice(None)), anew=True)[0]

        yield torch.cat([apart(keys, rounded(keys)), apart(keys, moved), apart(rounded(keys), rounded(moved))])
