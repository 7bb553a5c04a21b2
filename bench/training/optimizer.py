"""The optimizers: Muon for the layers' matrices, AdamW for embedding, head and norms; and the rate's schedule."""

from collections.abc import Iterable
from itertools import groupby

import torch
from torch import Tensor, nn

from tiered.models.base import DiffusionModel

MUON_RATE, ADAM_RATE = 0.007, 2e-3
WARMUP_STEPS, DECAY_SHARE = 60, 0.2


class Muon(torch.optim.Optimizer):
    """Nesterov momentum, orthogonalised by five Newton–Schulz steps (Jordan, kellerjordan.github.io/posts/muon).

    The arithmetic is that of `torch.optim.Muon`, in float32, with all matrices of one shape as one batched product. A
    test compares the two. torch's own rounds to bfloat16, which some CPUs emulate. It is 16 times slower there, and
    takes ten times as long as the rest of a training step.
    """

    def __init__(self, params: Iterable[Tensor], lr: float, momentum: float = 0.95, weight_decay: float = 0.03) -> None:
        def wide_shape(matrix: Tensor) -> tuple[int, ...]:
            return tuple(sorted(matrix.shape))

        groups = groupby(sorted(params, key=wide_shape), wide_shape)
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([{"params": list(group)} for _, group in groups], defaults)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """One update; every parameter needs a gradient."""
        for group in self.param_groups:
            params, lr = group["params"], group["lr"]
            for param in params:
                self.state[param].setdefault("momentum_buffer", torch.zeros_like(param)).lerp_(
                    param.grad, 1 - group["momentum"]
                )
            nesterov = [torch.lerp(p.grad, self.state[p]["momentum_buffer"], group["momentum"]) for p in params]
            updates = orthogonalized(torch.stack([u if is_wide(u) else u.T for u in nesterov]))
            for param, update in zip(params, updates, strict=True):
                param.mul_(1 - lr * group["weight_decay"])
                ratio = max(1.0, param.shape[0] / param.shape[1]) ** 0.5
                param.add_(update if is_wide(param) else update.T, alpha=-lr * ratio)


def is_wide(matrix: Tensor) -> bool:
    """True if `matrix` has no more rows than columns."""
    return matrix.shape[0] <= matrix.shape[1]


def orthogonalized(matrices: Tensor) -> Tensor:
    """`matrices` [count, rows, columns], rows ≤ columns, with singular values near 1 in place of their own."""
    x = matrices / (matrices.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + torch.baddbmm(gram, gram, gram, beta=-4.7750, alpha=2.0315) @ x
    return x


def optimizers(model: DiffusionModel, probes: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """The optimizers of all parameters, by name. The probes' rate does not follow the schedule."""
    layers = next(child for child in model.children() if isinstance(child, nn.ModuleList))
    matrices = [linear.weight for linear in layers.modules() if isinstance(linear, nn.Linear)]
    chosen = set(map(id, matrices))
    rest = [parameter for parameter in model.parameters() if id(parameter) not in chosen]
    return {
        "muon": Muon(matrices, lr=MUON_RATE),
        "adam": torch.optim.AdamW(rest, lr=ADAM_RATE, betas=(0.9, 0.98), weight_decay=0.0, fused=True),
        "probes": torch.optim.AdamW(probes.parameters(), lr=ADAM_RATE),
    }


def set_rate(optimizers: dict[str, torch.optim.Optimizer], step: int, steps: int, plateau: float = 1.0) -> float:
    """Set the rates of `step`: warm-up, plateau, linear decay at the end. Returns their share of the full rates."""
    share = plateau * max(0.0, min(1.0, (step + 1) / WARMUP_STEPS, (steps - step) / (DECAY_SHARE * steps)))
    for name, rate in (("muon", MUON_RATE), ("adam", ADAM_RATE)):
        for group in optimizers[name].param_groups:
            group["lr"] = rate * share
    return share
