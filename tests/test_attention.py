"""Attention is the same for every layout of its backend's output."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tiered.models import attention
from tiered.models.attention import Limits, attend

ATEN = torch.ops.aten
# Outputs of CUDA's backends, by torch's own kernels for shapes alone.
BACKENDS: dict[str, Callable[..., Tensor]] = {
    "flash": lambda queries, keys, values, bias: ATEN._scaled_dot_product_flash_attention(queries, keys, values)[0],
    "efficient": lambda queries, keys, values, bias: ATEN._scaled_dot_product_efficient_attention(
        queries, keys, values, bias, False
    )[0],
}


@pytest.mark.parametrize(("backend", "masked"), [("flash", False), ("efficient", False), ("efficient", True)], ids=str)
@pytest.mark.parametrize("kv_heads", [1, 2, 6])
@pytest.mark.parametrize("rows", [1, 5])
def test_the_layout_of_a_backend_makes_no_difference(
    backend: str, masked: bool, kv_heads: int, rows: int, monkeypatch: pytest.MonkeyPatch
):
    queries, keys, values = (
        torch.randn(3, heads, count, 16) for heads, count in ((6, rows), (kv_heads, 9), (kv_heads, 9))
    )
    mask = torch.rand(3, 9) < 0.8 if masked else None
    if mask is not None:
        mask[..., 0] = True
    expected = attend(queries, keys, values, Limits(mask))
    plain = F.scaled_dot_product_attention

    def laid_out(
        queries: Tensor, keys: Tensor, values: Tensor, attn_mask: Tensor | None, scale: float | None
    ) -> Tensor:
        shapes = [part.to("meta") for part in (queries, keys, values)]
        bias = None if attn_mask is None else attn_mask.float().to("meta").expand(*queries.shape[:3], -1)
        out = plain(queries, keys, values, attn_mask=attn_mask, scale=scale)
        return torch.empty_strided(out.shape, BACKENDS[backend](*shapes, bias).stride()).copy_(out)

    monkeypatch.setattr(F, "scaled_dot_product_attention", laid_out)
    assert torch.equal(attend(queries, keys, values, Limits(mask)), expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 1e-2)], ids=str)
@pytest.mark.parametrize("by_torch", [True, False])
def test_a_scale(by_torch: bool, dtype: torch.dtype, tolerance: float, monkeypatch: pytest.MonkeyPatch):
    """A scale alone leaves attention to torch."""
    monkeypatch.delattr(attention, "attend_part" if by_torch else "_by_torch")
    queries, keys, values = torch.randn(3, 2, 4, 5, 16, generator=torch.Generator().manual_seed(0)).to(dtype).unbind()
    expected = (queries.double() @ keys.double().mT * 0.5).softmax(3) @ values.double()
    limits = Limits(stop=None if by_torch else torch.full((2, 5), 5))
    found = attend(queries, keys, values, limits, scale=0.5)
    torch.testing.assert_close(found.double(), expected.transpose(1, 2).flatten(2), rtol=0, atol=tolerance)
