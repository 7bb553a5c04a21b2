"""Books: GPU memory that libraries take in a call, beside our own tensors. Not measured on a GPU.

torch gives cuBLAS a workspace for each thread and stream that multiplies. Flash attention splits the keys if it has
fewer programs, of 64 rows each, than the GPU runs at a time (two a multiprocessor). It takes the fewest parts that come
within 85 % of its best use. So there are at most six times as many programs as the GPU runs, each with a float32 sum.
(Of p programs on a GPU of n, six rounds take ⌊6n/p⌋ parts, which leave less than 0.8 n of 6 n idle.)
"""

import torch

from tiered.core.buffers import FLOAT32, Buffer
from tiered.core.features import Account
from tiered.forward.forward_bytes import part_rows
from tiered.forward.sizes import CallShape, Gpu
from tiered.offload.device import cublas_workspace_bytes, device_name, multiprocessors, pick_device, read_device

_PROGRAM_ROWS, _PROGRAM_KEYS = 64, 64  # of flash attention; it takes up to 256 keys at a time
_PROGRAMS, _ROUNDS = 2, 6
_ALIGNED = 32  # elements: rows are rounded up to a multiple


# For a plan on a machine without a GPU: no card needs more.
LARGEST_GPU = Gpu(workspace_bytes=32 << 20, multiprocessors=192)


def gpu_of(device: str | torch.device) -> Gpu | None:
    """The GPU that a call on `device` runs on, or None on a CPU. `LARGEST_GPU` for CUDA on a machine without a GPU.

    Raises:
        ValueError: no such device.
    """
    if device != "auto" and read_device(device).type == "cuda" and pick_device("auto").type == "cpu":
        return LARGEST_GPU
    picked = pick_device(device)
    if picked.type == "cpu":
        return None
    return Gpu(
        workspace_bytes=cublas_workspace_bytes(picked),
        multiprocessors=multiprocessors(picked),
        name=device_name(picked),
    )


def library_buffers(sizes: CallShape) -> list[Buffer]:
    """Workspaces of libraries at their largest; none without a GPU."""
    gpu, shape = sizes.gpu, sizes.shape
    if gpu is None:
        return []
    attention = 0
    if shape.soft_cap is None:  # with a cap it is our own kernel, which takes none
        # The mask of a padded batch as numbers, and a copy with aligned rows.
        attention = 2 * sizes.sequences * (sizes.context + _ALIGNED) * sizes.element
        parts = -(-sizes.context // _PROGRAM_KEYS)
        if sizes.dtype != "float32" and parts > 1:
            rows = sizes.sequences * shape.heads * min(sizes.context, part_rows(sizes.sequences))
            most = _ROUNDS * _PROGRAMS * gpu.multiprocessors * _PROGRAM_ROWS
            width = -(-shape.head_dim // _ALIGNED) * _ALIGNED + 1  # one more for the sum of weights
            attention += min(parts * rows, most) * width * FLOAT32
    of_libraries = {"workspace of cuBLAS": gpu.workspace_bytes, "workspace of torch's attention": attention}
    return [Buffer(name, Account.LIBRARIES, (nbytes,)) for name, nbytes in of_libraries.items()]
