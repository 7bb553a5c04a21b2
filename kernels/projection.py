"""Multiplying rows by a weight, fast also for the few rows of a cached step."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.nn import Parameter

from tiered.kernels.choice import for_device
from tiered.kernels.coded_rows import CodedRows
from tiered.kernels.weight_product_ref import weight_product

# Row counts for which a CPU's matrix product is 1.2 to 1.9 times faster with the weight as its left factor (float32,
# widths 512 to 4096, MKL on AVX2). Fewer or more rows gain nothing or lose. CUDA's library chooses for itself.
FEW_ROWS = range(16, 257)


def project(
    hidden: Float[Tensor, "*rows width"], weight: Float[Tensor, "out width"] | CodedRows
) -> Float[Tensor, "*rows out"]:
    """`hidden` · `weight`ᵀ; the result may have its rows as the innermost axis in memory."""
    rows = hidden.shape[:-1]
    if isinstance(weight, CodedRows):
        return for_device(weight_product, hidden.device)(hidden.flatten(0, -2), weight).unflatten(0, rows)
    # Tensor subclasses of other packages may support a weight as the right factor only.
    plain = type(weight) in (Tensor, Parameter)
    if plain and hidden.is_cpu and rows.numel() in FEW_ROWS:
        return (weight @ hidden.flatten(0, -2).t()).t().unflatten(0, rows)
    return F.linear(hidden, weight)


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
