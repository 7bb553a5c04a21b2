"""A CUDA device that is not there: the product runs as on `cuda:0`, and computes on the CPU.

Tensors claim to be on the device, and each has one of the host inside. As on CUDA, an operation on them that takes a
tensor of the host beside raises, unless that one has no dimensions. Triton's launchers run up to the launch, where
every tensor has to be on the device or pinned; the results are those of the reference. Each job is done when it is
asked for, so streams and events do nothing, and a wait for an event is none.
"""

import functools
import sys
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.spans import Recorder, active
from tiered.forward import weight_bytes
from tiered.kernels import choice, decode_rows_ref

ROOT = Path(__file__).resolve().parents[1]
ROOMS = tuple(f"{ROOT / room}/" for room in ("tiered", "clustering", "kernels", "offload"))
DEVICE, HOST = torch.device("cuda:0"), torch.device("cpu")
ATEN = torch.ops.aten
# Operations of torch whose result is on the host, or has a size that only the device knows.
READS = {
    ATEN._local_scalar_dense, ATEN.nonzero, ATEN.masked_select, ATEN.equal, ATEN._unique2, ATEN.unique_dim,
    ATEN.unique_consecutive, ATEN.bincount,
}  # fmt: skip
INDEXED = {ATEN.index, ATEN.index_put, ATEN.index_put_, ATEN._index_put_impl_}
_NOTHING = nullcontext()
LANES = "tiered "  # beginning of the names of threads that only issue copies


class DeviceTensor(Tensor):
    """A tensor that claims to be on the device. `on_host`: its values."""

    on_host: Tensor
    _fake: "FakeCuda"
    __torch_function__ = torch._C._disabled_torch_function_impl  # pyright: ignore
    device = property(lambda self: DEVICE)  # pyright: ignore
    is_cuda, is_cpu, is_meta = True, False, False

    @staticmethod
    def __new__(cls, inner: Tensor, fake: "FakeCuda") -> "DeviceTensor":
        made = Tensor._make_wrapper_subclass(  # pyright: ignore
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device("meta"),
        )  # fmt: skip
        made.on_host, made._fake = inner, fake
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = next(value for value in _flat(args) if isinstance(value, DeviceTensor))
        return found._fake.run(func, args, kwargs or {})

    def to(self, *args: Any, copy: bool = False, **kwargs: Any) -> Any:
        """torch takes the wrapper to be elsewhere, so it would copy a tensor that is there already."""
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)  # pyright: ignore
        where = {} if device is None or device.type == "cuda" else {"device": device, "non_blocking": non_blocking}
        return super().to(dtype=dtype or self.dtype, copy=copy, **where)

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(_of_tensors(index))

    def __setitem__(self, index: Any, value: Any) -> None:
        super().__setitem__(_of_tensors(index), value)

    def new_tensor(self, data: Any, **options: Any) -> Any:  # pyright: ignore
        return torch.tensor(data, device=DEVICE, **{"dtype": self.dtype, **options})

    def tolist(self) -> Any:
        self._fake.wait("tolist")
        return self.on_host.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() first")

    __array__ = numpy

    def data_ptr(self) -> int:
        return self.on_host.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_host.untyped_storage()

    def __repr__(self, **_: Any) -> str:
        return f"<{self.dtype} {tuple(self.shape)} on {DEVICE}>"


class FakeCuda:
    """Waits, memory and operations of the device.

    Attributes:
        waits: of the host for the device, by (what, line of the product, whether inside a layer).
        strangers: operations of threads that neither own the device nor issue copies, by (thread, line).
        live, peak: bytes of all storages on the device, now and at most.
        books: of the calls. Nothing is compared with them if they are None.
        over: most bytes by which `live` was above the books while a call was in them, and the line that made them so.
        owner: the thread that the device is for.
        pinned: bytes of memory of the host that copy engines reach, by address.
        asked: operations that it was asked for.
    """

    def __init__(self) -> None:
        self.waits = Counter[tuple[str, str, bool]]()
        self.strangers = Counter[tuple[str, str]]()
        self.live = self.peak = 0
        self.over: tuple[int, str] = (-sys.maxsize, "")
        self.books: Ledger | None = None
        self.owner: int | None = threading.get_ident()
        self._storages: dict[int, int] = {}
        self._lock = threading.RLock()  # lanes free what they copied
        self.pinned: dict[int, int] = {}
        self.asked = 0

    # Operations.

    def run(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """An operation of torch, in any thread."""
        outer: dict[int, DeviceTensor] = {}
        hosts: list[Tensor] = []
        inner, named = _inside(args, outer, hosts), {key: _inside(kwargs[key], outer, hosts) for key in kwargs}
        packet, asked = func.overloadpacket, named.get("device")
        if packet is ATEN.is_pinned:
            return self.is_pinned(inner[0])
        if packet is ATEN._pin_memory:
            return self.pin(inner[0].clone())
        if asked is not None and asked.type == "meta" and torch.get_default_device().type == "meta":
            return func(*args, **kwargs)  # a model whose weights are not there yet
        if hosts and hosts[0].is_meta and packet.__name__.endswith("_"):  # nor do they have values
            return args[0]
        there = bool(outer) and not (packet is ATEN.copy_ and inner[0] is args[0])
        if asked is not None:  # torch takes a wrapper's device to be "meta"
            there, named["device"] = asked.type != "cpu", HOST
        if named.pop("pin_memory", False):
            return self.pin(func(*inner, **named))
        if not outer and not there:
            return func(*inner, **named)
        self._look(func, inner, named, hosts, came=bool(outer), goes=there)
        self.asked += 1
        return self._outside(func(*inner, **named), outer) if there else func(*inner, **named)

    def _look(
        self, func: Any, inner: Any, named: dict[str, Any], hosts: list[Tensor], *, came: bool, goes: bool
    ) -> None:
        """Count what the operation waits for, and raise if it mixes devices. `hosts`: tensors among its arguments that
        are on the host; `came`, `goes`: whether one is on the device, and whether the result is."""
        packet = func.overloadpacket
        if packet in INDEXED:  # torch takes indices to the device by itself
            for index in [each for each in inner[1] if any(each is host for host in hosts)]:
                self.wait("copy")
                hosts = [host for host in hosts if host is not index]
        thread = threading.current_thread()
        if thread.ident != self.owner and not thread.name.startswith(LANES):
            self.strangers[thread.name, _line()] += 1
        if packet in (ATEN._to_copy, ATEN.copy_):
            crosses = came != goes if packet is ATEN._to_copy else bool(hosts)
            at_once = named.get("non_blocking", packet is ATEN.copy_ and len(inner) > 2 and inner[2])
            if crosses and not (at_once and all(map(self.is_pinned, hosts))):
                self.wait("copy")
        elif any(host.dim() for host in hosts):
            raise RuntimeError(f"{func}: Expected all tensors to be on the same device, but found {DEVICE} and cpu")
        elif (
            packet in READS
            or (packet in INDEXED and any(_is_mask(each) for each in inner[1]))
            or (packet is ATEN.repeat_interleave and func._overloadname == "Tensor" and "output_size" not in named)
        ):
            self.wait(packet.__name__)

    def _outside(self, value: Any, outer: dict[int, DeviceTensor]) -> Any:
        if isinstance(value, DeviceTensor):
            return value
        if isinstance(value, Tensor):
            if id(value) in outer:
                assert outer[id(value)].shape == value.shape, "the wrapper cannot follow"
                return outer[id(value)]
            self._made(value.untyped_storage())
            # A view of what was there before is no inference tensor either.
            with torch.inference_mode(value.is_inference()) if torch.is_inference_mode_enabled() else _NOTHING:
                return DeviceTensor(value, self)
        if isinstance(value, tuple | list):
            parts = [self._outside(each, outer) for each in value]
            return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
        return value

    def wait(self, what: str) -> None:
        """The host waits for the device; the threads that issue copies are there to wait."""
        if threading.current_thread().name.startswith(LANES):
            return
        recorder = active()
        layer = isinstance(recorder, Inside) and recorder.layer
        self.waits[what, _line(), layer] += 1

    # Memory.

    def _made(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        with self._lock:
            if key in self._storages:
                return
            self._storages[key] = storage.nbytes()
            weakref.finalize(storage, self._freed, key)
            self.live += storage.nbytes()
            self.peak = max(self.peak, self.live)
        if self.books is not None:
            of = self.books
            above = self.live - of.held(Tier.DEVICE) + of.held(Tier.DEVICE, Account.LIBRARIES)
            if above > self.over[0] and of.held(Tier.DEVICE, Account.LOGITS):
                self.over = above, _line()

    def _freed(self, key: int) -> None:
        with self._lock:
            self.live -= self._storages.pop(key)

    def pin(self, host: Tensor) -> Tensor:
        """`host`, whose memory is pinned as long as it lives."""
        storage = host.untyped_storage()
        self.pinned[storage.data_ptr()] = storage.nbytes()
        weakref.finalize(storage, self.pinned.pop, storage.data_ptr(), None)
        return host

    def is_pinned(self, host: Tensor) -> bool:
        """Whether the device's copy engines reach it."""
        address = host.data_ptr()
        return any(start <= address < start + size for start, size in list(self.pinned.items()))

    # Kernels.

    def kernel(self, reference: Callable[..., Any]) -> Callable[..., Any]:
        """The launcher of a kernel, with what its reference makes of the same arguments."""
        launcher = _LAUNCHERS(reference)

        @functools.wraps(launcher)
        def call(*args: Any, **kwargs: Any) -> Any:
            made = launcher(*args, **kwargs)
            outer: dict[int, DeviceTensor] = {}
            with _disable_current_modes():
                values = reference(
                    *_inside(args, outer, []), **{key: _inside(kwargs[key], outer, []) for key in kwargs}
                )
                for target, value in zip(_flat(made), _flat(values), strict=True):
                    if target is not None:
                        target.on_host.copy_(value)
            return made

        return call

    def launch(self, executor: Any, *args: Any, **kwargs: Any) -> None:
        """In place of Triton's interpreter."""
        for value in (*args, *kwargs.values()):
            if isinstance(value, Tensor) and not isinstance(value, DeviceTensor) and not self.is_pinned(value):
                raise RuntimeError(
                    f"{executor.fn.__name__}: Pointer argument cannot be accessed from Triton (cpu tensor?)"
                )


class Inside(Recorder):
    """Knows whether its thread is inside a layer."""

    layer = False

    def enter(self, span: Any) -> None:
        super().enter(span)
        self.layer = span.layer is not None

    def leave(self, span: Any) -> None:
        super().leave(span)
        self.layer = span.parent is not None and span.parent.layer is not None


class _Mode(TorchDispatchMode):
    """Sees operations that make tensors on the device from no tensor there. As a mode of this kind, it keeps torch from
    CUDA."""

    _mode_key = torch._C._TorchDispatchModeKey.FAKE

    def __init__(self, fake: FakeCuda) -> None:
        super().__init__()
        self._fake = fake

    def __enter__(self) -> Any:
        # `torch.tensor(values, device=…)` makes one of the host first.
        torch._C._set_only_lift_cpu_tensors(True)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch._C._set_only_lift_cpu_tensors(False)
        super().__exit__(*error)


def _dispatched(mode: _Mode, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    return mode._fake.run(func, args, kwargs or {})


# Not in the class: for that torch would import its compiler, which takes seconds.
_Mode.__torch_dispatch__ = _dispatched  # pyright: ignore


class _Generator(torch.Generator):
    """A generator of the device draws the numbers of one of the host."""

    def __new__(cls, device: Any = HOST) -> "_Generator":
        return super().__new__(cls, HOST)  # pyright: ignore


class _Event:
    """The host does not wait for an event if the device got more work after it."""

    def __init__(self, fake: FakeCuda, **_: Any) -> None:
        self._fake, self._at, self._asked = fake, 0.0, -1

    def record(self, stream: Any = None) -> None:
        self._at, self._asked = time.monotonic(), self._fake.asked

    def query(self) -> bool:
        self._asked = -1  # it is known to be over
        return True

    def synchronize(self) -> None:
        if self._asked == self._fake.asked:
            self._fake.wait("event")

    def elapsed_time(self, other: "_Event") -> float:
        return 1000 * (other._at - self._at)


class _Stream:
    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_event(self, event: _Event) -> None: ...

    def synchronize(self) -> None: ...


_LAUNCHERS = choice._triton


@contextmanager
def fake_cuda() -> Iterator[FakeCuda]:
    """The device is there while the block lasts, for this thread and those that it starts."""
    from triton.runtime.interpreter import GridExecutor

    fake, run = FakeCuda(), threading.Thread.run
    properties = SimpleNamespace(multi_processor_count=4, major=9, minor=0)
    runtime = SimpleNamespace(
        cudaHostRegister=lambda address, size, flags: fake.pinned.update({address: size}) or 0,
        cudaHostUnregister=lambda address: fake.pinned.pop(address) and 0,
    )

    def run_there(thread: threading.Thread) -> None:
        with _Mode(fake):
            run(thread)

    with ExitStack() as stack:
        for owner, doubles in {
            torch.cuda: {
                "is_available": lambda: True, "device_count": lambda: 1, "current_device": lambda: 0,
                "get_device_name": lambda device=None: "none", "get_device_properties": lambda device=None: properties,
                "get_device_capability": lambda device=None: (9, 0),
                "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
                "device": lambda device: _NOTHING, "device_of": lambda tensor: _NOTHING, "cudart": lambda: runtime,
                "current_stream": lambda device=None: _Stream(), "stream": lambda stream: _NOTHING,
                "Stream": _Stream, "Event": functools.partial(_Event, fake),
                "synchronize": lambda device=None: fake.wait("device"),
                "reset_peak_memory_stats": lambda device=None: setattr(fake, "peak", fake.live),
                "max_memory_allocated": lambda device=None: fake.peak,
            },
            torch.backends.cuda: {"enable_cudnn_sdp": lambda on: None, "cublas_workspace_size": lambda: 0},
            torch: {"Generator": _Generator},
            choice: {"_triton": functools.cache(fake.kernel), "_has_triton": lambda: True},
            GridExecutor: {"__call__": lambda *args, **kwargs: fake.launch(*args, **kwargs)},
            threading.Thread: {"run": run_there},
            weight_bytes: {"reserved_bytes": sum},  # this allocator rounds nothing
        }.items():  # fmt: skip
            stack.enter_context(patch.multiple(owner, create=True, **doubles))
        for cached in (decode_rows_ref._pairs, decode_rows_ref._e4m3):
            cached.cache_clear()
            stack.callback(cached.cache_clear)
        stack.enter_context(_Mode(fake))
        yield fake


def _inside(value: Any, outer: dict[int, DeviceTensor], hosts: list[Tensor]) -> Any:
    """`value` with each wrapper replaced by its tensor on the host. `outer` gets the wrapper by the id of that tensor,
    `hosts` every tensor without a wrapper."""
    kind = type(value)
    if kind is DeviceTensor:
        outer[id(value.on_host)] = value
        return value.on_host
    if isinstance(value, Tensor):
        hosts.append(value)
    elif kind in (tuple, list):
        return kind([_inside(each, outer, hosts) for each in value])
    elif isinstance(value, tuple):
        return kind(*(_inside(each, outer, hosts) for each in value))
    elif is_dataclass(kind):
        return replace(value, **{each.name: _inside(getattr(value, each.name), outer, hosts) for each in fields(kind)})
    return value


def _flat(value: Any) -> Iterator[Any]:
    if isinstance(value, tuple | list):
        for each in value:
            yield from _flat(each)
    elif is_dataclass(value):
        for each in fields(value):
            yield from _flat(getattr(value, each.name))
    else:
        yield value


def _of_tensors(index: Any) -> Any:
    """An index without lists: torch would make tensors without values of them, where the wrapper is."""
    if isinstance(index, tuple):
        return tuple(_of_tensors(each) for each in index)
    return torch.tensor(index) if isinstance(index, list) else index


def _is_mask(index: Any) -> bool:
    return isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8)


def _line() -> str:
    """The innermost line of the product in this thread; one of the transports only if no other room called it."""
    found, frame = "?", sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.startswith(ROOMS):
            file = Path(frame.f_code.co_filename).resolve().relative_to(ROOT)
            found = f"{file}:{frame.f_lineno}"
            if file.parts[0] != "offload":
                break
        frame = frame.f_back
    return found
