"""Caches of transformers used as a prefix cache: keys and values in front of a block, from its first pass.

A diffusion model rewrites the block and everything behind it, so each later pass must find the cache as the first left
it. A dynamic cache drops columns that a pass has added (`crop`). A quantized one does not. In transformers 5.23 `crop`
cuts the part that is not quantized yet, which may be empty, and leaves the length that masks are made by. So the prefix
goes into the quantized cache once, and each pass gets shallow copies of its layers. An update gives a layer new tensors
and writes to none.
"""

from collections import Counter
from collections.abc import Iterable, Iterator
from copy import copy

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedConfig, QuantizedCache
from transformers.cache_utils import DynamicLayer

# Backends of `QuantizedCache`, and what to install for them; fp8 is torch's own.
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq", "fp8": None}


class PrefixCache:
    """One block's cache. Columns that a pass has added stay until the next one begins, so that all bytes of a pass can
    be counted after it."""

    def __init__(
        self, config: PreTrainedConfig, behind: int, *, offloading: bool = False, backend: str | None = None
    ) -> None:
        """Raises as transformers does if such a cache cannot be made here.

        Args:
            config: config of the model.
            behind: columns of the block and of everything behind it, which no later pass may find.
            offloading: layers lie in host memory, and come back one by one (`cache_implementation="offloaded"`).
            backend: key of `PACKAGES`, of `cache_implementation="quantized"`; None for no quantization. Bits, groups
                and residual length are the backend's defaults.
        """
        self._behind = behind
        self._whole: Cache | None = DynamicCache(config=config, offloading=offloading)
        self._prefix: Cache | None = None if backend is None else QuantizedCache(backend, config)
        self._lent: Cache | None = None

    def next(self) -> Cache:
        """The cache of the next pass: empty for the first one, over all columns, and then the prefix."""
        if self._whole is None:
            return self._lend()
        if self._whole.get_seq_length():
            self._whole.crop(-self._behind)
            if self._prefix is not None:
                for number, layer in enumerate(self._whole.layers):
                    assert isinstance(layer, DynamicLayer) and layer.keys is not None and layer.values is not None
                    self._prefix.update(layer.keys, layer.values, number)
                self._whole = None
                return self._lend()
        return self._whole

    def tensors(self) -> Iterator[Tensor]:
        """All tensors that are held now, the parts of quantized tensors one by one."""
        for cache in (self._whole, self._prefix, self._lent):
            for layer in () if cache is None else cache.layers:
                yield from tensors_in(vars(layer))

    def _lend(self) -> Cache:
        assert self._prefix is not None, "only a quantized prefix is lent"
        self._lent = copy(self._prefix)
        self._lent.layers = [copy(layer) for layer in self._prefix.layers]
        return self._lent


def tensors_in(held: object) -> Iterator[Tensor]:
    """The plain tensors inside tensors, tuples, lists and mappings."""
    # A tensor of another library's class (quanto's) names the tensors that it is made of.
    flatten = getattr(held, "__tensor_flatten__", None)
    if flatten is not None and type(held) not in (Tensor, torch.nn.Parameter):
        held = [getattr(held, name) for name in flatten()[0]]
    if isinstance(held, Tensor):
        yield held
    elif isinstance(held, dict | tuple | list):
        for item in held.values() if isinstance(held, dict) else held:
            yield from tensors_in(item)


def storage_bytes(tensors: Iterable[Tensor]) -> Counter[str]:
    """Bytes by type of device ("cpu", "cuda"), each storage once: a view counts with all that it keeps alive."""
    storages = {(held.device.type, held.untyped_storage().data_ptr()): held.untyped_storage() for held in tensors}
    sizes = Counter[str]()
    for (device, _), storage in storages.items():
        sizes[device] += storage.nbytes()
    return sizes
