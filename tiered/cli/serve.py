"""`tiered serve`: serve a checkpoint over OpenAI's HTTP API."""

import argparse
import os
import sys

from tiered.cli.call import CommandParser, add_how, load_runtime
from tiered.core.extras import needing

KEY = "TIERED_API_KEY"
DESCRIPTION = f"""Serve a checkpoint: /v1/chat/completions, /v1/completions, /v1/models, /health, /metrics, and at / a
page that shows the canvas. Requests share forwards. On the CPU each answer is the same as alone, bit for bit; on CUDA
last bits can differ. Options of `generate` given here are the defaults of requests. If {KEY} is set, requests need
that key."""


def add_parser(subparsers: "argparse._SubParsersAction") -> None:
    parser: CommandParser = subparsers.add_parser(
        "serve", help="answer requests over HTTP, as OpenAI's API does", description=DESCRIPTION
    )
    parser.add_argument("model", metavar="MODEL", help="directory, id of a downloaded model, or 'embedded'")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on (default: %(default)s, this machine alone)"
    )
    parser.add_argument(
        "--port", type=int, default=8000, help="port to listen on; 0 for a free one (default: %(default)s)"
    )
    parser.add_argument("--name", help="name of the model for clients (default: MODEL)")
    limits = parser.add_argument_group("limits")
    for flag, default, text in (
        ("--max-running", 16, "most requests denoised at a time, if the budget has room"),
        ("--max-waiting", 256, "most requests in the queue; more are refused"),
        ("--max-prefill-rows", 512, "most rows of a long prompt computed between two steps of other requests"),
        ("--max-body", 1 << 20, "most bytes of a body"),
        ("--max-prompt-tokens", None, "most tokens of a prompt"),
        ("--max-answer-tokens", 4096, "most tokens of an answer"),
        ("--max-choices", 16, "most answers of a request"),
        ("--seconds", 600.0, "most seconds of a request, waiting included"),
        ("--grace", 30.0, "seconds for running requests to end after a signal"),
    ):
        kind, unit = (float, "SECONDS") if isinstance(default, float) else (int, "N")
        with_default = text if default is None else f"{text} (default: %(default)s)"
        limits.add_argument(flag, type=kind, default=default, metavar=unit, help=with_default)
    add_how(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    with needing("serve"):
        from tiered.serving.app import LOCAL, Service, check_api_key
        from tiered.serving.server import Server, listen
    from tiered.cli.option_flags import generation_options
    from tiered.core.checks import check_count, check_integer, check_number
    from tiered.models.locate import EMBEDDED_MODELS
    from tiered.serving.openai_fields import Limits
    from tiered.serving.scheduler import Scheduler

    check_integer("port", args.port, least=0, most=65535)
    check_number("grace", args.grace, least=0.0)
    check_number("seconds", args.seconds, least=0.0)
    for name in ("max_body", "max_answer_tokens", "max_choices", "max_running", "max_waiting", "max_prefill_rows"):
        check_integer(name, getattr(args, name), least=1)
    check_count("max_prompt_tokens", args.max_prompt_tokens)
    defaults, key = generation_options(args), os.environ.get(KEY) or None
    check_api_key(KEY, key)
    if args.host not in LOCAL and key is None:
        print(f"tiered: {KEY} is not set: every client that can reach {args.host} is served", file=sys.stderr)
    with listen(args.host, args.port) as listening, load_runtime(args) as runtime:
        runtime.prepare("x", raw=True, **defaults)  # raises for what every request would be refused for
        of_scheduler = ("max_running", "max_waiting", "max_prefill_rows", "seconds")
        scheduler = Scheduler(runtime, **{name: getattr(args, name) for name in of_scheduler})
        of_request = ("body", "prompt_tokens", "answer_tokens", "choices")
        limits = Limits(**{name: getattr(args, f"max_{name}") for name in of_request})
        service = Service(
            scheduler=scheduler,
            model=args.name or args.model,
            defaults=defaults,
            limits=limits,
            key=key,
            **({"example": "sort: Nora Ben Ivan Cleo"} if args.model in EMBEDDED_MODELS else {}),
            hosts=LOCAL if args.host in LOCAL else None,
        )
        server = Server(service, grace_seconds=args.grace)
        host = f"[{args.host}]" if ":" in args.host else args.host
        address = f"http://{host}:{listening.getsockname()[1]}"
        print(f"tiered: {service.model} at {address}", file=sys.stderr, flush=True)
        server.serve_at(listening)
    return 0
