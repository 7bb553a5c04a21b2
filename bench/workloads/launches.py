"""Launches of a layer of the CUDA path, and reads by the host there, counted on the CPU.

A launch is one operation of the CUDA path. Each torch operation on tensors of the device that makes more than a view or
room is one, even if it starts several kernels there. Scaled dot-product attention and RMS norm, which have a kernel of
their own on CUDA, are one. A Triton kernel is one every time that its launcher starts it, here in Triton's interpreter.
A tensor of the host that goes to the device is one. Operations on tensors of the host are none. Copies between tiers
are none, because no thread that computes waits for them.

A read counts if the host waits for all earlier launches; an `AsyncRead` only if no launch came since.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from tiered.core.ops import Op
from tiered.core.spans import Recorder, TimedRange, active, recording
from tiered.kernels.host_values import AsyncRead
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.models import VOCABULARY, in_records, random_model

LAYERS = 6  # the first and the last count for nothing; of four between them one clusters, and three share its clusters
WIDTH, CONTEXT = 128, 32  # two heads, so that joining them counts
CALL = {"max_new_tokens": 16, "block_length": 8, "steps": 8, "stop_at_eos": False}
# With them, so few rows have as many clusters as hundreds have, an update follows a step of two tokens, and
# `attended` renews few of all rows.
OPTIONS: Mapping[str, dict[str, Any]] = {
    "polestar": {"clusters": 8, "update_threshold": 2}, "attended": {"attended_rows": 8},
}  # fmt: skip

CUDA = torch.device("cuda")
# Names of functions that make a host wait for the device.
READS = frozenset({"tolist", "item", "cpu", "numpy", "__array__", "nonzero", "equal", "masked_select", "unique"})
READS |= {"__bool__", "__int__", "__float__", "__index__"}
# Functions for which CUDA has a kernel, but torch on the CPU takes several operations, or others.
WHOLE = frozenset({"scaled_dot_product_attention", "rms_norm"})
ROOM = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "_unsafe_view"})
# Functions that ask for a tensor's device, and for no other use: there it is CUDA.
ASKING = frozenset({"add_by_cluster", "checked_forms", "project", "project_joined", "shareable"})
_HOST = "_of_the_host"  # an attribute of tensors that would not be on the device
_IS_CPU, _DEVICE = vars(torch._C.TensorBase)["is_cpu"].__get__, vars(torch._C.TensorBase)["device"].__get__
Place = tuple[int | None, int | None, Op, str]  # forward, layer (None between layers), range and operation


class Counting(Recorder):
    """A recorder that counts, too.

    Attributes:
        launches, reads: numbers by place.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches, self.reads = Counter[Place](), Counter[Place]()
        self._now: TimedRange | None = None

    def enter(self, span: TimedRange) -> None:
        super().enter(span)
        self._now = span

    def leave(self, span: TimedRange) -> None:
        super().leave(span)
        self._now = span.parent

    def launched(self, name: str) -> None:
        """Count an operation in the open range; without one it does not count."""
        if self._now is not None:
            self.launches[self._now.forward, self._now.layer, self._now.op, name] += 1

    def read(self, name: str) -> None:
        """Count a read by the host, as `launched`."""
        if self._now is not None:
            self.reads[self._now.forward, self._now.layer, self._now.op, name] += 1


class _OnCuda(TorchFunctionMode):
    """Watches torch's functions. It tells tensors of the host from those of the device, though all are on the CPU."""

    def __init__(self, counting: Counting) -> None:
        super().__init__()
        self.counting, self.quiet, self.asking = counting, 0, 0

    @contextmanager
    def silence(self) -> Iterator[None]:
        """Nothing counts meanwhile."""
        self.quiet += 1
        try:
            yield
        finally:
            self.quiet -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.asking and func in (_IS_CPU, _DEVICE):
            return False if func == _IS_CPU else CUDA
        name = getattr(func, "__name__", "")
        if self.quiet or name == "__get__":
            return func(*args, **kwargs)
        given = [value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        # A tensor that is made of no tensor is the host's, unless a device is asked for.
        if all(hasattr(each, _HOST) for each in given) if given else kwargs.get("device") is None:
            with self.silence():
                made = func(*args, **kwargs)
            if name == "to" and any(isinstance(value, torch.device) for value in (*args, *kwargs.values())):
                self.counting.launched("host to device")
                return made.detach()  # another tensor, which is the device's
            return tree_map_only(Tensor, _of_host, made)
        to_host = name == "cpu" or (name == "to" and any(isinstance(each, str) and each == "cpu" for each in args))
        if to_host or name in READS or (name == "__getitem__" and _by_flags(args[1])):
            self.counting.read(name)
        if name in WHOLE:
            self.counting.launched(name)
            with self.silence():
                return func(*args, **kwargs)
        made = func(*args, **kwargs)
        return _of_host(made.detach()) if to_host else made


class _Operations(TorchDispatchMode):
    """Counts torch's operations, unless they are silenced."""

    def __init__(self, cuda: _OnCuda) -> None:
        super().__init__()
        self._cuda = cuda

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not self._cuda.quiet and not func.is_view and name not in ROOM and name != "_local_scalar_dense":
            self._cuda.counting.launched(name)
        return func(*args, **(kwargs or {}))


def _of_host(tensor: Tensor) -> Tensor:
    setattr(tensor, _HOST, True)
    return tensor


def _by_flags(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor) and part.dtype == torch.bool for part in parts)


@contextmanager
def counting() -> Iterator[Counting]:
    """Count the operations of this thread, as if its tensors were on CUDA.

    Raises:
        RuntimeError: Triton was imported without its interpreter (TRITON_INTERPRET=1).
    """
    from triton import knobs
    from triton.runtime.interpreter import GridExecutor

    if not knobs.runtime.interpret:
        raise RuntimeError("launches are counted in Triton's interpreter; set TRITON_INTERPRET=1")
    found = Counting()
    cuda = _OnCuda(found)
    start: Any = GridExecutor.__call__
    asked = WeakKeyDictionary[AsyncRead, int]()

    def started(self: Any, *args: Any, **kwargs: Any) -> None:
        found.launched(self.fn.__name__)
        with cuda.silence():
            start(self, *args, **kwargs)

    def asking(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            cuda.asking += 1
            try:
                return function(*args, **kwargs)
            finally:
                cuda.asking -= 1

        return call

    changed: dict[str, Callable[[Any], Any]] = dict.fromkeys(ASKING, asking)

    def begun(self: AsyncRead, values: Tensor) -> None:
        self._values, self._copied = values, None
        found.launched("device to host")
        asked[self] = found.launches.total()

    def ended(self: AsyncRead) -> Any:
        if asked[self] == found.launches.total():
            found.read("tolist")
        with cuda.silence():
            return self._values.tolist()

    # A module that is imported meanwhile keeps the patched function, which has to choose as ever afterwards.
    changed["for_device"] = lambda original: (
        lambda reference, device: original(reference, CUDA if active() is found else device)
    )
    with ExitStack() as stack:
        stack.enter_context(patch.object(GridExecutor, "__call__", started))
        stack.enter_context(patch.multiple(AsyncRead, __init__=begun, tolist=ended))
        for module in [module for name, module in sys.modules.items() if name.partition(".")[0] == "tiered"]:
            for name, change in changed.items():
                if callable(original := vars(module).get(name)):
                    stack.enter_context(patch.object(module, name, change(original)))
        for context in (recording(found), cuda, _Operations(cuda)):
            stack.enter_context(context)
        yield found


def count(policy: str, options: dict[str, Any]) -> list[dict[str, Any]]:
    """A small call of `policy` under `options`. A kind of forward has a row, {"kind", "forwards", "launches",
    "outside", "reads"}, and so has each range in it, {"kind", "op", "launches", "reads"}. "launches" are those of one
    layer, the mean over all except the first and the last; "outside" are those outside of layers. "reads" are those
    inside all layers of a forward."""
    model = in_records(random_model(WIDTH, LAYERS, CONTEXT + CALL["max_new_tokens"]).to(torch.bfloat16))
    runtime = Runtime(model, policy=make_policy(policy, **OPTIONS.get(policy, {}) | options), name="random")
    prompt = torch.randint(0, VOCABULARY - 2, (1, CONTEXT), generator=torch.Generator().manual_seed(0))
    with counting() as found:
        runtime.generate(prompt, **CALL)
    rows = []
    for kind in dict.fromkeys(found.kinds):
        forwards, launches, reads = found.kinds.count(kind), Counter[Op](), Counter[Op]()
        outside = 0
        for (forward, layer, op, _), number in found.launches.items():
            if forward is not None and layer in range(1, LAYERS - 1) and found.kinds[forward] == kind:
                launches[op] += number
            elif forward is not None and layer is None and found.kinds[forward] == kind:
                outside += number
        for (forward, layer, op, _), number in found.reads.items():
            if forward is not None and layer is not None and found.kinds[forward] == kind:
                reads[op] += number
        of_kind = {"launches": launches.total() / forwards / (LAYERS - 2), "outside": outside / forwards}
        rows.append({"kind": kind, "forwards": forwards, "reads": reads.total() / forwards} | of_kind)
        for op, number in launches.most_common():
            of_op = {"launches": number / forwards / (LAYERS - 2), "reads": reads[op] / forwards}
            rows.append({"kind": kind, "op": op.value} | of_op)
    return rows
