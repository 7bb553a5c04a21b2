"""Loading a checkpoint: config, budget, weights, tokenizer."""

import warnings
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch

from tiered.core.budget import MemoryBudget
from tiered.core.buffers import account_bytes, dtype_name
from tiered.core.byte_size import format_bytes
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.modes import call_modes, safe_point
from tiered.forward.library_bytes import gpu_of
from tiered.forward.sizes import DEFAULT_BLOCK_LENGTH, CallShape, kv_code
from tiered.forward.streamed_weights import StreamedWeights
from tiered.forward.weight_bytes import WeightBytes, record_keys
from tiered.forward.weight_records import WeightRecords
from tiered.kernels.choice import check_kernels
from tiered.kernels.coded_rows import CodedRows
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import Checkpoint
from tiered.models.families import family_of
from tiered.models.locate import checkpoint_directory, read_config
from tiered.models.rotation import stretched
from tiered.models.shape import named_dtype
from tiered.models.tokenizer import load_tokenizer
from tiered.models.weight_form import RAW_WEIGHTS, WeightForm, dtype_of, form_of, places
from tiered.offload.device import available_bytes, computing_on, pick_device, synchronize
from tiered.offload.file_record import FilePiece, FileRecord, ReadFile
from tiered.offload.transport import Transport
from tiered.planning.advice import code_savings
from tiered.planning.call_bytes import CallBytes
from tiered.planning.workload import Workload
from tiered.policies import DEFAULT_POLICY
from tiered.policies.base import Policy
from tiered.policies.registry import check_arguments, make_policy
from tiered.policies.row_schedule import row_schedule
from tiered.runtime import Runtime
from tiered.tiers.host_pool import HostPool
from tiered.tiers.tiers import check_disk

LEAST_HINT = (
    "this loads the model alone, calls take more (see `tiered.plan`); or keep the weights in fewer bits: "
    "weights = 'fp8', 'int4', 'int4+head', …"
)


def from_pretrained(
    path_or_name: str | Path,
    *,
    policy: str | Policy = DEFAULT_POLICY,
    memory: MemoryBudget | int | str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    weights: str = "raw",
    kv: str = "raw",
    rope_theta: float | None = None,
    rope_scaling: Mapping[str, Any] | str | None = None,
    **policy_options: Any,
) -> Runtime:
    """Load a checkpoint.

    Args:
        path_or_name: a directory in Hugging Face's layout, the id of a model in the local hub cache, "embedded",
            "embedded-uniform", "embedded-blocks" or "embedded-fresh".
        policy: caching policy, by name (with `policy_options`) or as an object; "auto" to choose one before each call
            (`Runtime.choose`).
        memory: hard cap on the runtime's bytes: a size of the device tier, or a `MemoryBudget`; None for no cap.
        dtype: dtype of weights, features and activations: "float32", "bfloat16", "float16", or "auto" for the
            checkpoint's.
        device: "cpu", "cuda", "cuda:N", or "auto" for CUDA if there is any.
        weights: code of the layers' matrices: "raw" for `dtype`, "fp8" or "int8" (1 byte an element), "nvfp4" or "int4"
            (a little over half a byte). "+head" codes the embedding and the head too. Weights that the checkpoint has
            in a code stay in it. Answers depend on the code, and on no budget. Layers without room on the device are
            streamed from host memory or from the checkpoint's files; a warning then says how much a code would save.
        kv: code of keys and values: "raw" for `dtype`, "fp8" (1 byte an element) or "nvfp4" (a little over half a
            byte). Answers depend on the code, and on no budget. Layers without room on the device are streamed.
        rope_theta: base of the rotation, for contexts past the trained one or a checkpoint that was trained further;
            None for the config's.
        rope_scaling: scaling of the rotation, as config.json writes it ("linear", "ntk", "yarn") or as "yarn:4";
            "default" for none, None for the config's. `generate` then takes the trained positions times the factor.

    Raises:
        TierCapacityError: the device budget has no room for the embedding, the head, two layers and a forward, or the
            disk has less free space than the disk budget. Nothing has been loaded.
        OSError: no file can be created in the budget's `disk_path`, or an installed Triton cannot compile a kernel for
            the CUDA device. The error says what to install; nothing has been read.
        NonFiniteError: a weight is NaN or infinite, or becomes so in `dtype`.
        ValueError, TypeError, FileNotFoundError: an invalid checkpoint or argument, named in the message.
    """
    check_arguments(from_pretrained, policy, policy_options)
    chosen = make_policy(policy, **policy_options)
    budget = MemoryBudget.of(memory)
    check_disk(budget)
    ledger = Ledger(budget)
    target = pick_device(device)
    check_kernels(target)
    directory = checkpoint_directory(path_or_name)
    config = stretched(read_config(directory), rope_theta, rope_scaling)
    family = family_of(config)
    shape = family.shape(config)
    code = kv_code(kv, shape)
    named = named_dtype(dtype, shape.dtype)
    with torch.device("meta"):
        model: DiffusionModel = family.resolve_loader().from_config(config)
    tokenizer = load_tokenizer(directory, vocab_size=min(shape.vocab_size, config.get("vocab_size", shape.vocab_size)))
    checkpoint = Checkpoint(directory, shape, config)
    form = form_of(weights, checkpoint.codes, model.config.parameter_names, shape)
    block = max(1, min(DEFAULT_BLOCK_LENGTH, shape.max_context // 2))
    small = CallShape(
        shape=shape, batch=1, context=2 * block, block_length=block, dtype=named, weights=form, gpu=gpu_of(target)
    )
    savings = code_savings(Workload(row_schedule("none"), small), budget)
    for why in (_too_large(budget, target), savings and f"in a call of {small.context} tokens, {savings}"):
        if why:
            warnings.warn(why, stacklevel=2)
    with computing_on(target):
        of_model = load_weights(model, checkpoint, ledger, dtype=getattr(torch, named), device=target, form=form)
    return Runtime(
        model, policy=chosen, ledger=ledger, tokenizer=tokenizer, name=str(path_or_name), kv=code, weights=of_model
    )


def _too_large(budget: MemoryBudget, device: torch.device) -> str | None:
    """A warning if the budget exceeds the free memory of a GPU; None otherwise."""
    cap, free = budget.cap(Tier.DEVICE), available_bytes(device)
    if cap is None or free is None or cap <= free:
        return None
    return (
        f"memory = {format_bytes(cap)}, but {device} has {format_bytes(free)} left for this process, beside the CUDA "
        "context and other programs: a call that needs more will run out of memory; lower `memory`"
    )


@call_modes
def load_weights(
    model: DiffusionModel,
    checkpoint: Checkpoint,
    ledger: Ledger,
    *,
    dtype: torch.dtype,
    device: torch.device,
    form: WeightForm = RAW_WEIGHTS,
    transport: Callable[[], Transport] | None = None,
) -> StreamedWeights:
    """Fill `model`, which was built on the meta device, one tensor at a time.

    Each tensor goes straight to its place, on the device or in the record of a streamed layer. As few layers are
    streamed as leave room for the smallest call. `transport` makes the transport of copies; None for the device's own.

    Raises:
        TierCapacityError: no call fits; nothing was read.
        NonFiniteError, ValueError: as `Checkpoint.read`.
    """
    shape, name = model.shape, dtype_name(dtype)
    files = {} if form.code else records_in_files(checkpoint, model, dtype)
    least = CallShape(shape=shape, batch=1, context=1, block_length=1, dtype=name, weights=form, gpu=gpu_of(device))
    whole = WeightBytes.of(shape, name, form, in_files=bool(files), gpu=least.gpu is not None)
    # No call runs while the model loads, but a raw tensor lies beside its coded copy and may take more than a call.
    names, pieces = model.config.parameter_names, model.config.pieces
    coded = [name for name, own in names.items() if form.covers(own, shape)]
    largest = max(prod(shape.weight_shapes[name]) for name in coded) * dtype.itemsize if form.code else 0
    beside = {Tier.DEVICE: max(0, largest - sum(account_bytes(row_schedule("none").buffers(least)).values()))}
    held = {tier: ledger.held(tier) + beside.get(tier, 0) for tier in Tier}
    needed = CallBytes.fitting(row_schedule("none"), least, ledger.budget, held, whole, hint=LEAST_HINT)
    assert needed.weights is not None, "they were given"
    records, pool = WeightRecords(model, dtype, form), HostPool(ledger, device)
    weights = StreamedWeights(
        records, ledger, pool, device=device, now=needed.weights, files=files, transport=transport
    )
    with ExitStack() as failing:
        failing.callback(weights.close)
        incoming = weights.incoming()
        failing.callback(incoming.close)
        for official in checkpoint.order():
            safe_point()
            own, rows = names[official], pieces.get(official)
            covered = form.covers(own, shape)
            code, room = form.code if covered else None, 0
            as_dtype = getattr(torch, dtype_of(own, name))
            if code is not None:  # the raw tensor lies beside its coded copy
                room = prod(shape.weight_shapes[official]) * dtype.itemsize
            with ledger.holding({Account.ACTIVATIONS: room}):
                into = incoming.room(own, rows)
                weight = checkpoint.read(official, dtype=as_dtype, device=device, code=code, into=into)
                # The checkpoint may have a coded head beside a raw embedding: the head is decoded then.
                decoded = isinstance(weight, CodedRows) and not covered
                incoming.place(own, weight.values() if decoded else weight, rows)
        for block in model.blocks:
            block.join_biases()
        weights.note()
        failing.pop_all()
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta]
    assert not left, f"weights that the shape does not list: {left}"
    synchronize(device)  # the first call may compute on another stream than this one
    return weights


def records_in_files(checkpoint: Checkpoint, model: DiffusionModel, dtype: torch.dtype) -> dict[Hashable, FileRecord]:
    """Each record as the bytes of the checkpoint's files, by key; none where these are not those in `dtype`."""
    name, apart = dtype_name(dtype), model.shape.experts_apart
    experts = None if model.shape.experts is None else apart
    held, record = places(model.shape, name, RAW_WEIGHTS, apart=apart)
    official: dict[str, list[str]] = {}
    for weight, own in model.config.parameter_names.items():
        official.setdefault(own, []).append(weight)
    opened: dict[Path, ReadFile] = {}
    found: dict[Hashable, FileRecord] = {}
    for layer in model.shape.recorded:
        for number, key in enumerate(record_keys(layer, experts)):
            pieces = []
            for name, (start, nbytes) in held.items():
                end = start + nbytes
                every = official[f"blocks.{layer}.{name}.weight"]  # pieces in the order of their rows
                each = len(every) // apart
                for weight in every[number * each : (number + 1) * each]:
                    extent = checkpoint.extent(weight, dtype)
                    if extent is None:
                        return {}
                    path, offset, length = extent
                    if path not in opened:
                        opened[path] = ReadFile(path)
                    pieces.append(FilePiece(opened[path], offset, length, start))
                    start += length
                assert start == end, "a raw matrix has as many bytes in the file as in the record"
            found[key] = FileRecord(record, pieces)
    return found
