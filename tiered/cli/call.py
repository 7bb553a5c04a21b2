"""Flags of the commands that answer prompts: the prompts, the model and the options."""

import argparse
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from tiered.cli.flags import add_memory_options, add_model_options, add_policy_options, loading_options, policy_options
from tiered.core.checks import nearest
from tiered.models.locate import EMBEDDED_MODELS

if TYPE_CHECKING:
    from tiered.runtime import Runtime


class CommandParser(argparse.ArgumentParser):
    """The parser of a command. An error is one line.

    Attributes:
        late: adds the arguments that need torch, after the command's name is parsed; None for none.
    """

    late: Callable[[argparse.ArgumentParser], None] | None = None

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:  # type: ignore[override]
        late, self.late = self.late, None
        if late is not None:
            late(self)
        parsed, unknown = super().parse_known_args(args, namespace)
        shown = [flag for action in self._actions if action.help != argparse.SUPPRESS for flag in action.option_strings]
        for flag in unknown:
            if flag.startswith("--") and (near := nearest(flag.partition("=")[0], shown)):
                self.error(f"unrecognized argument: {flag}; did you mean {near}?")
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return parsed, unknown

    def format_help(self) -> str:
        # The usage lists required arguments; groups list the others.
        if self.usage is None:
            needed = [action for action in self._actions if action.required and action.option_strings]
            places = [action for action in self._actions if not action.option_strings]
            words = [(place.metavar or place.dest, place.nargs) for place in places]
            words = [f"[{name} ...]" if count == "*" else str(name) for name, count in words]
            words += [f"{action.option_strings[0]} {action.metavar or action.dest.upper()}" for action in needed]
            self.usage = " ".join(["%(prog)s", *words, "[OPTION ...]"])
        return super().format_help()

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (help: {self.prog} --help)\n")


def add_call(parser: CommandParser) -> None:
    """Add the flags of prompts, model and options."""
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="prompt to answer")
    parser.add_argument(
        "--model",
        default="embedded",
        help=f"directory, id of a downloaded model, or {', '.join(EMBEDDED_MODELS)} (default: %(default)s)",
    )
    parser.add_argument("--prompt-file", type=Path, metavar="FILE", help="a file with one prompt a line")
    parser.add_argument("--raw", action="store_true", help="continue prompts without the chat template")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_json_object,
        metavar="JSON",
        help="""variables of the chat template, such as '{"enable_thinking": true}'""",
    )
    add_how(parser)


def add_how(parser: CommandParser) -> None:
    """Add the flags of policy, budget, model and the options of `generate`."""
    add_policy_options(parser)
    add_memory_options(parser)
    add_model_options(parser)
    parser.late = _add_late


def _add_late(parser: argparse.ArgumentParser) -> None:
    from tiered.cli.option_flags import add_option_flags

    add_option_flags(parser)


def _json_object(text: str) -> dict[str, Any]:
    try:
        read = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{text!r:.80} is not JSON: {error}") from None
    if not isinstance(read, dict):
        raise argparse.ArgumentTypeError(f"{text!r:.80} is a {type(read).__name__}; a JSON object is allowed")
    return read


def of_prompts(args: argparse.Namespace) -> dict[str, Any]:
    """The arguments of `generate` that say how prompts are read."""
    given = args.chat_template_kwargs
    return {"raw": args.raw, **({} if given is None else {"chat_template_kwargs": given})}


def as_asked(args: argparse.Namespace, prompts: list[str], options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "model": args.model,
        "policy": args.policy,
        "policy_options": policy_options(args),
        "prompts": prompts,
        **of_prompts(args),
        "options": dict(options),
    }


def load_runtime(args: argparse.Namespace) -> "Runtime":
    from tiered.loading import from_pretrained
    from tiered.policies.registry import make_policy

    how = loading_options(args)
    how["policy"] = make_policy(how["policy"], **policy_options(args))
    return from_pretrained(args.model, **how)


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts. Raises `ValueError` if there are none, or if they come from two places."""
    if args.prompts and args.prompt_file:
        raise ValueError("prompts are given as arguments and as --prompt-file; pass one of them")
    if args.prompts:
        return args.prompts
    if args.prompt_file is None and (sys.stdin is None or sys.stdin.isatty()):
        raise ValueError("no prompt; give one as an argument, in a --prompt-file, or on standard input")
    source = args.prompt_file or "standard input"
    try:
        text = args.prompt_file.read_text(encoding="utf-8") if args.prompt_file else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise ValueError(f"{source} is not text: {error}") from None
    # An editor may have marked the file as UTF-8 by its first character.
    prompts = [line for line in text.removeprefix("\ufeff").split("\n") if line.strip()]
    if not prompts:
        raise ValueError(f"{source} holds no prompt")
    return prompts
