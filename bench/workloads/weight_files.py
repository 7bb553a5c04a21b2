"""A forward whose layers come from files, ours and accelerate's; the page cache has all of them."""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any

import torch
from baselines.bidirectional_llama import forward, llama_of
from baselines.disk_offload import offloaded
from measuring.worker import refusing
from torch import Tensor

from tiered.core.budget import MemoryBudget
from tiered.models.weight_form import RAW, WeightForm, layer_bytes
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.models import VOCABULARY
from workloads.streamed_model import all_streamed, least_host, opened, random_files, shape_of, sizes_of

CODE = "int8"  # of weights in the scratch file: raw ones are read where they are
RESIDENT, FILES = "resident", "from the checkpoint"
CODED, SCRATCH = f"{CODE}, resident", f"{CODE}, from the scratch file"
THEIRS, OFFLOADED = "transformers, resident", "accelerate, disk_offload"
ROUNDS = 5
DISK = "4GiB"  # most bytes of a scratch file
CLOSE = 1e-2  # largest difference of logits, whose standard deviation is about 4, between their operations and ours

Ask = Callable[[], Tensor]


def measure(settings: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """A row for each way: the median time of an uncached forward over "rows" rows, all ways in turn. Weights of one
    form have the same logits, wherever they come from.

    `settings` has "width" and "layers" of the model and "rows". "over_disk_offload", if accelerate is installed, is a
    way's time over that of accelerate.
    """
    rows = settings["rows"]
    draws = torch.Generator().manual_seed(settings["seed"])
    ids = torch.randint(0, VOCABULARY - 2, (1, rows), generator=draws)
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        folder = stack.enter_context(random_files(settings["width"], settings["layers"], rows))
        scratch = Path(stack.enter_context(TemporaryDirectory()))
        ours = {
            name: stack.enter_context(_ours(folder, scratch, name, rows)) for name in (RESIDENT, FILES, CODED, SCRATCH)
        }
        ways: dict[str, Ask] = {name: partial(runtime.logits, ids) for name, runtime in ours.items()}
        ways[THEIRS] = _theirs(llama_of(_ours(folder, scratch, RESIDENT, rows).model), ids)
        last: dict[str, Any] = {"way": OFFLOADED}
        try:
            llama, last["accelerate"] = offloaded(llama_of(_ours(folder, scratch, RESIDENT, rows).model), scratch)
            ways[OFFLOADED] = _theirs(llama, ids)
        except ModuleNotFoundError as error:
            last |= {"status": "refused", "why": str(error)}
        seconds = {name: median(own) for name, own in _timed(ways).items()}
        for name in (FILES, SCRATCH):
            form, read = _form(name), ours[name].ledger.report().moved.get("disk->host", 0)
            below = settings["layers"] - (name == SCRATCH)  # coded layers go there by way of the host, which keeps one
            of_layers = below * layer_bytes(ours[name].model.shape, "float32", form)
            assert read >= (1 + ROUNDS) * of_layers, f"{name}: layers were not read in every forward"
    theirs = seconds.get(OFFLOADED)
    for name in (*ways, *({OFFLOADED} - ways.keys())):
        of = last if name == OFFLOADED else {"way": name}
        of |= {"forward_ms": 1e3 * seconds[name]} if name in seconds else {}
        yield of | ({} if theirs is None else {"over_disk_offload": seconds[name] / theirs})


def _form(name: str) -> WeightForm:
    return WeightForm.of(CODE if name in (CODED, SCRATCH) else RAW)


def _ours(folder: Path, scratch: Path, name: str, rows: int) -> Runtime:
    """Our runtime of the model in `folder`. Raises `RefusedError`."""
    form, budget = _form(name), MemoryBudget()
    if name in (FILES, SCRATCH):
        sizes = sizes_of(shape_of(folder), rows, form)
        disk: dict[str, Any] = {} if name == FILES else {"disk": DISK, "disk_path": scratch}
        budget = MemoryBudget(device=all_streamed(make_policy("none"), sizes), host=least_host(sizes), **disk)
    with refusing():
        return opened(folder, make_policy("none"), budget, form=form, device="cpu")


def _theirs(llama: Any, ids: Tensor) -> Ask:
    """A function that asks transformers for logits."""
    every = torch.arange(ids.shape[1])
    return lambda: forward(llama, ids, mask=None, positions=every[None], output=every)


def _timed(ways: Mapping[str, Ask]) -> dict[str, list[float]]:
    """Seconds of each way by round, after one call without a clock, whose logits have to agree."""
    said = {name: ask() for name, ask in ways.items()}
    for ours, other in ((RESIDENT, FILES), (CODED, SCRATCH)):
        assert torch.equal(said[ours], said[other]), f"{other}: not the logits of {ours}"
    for name in (THEIRS, OFFLOADED):
        assert name not in said or (said[name] - said[RESIDENT]).abs().max() < CLOSE, f"{name}: other logits"
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, ask in ways.items():
            began = time.perf_counter()
            ask()
            seconds[name].append(time.perf_counter() - began)
    return seconds
