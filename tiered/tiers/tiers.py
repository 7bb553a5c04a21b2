"""The tiers of a call, or of the weights: sources of memory and files, the transport of copies, and their figures."""

from collections.abc import Callable
from contextlib import ExitStack, closing
from copy import deepcopy
from dataclasses import dataclass

import torch
from jaxtyping import UInt8
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.offload.chunk import Chunk, device_chunks
from tiered.offload.fence import Fence, Region, settle
from tiered.offload.file_record import FileRecord
from tiered.offload.ring import Ring
from tiered.offload.scratch_file import ScratchFile
from tiered.offload.size_class import UNIT
from tiered.offload.transport import Lane, Transport
from tiered.tiers.host_pool import KNOBS, HostPool, booked, tier_errors
from tiered.tiers.stats import TierStats, reporting
from tiered.tiers.traffic import Traffic


@dataclass(frozen=True, slots=True, eq=False)
class Home:
    """The place of a record's bytes below the device, from the plan until `free`.

    Attributes:
        nbytes: bytes of the record.
        fence: guards these bytes.
        memory: the bytes in host memory; None for a file.
        read: reads the record from its file into host memory and returns its bytes; None for host memory.
        free: frees the room after its unfinished copies have ended. A second call does nothing.
    """

    nbytes: int
    fence: Fence
    memory: UInt8[Tensor, " nbytes"] | None = None
    read: Callable[[UInt8[Tensor, " nbytes"]], int] | None = None
    free: Callable[[], object] = lambda: None

    @classmethod
    def in_files(cls, record: FileRecord) -> "Home":
        """A home in files that are read and never written. Nothing is booked for it."""
        return cls(record.nbytes, record.fence, read=record.read)

    @property
    def tier(self) -> Tier:
        return Tier.DISK if self.memory is None else Tier.HOST


class Tiers:
    """Homes, rings and copies under one ledger. One thread of the caller uses them; copies run on the transport's
    streams and threads. `close` frees everything that its owner has not freed.

    Attributes:
        ledger: books everything.
        device: device on which records are used.
        traffic: submits copies.
        record: counts events.
        memory: closed with the tiers, after the last copy.
    """

    def __init__(
        self, ledger: Ledger, *, device: torch.device, transport: Transport | None = None, pool: HostPool | None = None
    ) -> None:
        """`transport` moves bytes, and is closed with the tiers; None for streams on CUDA, threads on the CPU. `pool`:
        source of host memory, under the same ledger; None for a pool of these tiers alone."""
        self.ledger, self.device, self.memory = ledger, device, ExitStack()
        if pool is None:
            pool = HostPool(ledger, device)
            self.memory.callback(pool.close)
        self.pool = pool
        self._stats, self._transport = TierStats(), transport or _transport_for(device)
        self.record = reporting(self._stats, ledger)
        self.traffic = Traffic(self._transport, self.record)
        self._host: set[Chunk] = set()  # of the homes in host memory, and of rings there
        self._homes: set[ExitStack] = set()  # of the homes that are not freed yet
        self._scratch: ScratchFile | None = None
        self._closed = False

    def slots(
        self, region: Region, slots: int, slot_bytes: int, opened: ExitStack | None = None, hint: str | None = None
    ) -> Ring:
        """A ring on the device, or in host memory for `LOAD_SLOT`, until `opened` is closed; None for the tiers. Raises
        `TierCapacityError` if there is no room for it, with `hint`; None for the usual hint."""
        opened = self.memory if opened is None else opened
        tier, allocate = Tier.HOST, self.pool.take
        if region is not Region.LOAD_SLOT:
            tier, allocate = Tier.DEVICE, booked(self.ledger, Tier.DEVICE, device_chunks(self.device), hint)
        with tier_errors(tier):
            chunk = allocate(slots * slot_bytes)
        opened.callback(chunk.free)
        self.ledger.rebook(Account.SPARE, Account.STAGING, chunk.actual_bytes, tier)
        opened.callback(self.ledger.rebook, Account.STAGING, Account.SPARE, chunk.actual_bytes, tier)
        if tier is Tier.HOST:
            self._keep(chunk, opened)
        ring = Ring(slots, chunk.bytes, region, chunk.earlier)
        opened.callback(ring.settle)
        return ring

    def host_home(self, account: Account, nbytes: int, room: int) -> Home:
        """A home of `nbytes` in host memory, booked under `account`. `room`: bytes of the memory; those beyond `nbytes`
        are spare. Raises `TierCapacityError` if the host has no room for it."""
        with ExitStack() as opened:
            with tier_errors(Tier.HOST):
                chunk = self.pool.take(room)
            opened.callback(chunk.free)
            self.ledger.rebook(Account.SPARE, account, nbytes, Tier.HOST)
            opened.callback(self.ledger.rebook, account, Account.SPARE, nbytes, Tier.HOST)
            fence = Fence(Region.HOST_SLOT, chunk.earlier)
            self._keep(chunk, opened)
            opened.callback(settle, [fence])
            return Home(nbytes, fence, memory=chunk.bytes[:nbytes], free=self._to_free(opened))

    def _keep(self, chunk: Chunk, opened: ExitStack) -> None:
        """Count `chunk` among host memory until `opened` is closed."""
        self._host.add(chunk)
        opened.callback(self._host.discard, chunk)

    def on_device(self, account: Account, nbytes: int) -> UInt8[Tensor, " nbytes"]:
        """Device memory, booked under `account` until the tiers are closed. Raises `TierCapacityError` if it has no
        room."""
        with tier_errors(Tier.DEVICE):
            chunk = booked(self.ledger, Tier.DEVICE, device_chunks(self.device))(nbytes)
        self.memory.callback(chunk.free)
        self.ledger.rebook(Account.SPARE, account, nbytes, Tier.DEVICE)
        self.memory.callback(self.ledger.rebook, account, Account.SPARE, nbytes, Tier.DEVICE)
        return chunk.bytes

    def to_scratch(self, home: Home, account: Account, room: int, layer: int | None = None) -> Home:
        """A home in the scratch file with the bytes of `home`, which is in host memory and stays. Blocks until they are
        written. `room`: bytes of a record's slot in the file, the same for all.

        Raises:
            TierCapacityError: the disk, or its budget, has no room for it.
            OSError: the file cannot be made, or cannot grow.
            TransferError: the bytes could not be written.
        """
        source = home.memory
        assert source is not None, "it is in host memory"
        with ExitStack() as opened:
            with tier_errors(Tier.DISK):
                slot = self._scratch_file(room).place(home.nbytes)
            opened.callback(slot.release)
            self.ledger.rebook(Account.SPARE, account, home.nbytes, Tier.DISK)
            opened.callback(self.ledger.rebook, account, Account.SPARE, home.nbytes, Tier.DISK)
            opened.callback(settle, [slot.fence])
            self.traffic.move(
                Lane.SAVE, lambda: slot.write(source), reads=[home.fence], writes=[slot.fence], layer=layer
            ).synchronize()
            return Home(home.nbytes, slot.fence, read=slot.read, free=self._to_free(opened))

    def to_host(self, home: Home, account: Account, room: int, layer: int | None = None) -> Home:
        """A home in host memory (`host_home`) with the bytes of `home`, which is in a file and stays. Blocks until they
        are read. Raises as `host_home`, and `TransferError` if they could not be read."""
        there = self.host_home(account, home.nbytes, room)
        memory, read = there.memory, home.read
        assert memory is not None and read is not None, "a file is read into host memory"
        try:
            self.traffic.move(
                Lane.LOAD, lambda: read(memory), reads=[home.fence], writes=[there.fence], layer=layer
            ).synchronize()
        except BaseException:
            there.free()
            raise
        return there

    @property
    def scratch_bytes(self) -> int:
        return 0 if self._scratch is None else self._scratch.file_bytes

    def synchronize(self) -> None:
        """Block the host until every copy so far has ended."""
        self.traffic.synchronize()

    def stats(self) -> TierStats:
        """A copy of the figures so far."""
        self.traffic.harvest()
        stats, chunks = deepcopy(self._stats), self._host
        stats.pinned_requested = sum(chunk.bytes.numel() for chunk in chunks)
        stats.pinned_actual = sum(chunk.actual_bytes for chunk in chunks)
        stats.pinned = bool(chunks) and all(chunk.pinned for chunk in chunks)
        return stats

    def ended(self) -> TierStats:
        """`stats` after every copy has ended."""
        self.synchronize()
        return self.stats()

    def restart_stats(self) -> None:
        self.traffic.harvest()
        self._stats.restart()

    def check_integrity(self) -> None:
        """Raise `RuntimeError` if books, memory and ledger contradict each other."""
        if self._scratch is not None:
            self._scratch.check_integrity()
        self.ledger.check_integrity()

    def close(self) -> None:
        """Wait for unfinished copies, then free everything: homes, rings, file and threads. May be called again."""
        if self._closed:
            return
        self._closed = True
        with ExitStack() as closing:  # in reverse order, and all of them even if one fails
            closing.push(self.memory)
            for home in self._homes:
                closing.callback(home.close)
            closing.callback(self._transport.close)
            closing.callback(self.traffic.synchronize)

    def __enter__(self) -> "Tiers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _to_free(self, opened: ExitStack) -> Callable[[], None]:
        """`Home.free` of a home in `opened`; `close` calls it if the owner has not."""
        home = opened.pop_all()
        self._homes.add(home)
        home.callback(self._homes.discard, home)
        return home.close

    def _scratch_file(self, slot_bytes: int) -> ScratchFile:
        folder, ledger = self.ledger.budget.disk_path, self.ledger
        if self._scratch is None:
            assert folder is not None, "a plan with records in the scratch file has a disk tier"
            self._scratch = ScratchFile(
                folder,
                slot_bytes,
                lambda nbytes: ledger.allocate({Account.SPARE: nbytes}, Tier.DISK, hint=KNOBS[Tier.DISK]),
                lambda nbytes: ledger.release({Account.SPARE: nbytes}, Tier.DISK),
            )
            self.memory.callback(self._scratch.close)
        return self._scratch


def check_disk(budget: MemoryBudget) -> None:
    """Check that the disk tier of `budget`, if it has one, is possible, by creating a file. Raises `OSError` if no file
    can be created in `disk_path`, and `TierCapacityError` if the disk has fewer free bytes."""
    cap = budget.cap(Tier.DISK)
    if cap and budget.disk_path is not None:
        with tier_errors(Tier.DISK), closing(ScratchFile(budget.disk_path, UNIT)) as file:
            file.check_free(cap)


def _transport_for(device: torch.device) -> Transport:
    if device.type != "cuda":
        from tiered.offload.thread_transport import ThreadTransport

        return ThreadTransport()
    from tiered.offload.cuda_transport import CudaTransport

    return CudaTransport(device)
