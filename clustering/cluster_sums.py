"""Adding rows up by cluster, in the same order at every run."""

import torch
from jaxtyping import Float32, Int
from torch import Tensor


def add_by_cluster(
    sums: Float32[Tensor, "groups clusters width"],
    rows: Float32[Tensor, "groups n width"],
    assignment: Int[Tensor, "groups n"],
) -> None:
    """`sums[g, assignment[g, i]] += rows[g, i]` in place; rows that belong nowhere are zeros, in any cluster."""
    # On a device, `index_add_` adds with atomics in whatever order they come, and offloaded states must equal
    # resident ones bit for bit. On the CPU it runs in order, and is several times faster than a matrix product.
    (_by_index if rows.device.type == "cpu" else _by_product)(sums, rows, assignment)


def _by_index(sums: Tensor, rows: Tensor, assignment: Tensor) -> None:
    groups, clusters, width = sums.shape
    offsets = torch.arange(groups, device=sums.device)[:, None] * clusters
    # A view of `sums`, or an error: a copy would lose the result.
    sums.view(-1, width).index_add_(0, (assignment + offsets).flatten(), rows.flatten(0, 1))


def _by_product(sums: Tensor, rows: Tensor, assignment: Tensor) -> None:
    membership = rows.new_zeros(rows.shape[0], sums.shape[1], rows.shape[1])
    membership.scatter_(1, assignment[:, None], 1.0)
    sums.baddbmm_(membership, rows)
