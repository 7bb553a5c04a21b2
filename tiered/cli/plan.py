"""`tiered plan`: the bytes of a call, before loading."""

import argparse
from typing import TYPE_CHECKING

from tiered.cli.flags import add_memory_options, add_model_options, add_policy_options, loading_options, policy_options
from tiered.cli.printing import add_json, print_result
from tiered.core.rates import DEVICES
from tiered.models.locate import EMBEDDED_MODELS
from tiered.models.presets import PRESETS

if TYPE_CHECKING:
    from tiered.planning.card import Plan

_OF_CALL = ("context", "batch", "block_length", "max_new_tokens", "cfg", "sampled", "tokens_per_forward")
DESCRIPTION = f"""Count the bytes of a call from the model's config.json; nothing is loaded or downloaded. If --device
names a GPU ({", ".join(DEVICES)}) or a file of `tiered rates --out`, also estimate its time.
The exit status is 0 whether it fits or not."""


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("plan", help="what a call takes in each memory tier", description=DESCRIPTION)
    embedded, presets = ", ".join(EMBEDDED_MODELS), ", ".join(PRESETS)
    named = f"an embedded model ({embedded}), a preset ({presets})"
    parser.add_argument(
        "model", metavar="MODEL", help=f"{named}, a directory, a config.json, or the id of a downloaded model"
    )
    parser.add_argument("--context", type=int, required=True, metavar="N", help="positions, prompt and answer together")
    add_memory_options(parser)
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: %(default)s)")
    add_policy_options(parser)
    parser.add_argument(
        "--block-length", type=int, help="positions of a block (default: 32, or the answer's if that is shorter)"
    )
    parser.add_argument("--max-new-tokens", type=int, help="positions of the answer (default: any number of them)")
    add_model_options(
        parser,
        device=f"the machine to plan for: a GPU by name ({', '.join(DEVICES)}), a file of `tiered rates --out`, cpu, "
        "cuda, cuda:N or auto (CUDA if there is any)",
    )
    call = parser.add_argument_group("call")
    call.add_argument("--cfg", action="store_true", help="classifier-free guidance, which doubles the sequences")
    call.add_argument(
        "--sampled",
        action="store_true",
        help="count the room beside the logits for a temperature above 0, top-p, top-k, confidence by entropy, or a "
        "rule that draws the tokens that it rewrites",
    )
    call.add_argument(
        "--tokens-per-forward",
        type=int,
        default=1,
        metavar="N",
        help="expected tokens that a forward commits in a sequence (default: %(default)s)",
    )
    parser.add_argument("--buffers", action="store_true", help="list every buffer of the device")
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tiered.core.buffers import listed

    made = planned(args)
    print_result(args, f"{made}\n\n{listed(made.buffers)}" if args.buffers else made, made.as_dict())
    return 0


def planned(args: argparse.Namespace) -> "Plan":
    from tiered.planning.plan import plan

    call = {name: getattr(args, name) for name in _OF_CALL}
    return plan(args.model, **call, **loading_options(args), **policy_options(args))
