"""`tiered generate`: answer prompts with a checkpoint."""

import argparse
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.memory_options import add_memory_options, memory_budget
from tiered.cli.policy_options import add_policy_options, policy_options
from tiered.cli.printing import add_json, print_result
from tiered.cli.watch import add_watch_options, check_watch_options, shown
from tiered.core.aliases import ALIASES, GIDD_ALIASES, resolve_aliases
from tiered.core.byte_size import format_bytes

if TYPE_CHECKING:
    from tiered.output import GenerationOutput
    from tiered.runtime import Runtime

DESCRIPTION = """Answer one prompt or several, as one batch. Prompts are arguments, the lines of --prompt-file, or
standard input. Where the tokenizer has a chat template, a prompt is a user's message; --raw continues it as it is.
Options are known by the names of official scripts too: --gen-length, --threshold, --alg."""

# Options of `generate`: name, type, help. What is not given is left to the library's defaults.
_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max-new-tokens", int, "tokens of an answer, a multiple of the block length (default: 128)"),
    (
        "block-length",
        int,
        "tokens denoised together (default: 32, or the whole answer where it is shorter or the rule is 'timestep' or "
        "'origin')",
    ),
    ("steps", int, "forwards over all blocks under 'static', 'timestep' and 'origin' (default: one a token)"),
    ("block-steps", int, "forwards of a block, in place of --steps"),
    (
        "commit",
        str,
        "commit rule: static, threshold, factor, drift_aware, timestep or origin; for uniform noise adaptive or "
        "ancestral (default: by the model and the options given)",
    ),
    ("confidence-threshold", float, "commit every token at least as confident"),
    ("factor", float, "commit as many tokens as stay reliable together"),
    ("early-threshold", float, "under 'drift_aware', commit from here on where attention moves (default: 0.7)"),
    ("drift-window", int, "steps that a rise of the drift is measured against (default: 5)"),
    ("drift-slope", float, "rise needed for each squared unit of missing confidence (default: 10)"),
    ("drift-ceiling", float, "rise from which on a token waits (default: 2)"),
    ("schedule-floor", float, "under 'timestep' and 'origin', the time at which the schedule ends (default: 0.001)"),
    ("confidence-temperature", float, "under 'timestep', draw what is committed (default: 0, the most confident)"),
    ("confidence", str, "what ranks candidates: probability (default), margin or entropy"),
    ("remasking", str, "low_confidence or random, under the rule 'static'"),
    ("tokens-per-step", int, "under 'adaptive', tokens that a step rewrites at most (default: 1)"),
    ("noise-schedule", str, "cosine (default) or linear, under 'adaptive' and 'ancestral'"),
    ("correction-steps", int, "uniform noise: steps a block in a second go over the whole answer (default: 0)"),
    ("temperature", float, "of sampling (default: 0, the most likely token)"),
    ("top-p", float, "draw from the most likely tokens that together first exceed this probability"),
    ("top-k", int, "draw from so many most likely tokens"),
    ("min-new-tokens", int, "tokens, from the first on, that cannot end an answer (default: 0)"),
    ("trailing-noise", int, "columns of noise behind the answer that stay, as GIDD's own sampler has (default: 0)"),
    ("cfg-scale", float, "classifier-free guidance (default: 0, none)"),
    ("seed", int, "of sampling; prompt i uses seed + i"),
)
_KINDS = {name.replace("-", "_"): kind for name, kind, _ in _OPTIONS}
# The names that official scripts use, with their types.
_OFFICIAL = {
    alias: _KINDS[name]
    for alias, name in (*ALIASES.items(), *GIDD_ALIASES.items())
    if name in _KINDS and alias not in _KINDS
}


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Enter the command."""
    parser = subparsers.add_parser("generate", help="answer prompts with a checkpoint", description=DESCRIPTION)
    add_call(parser)
    add_watch_options(parser)
    add_json(parser)
    parser.set_defaults(run=run)


def add_call(parser: argparse.ArgumentParser) -> None:
    """Enter what says which prompts are answered, by which model, and how."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to answer")
    parser.add_argument("--prompt-file", type=Path, help="a file with one prompt a line")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument(
        "--model",
        default="embedded",
        help="directory, id of a downloaded model, or 'embedded' (default) or 'embedded-uniform'",
    )
    add_policy_options(parser)
    add_memory_options(parser)
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (the checkpoint's)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    for name, kind, text in _OPTIONS:
        parser.add_argument(f"--{name}", type=kind, help=text)
    for name, kind in _OFFICIAL.items():
        flags = dict.fromkeys((f"--{name.replace('_', '-')}", f"--{name}"))
        parser.add_argument(*flags, dest=name, type=kind, help=argparse.SUPPRESS)
    parser.add_argument("--no-stop-at-eos", action="store_true", help="denoise every block, as the official scripts do")


def run(args: argparse.Namespace) -> int:
    """Print the answers, and a line of figures on stderr."""
    check_watch_options(args)
    prompts = read_prompts(args)
    options = generation_options(args)
    runtime = load_runtime(args)
    with shown(args, runtime, options) as observers:
        out = runtime.generate(prompts, raw=args.raw, **observers, **options)
    assert out.text is not None  # text went in, so there is a tokenizer
    print_result(args, "\n".join(out.text), {**as_asked(args, prompts, options), **out.as_dict()})
    print(
        f"{out.num_forwards} forwards, {out.tokens_per_forward.mean():.2f} tokens per forward, "
        f"{out.timings.tokens_per_second:.1f} tokens/s, peak {_tiers(out)}",
        file=sys.stderr,
    )
    return 0


def _tiers(out: "GenerationOutput") -> str:
    """Peak bytes of each tier that held any."""
    peaks = ((tier, report.peak) for tier, report in out.memory.tiers.items())
    return ", ".join(f"{format_bytes(peak)} {tier}" for tier, peak in peaks if peak)


def generation_options(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `Runtime.generate` that were given, under the library's own names.

    Raises:
        ValueError: two names of one option with different values.
    """
    # Imported here: help needs no torch.
    from tiered.options import OPTION_NAMES

    given = {name: value for name in (*_KINDS, *_OFFICIAL) if (value := getattr(args, name)) is not None}
    # No flag is called as the mask token is, so any id does.
    return {"stop_at_eos": not args.no_stop_at_eos, **resolve_aliases(given, OPTION_NAMES, mask_token_id=0)}


def as_asked(args: argparse.Namespace, prompts: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
    """What the command line asked for, for JSON."""
    return {
        "model": args.model,
        "policy": args.policy,
        "policy_options": policy_options(args),
        "prompts": prompts,
        "raw": args.raw,
        "options": dict(options),
    }


def load_runtime(args: argparse.Namespace) -> "Runtime":
    """The model under the policy that was asked for."""
    from tiered.loading import from_pretrained

    return from_pretrained(
        args.model,
        policy=args.policy,
        memory=memory_budget(args),
        dtype=args.dtype,
        device=args.device,
        **policy_options(args),
    )


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts, from wherever they come.

    Raises:
        ValueError: none at all, or from two places.
    """
    if args.prompts and args.prompt_file:
        raise ValueError("prompts come as arguments or from --prompt-file, not both")
    if args.prompts:
        return args.prompts
    if args.prompt_file is None and sys.stdin.isatty():
        raise ValueError("no prompt; give one as an argument, in a --prompt-file, or on standard input")
    text = args.prompt_file.read_text() if args.prompt_file else sys.stdin.read()
    prompts = [line for line in text.splitlines() if line.strip()]
    if not prompts:
        raise ValueError(f"{args.prompt_file or 'standard input'} holds no prompt")
    return prompts
