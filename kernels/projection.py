"""Multiplying rows by a weight, fast also for the few rows of a cached step."""

from collections.abc import Sequence
from dataclasses import replace

import torch.nn.functional as F
from jaxtyping import Float, Shaped
from torch import Tensor
from torch.nn import Parameter

from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.weight_product_ref import weight_product

# Row counts for which a CPU's matrix product is 1.2 to 1.9 times faster with the weight as its left factor (float32,
# widths 512 to 4096, MKL on AVX2). Fewer or more rows gain nothing or lose. CUDA's library chooses for itself.
FEW_ROWS = range(16, 257)
# Row counts for which a CPU sums the products of a row in one order, whatever the other rows: `project`, in one or two
# threads. Of other counts it multiplies one to three rows by themselves, in another order. MKL on Intel's CPUs does so
# with `MKL_CBWR=AUTO,STRICT` in the environment, for every count; without it the order depends on the count.
ONE_ORDER = frozenset({4, 8, *range(12, FEW_ROWS.stop)})


def project(
    hidden: Float[Tensor, "*rows width"], weight: Float[Tensor, "out width"] | CodedRows
) -> Float[Tensor, "*rows out"]:
    """`hidden` · `weight`ᵀ; the result may have its rows as the innermost axis in memory."""
    rows = hidden.shape[:-1]
    if isinstance(weight, CodedRows):
        return for_device(weight_product, hidden.device)(hidden.flatten(0, -2), weight).unflatten(0, rows)
    # Tensor subclasses of other packages may support a weight as the right factor only.
    if _is_plain(weight) and hidden.is_cpu and rows.numel() in FEW_ROWS:
        return (weight @ hidden.flatten(0, -2).t()).t().unflatten(0, rows)
    return F.linear(hidden, weight)


def project_joined(
    hidden: Float[Tensor, "*rows width"], weights: Sequence[Float[Tensor, "_ width"] | CodedRows]
) -> Float[Tensor, "*rows _"] | None:
    """`project` by `weights` that adjoin (`adjoining`), in one product. None if they do not, and on a CPU, where one
    product is no faster than several and its sums may come in another order."""
    whole = None if hidden.is_cpu else adjoining(weights)
    return None if whole is None else project(hidden, whole)


def adjoining(
    weights: Sequence[Shaped[Tensor, "_ width"] | CodedRows],
) -> Shaped[Tensor, "_ width"] | CodedRows | None:
    """A view of the rows of all `weights`, in their form, if these lie in memory one behind the other, as in a layer's
    record. None if they do not."""
    first = weights[0]
    if isinstance(first, CodedRows):
        alike = [weight.bytes for weight in weights if isinstance(weight, CodedRows) and weight.code == first.code]
        rows = adjoining(alike) if len(alike) == len(weights) else None
        return None if rows is None else replace(first, bytes=rows)
    end, count = first.data_ptr() if _is_plain(first) else 0, 0
    for weight in weights:
        if not _is_plain(weight) or not weight.is_contiguous() or weight.data_ptr() != end:
            return None
        if weight.dtype != first.dtype or weight.shape[1] != first.shape[1]:
            return None
        end, count = end + weight.nbytes, count + weight.shape[0]
    memory = first.untyped_storage()  # what follows it may belong to another tensor
    return first.as_strided((count, first.shape[1]), first.stride()) if end <= memory.data_ptr() + len(memory) else None


def joined_bias(biases: Sequence[Float[Tensor, " _"]]) -> Float[Tensor, " all"] | None:
    """A view of all `biases` if they lie in memory one behind the other, else None."""
    whole = adjoining([bias[:, None] for bias in biases])
    return whole[:, 0] if isinstance(whole, Tensor) else None


def project_few(
    rows: Float[Tensor, "rows width"], weight: Float[Tensor, "out width"] | CodedRows
) -> Float[Tensor, "rows out"]:
    """`project` of at most as many rows as `FEW_ROWS` has. On a CPU it is batch-invariant: a row's bits do not depend
    on the number of rows."""
    lacking = FEW_ROWS[0] - len(rows)
    if not rows.is_cpu or lacking <= 0:
        return project(rows, weight)
    return project(F.pad(rows, (0, 0, 0, lacking)), weight)[: len(rows)]


def few_at_a_time(rows: Tensor) -> tuple[Tensor, ...]:
    """Views of `rows`, each with no more rows than `project_few` takes."""
    return rows.split(FEW_ROWS[-1])


def _is_plain(weight: object) -> bool:
    return type(weight) in (Tensor, Parameter)
