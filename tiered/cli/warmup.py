"""`tiered warmup`: compile the kernels of later calls."""

import argparse
from typing import TYPE_CHECKING

from tiered.cli.call import load_runtime
from tiered.cli.flags import add_memory_options, add_model_options, add_policy_options
from tiered.cli.printing import add_json, print_result

if TYPE_CHECKING:
    from tiered.runtime import Runtime

DESCRIPTION = """Load a model and answer short prompts with it, so that its kernels are compiled into Triton's cache on
disk. Later calls under the same options compile nothing. Pass the policy, codes, dtype and budget of those calls."""
PROMPTS = ((48,), (600, 40))  # tokens of the prompts of each call: one alone, short; two at a time, one of them long
ANSWER = 64  # tokens


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("warmup", help="compile a model's kernels beforehand", description=DESCRIPTION)
    parser.add_argument("model", metavar="MODEL", help="directory, id of a downloaded model, or 'embedded'")
    add_policy_options(parser)
    add_memory_options(parser)
    add_model_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from time import perf_counter

    from tiered.kernels.choice import runs_kernels
    from tiered.offload.device import pick_device

    device = pick_device(args.device)
    if not runs_kernels(device):
        why = "kernels run on CUDA alone" if device.type != "cuda" else "triton is not installed"
        print_result(args, f"nothing to compile for {device}: {why}", {"device": str(device), "calls": 0})
        return 0
    begun = perf_counter()
    with load_runtime(args) as runtime:
        calls = warm_up(runtime)
    seconds = perf_counter() - begun
    record = {"device": str(device), "calls": calls, "seconds": seconds}
    print_result(args, f"{args.model}: {calls} calls on {device}, {seconds:.1f} s; their kernels are compiled", record)
    return 0


def warm_up(runtime: "Runtime") -> int:
    """Answer prompts of the lengths `PROMPTS`, as far as the model has positions and the budget has room. Returns the
    number of calls. Raises `TierCapacityError` if no call fits."""
    import torch

    from tiered.core.errors import TierCapacityError

    special = runtime.model.mask_token_id, runtime.model.eos_token_id
    plain = next(token for token in range(len(special) + 1) if token not in special)
    answered, too_large = 0, None
    for lengths in PROMPTS:
        most = min(max(lengths), runtime.model.shape.max_context - ANSWER)
        mask = torch.stack([torch.arange(most) >= most - length for length in lengths]).long()
        ids = torch.full_like(mask, plain)
        try:
            runtime.generate(ids, attention_mask=mask, max_new_tokens=ANSWER)
            answered += 1
        except TierCapacityError as error:
            too_large = error
    if too_large is not None and not answered:
        raise too_large
    return answered
