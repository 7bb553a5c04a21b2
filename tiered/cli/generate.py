"""`tiered generate`: answer prompts with a checkpoint."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tiered.cli.policy_options import add_policy_options, policy_options

if TYPE_CHECKING:
    from tiered.runtime import Runtime

DESCRIPTION = """Answer one prompt or several, as one batch. Prompts are arguments, the lines of --prompt-file, or
standard input. Where the tokenizer has a chat template, a prompt is a user's message; --raw continues it as it is."""

# Options of `generate`: name, type, help. What is not given is left to the library's defaults.
_OPTIONS: tuple[tuple[str, type, str], ...] = (
    ("max-new-tokens", int, "tokens of an answer, a multiple of the block length (default: 128)"),
    ("block-length", int, "tokens denoised together (default: 32, or the whole answer where it is shorter)"),
    ("steps", int, "forwards over all blocks under the rule 'static' (default: one a token)"),
    ("commit", str, "commit rule: static, threshold or factor (default: by the options given)"),
    ("confidence-threshold", float, "commit every token at least as confident"),
    ("factor", float, "commit as many tokens as stay reliable together"),
    ("remasking", str, "low_confidence or random, under the rule 'static'"),
    ("temperature", float, "of sampling (default: 0, the most likely token)"),
    ("cfg-scale", float, "classifier-free guidance (default: 0, none)"),
    ("seed", int, "of sampling; prompt i uses seed + i"),
)


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Enter the command."""
    parser = subparsers.add_parser("generate", help="answer prompts with a checkpoint", description=DESCRIPTION)
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="what to answer")
    parser.add_argument("--prompt-file", type=Path, help="a file with one prompt a line")
    parser.add_argument("--raw", action="store_true", help="no chat template")
    parser.add_argument(
        "--model", default="embedded", help="directory, id of a downloaded model, or 'embedded' (default)"
    )
    add_policy_options(parser)
    parser.add_argument("--memory", metavar="SIZE", help="cap of the device tier, such as 12GiB")
    parser.add_argument("--dtype", default="auto", help="float32, bfloat16, float16 or auto (the checkpoint's)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:N or auto")
    for name, kind, text in _OPTIONS:
        parser.add_argument(f"--{name}", type=kind, help=text)
    parser.add_argument("--no-stop-at-eos", action="store_true", help="denoise every block, as the official scripts do")
    parser.add_argument("--json", action="store_true", help="also print answers and figures as JSON, on the last line")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the answers, a line of figures on stderr, and with `--json` all of it as one line of JSON."""
    prompts = _prompts(args)
    # Imported here: help and a wrong command line need no torch.
    from tiered.cli.progress import progress_bar
    from tiered.runtime import from_pretrained

    names = [name.replace("-", "_") for name, _, _ in _OPTIONS]
    options = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    runtime = from_pretrained(
        args.model,
        policy=args.policy,
        memory=args.memory,
        dtype=args.dtype,
        device=args.device,
        **policy_options(args),
    )
    with progress_bar(options.get("max_new_tokens", 128)) as streamer:
        out = runtime.generate(
            _as_inputs(prompts, runtime, raw=args.raw),
            streamer=streamer,
            stop_at_eos=not args.no_stop_at_eos,
            **options,
        )
    assert out.text is not None  # text went in, so there is a tokenizer
    for text in out.text:
        print(text)
    print(
        f"{out.num_forwards} forwards, {out.tokens_per_forward.mean():.2f} tokens per forward, "
        f"{out.timings.tokens_per_second:.1f} tokens/s, peak {out.memory.peak_device_bytes / 2**20:.1f} MiB",
        file=sys.stderr,
    )
    if args.json:
        print(json.dumps({"model": args.model, "policy": args.policy, "prompts": prompts, **out.as_dict()}))
    return 0


def _prompts(args: argparse.Namespace) -> list[str]:
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


def _as_inputs(prompts: list[str], runtime: "Runtime", *, raw: bool) -> Any:
    """Strings, or one chat a prompt."""
    if raw or runtime.tokenizer is None or not runtime.tokenizer.chat_template:
        return prompts
    return [[{"role": "user", "content": prompt}] for prompt in prompts]
