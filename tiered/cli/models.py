"""`tiered models`: models that can be planned or loaded on this machine."""

import argparse
from typing import TYPE_CHECKING

from tiered.cli.printing import add_json, print_result
from tiered.core.byte_size import format_bytes, format_count
from tiered.models.presets import ALIASES
from tiered.offload.codec_bytes import Codec

if TYPE_CHECKING:
    from tiered.planning.catalog import KnownModel

DESCRIPTION = """List the embedded models, the presets, and the checkpoints of known families in the local hub cache.
Bytes are of one token in all layers: keys and values, hidden states as they are, and hidden states as deltas in host
memory. "saves" is the share of the first two that leaves the device with the hidden states."""
HEADER = ("name", "from", "family", "parameters", "layers", "KV/token", "hidden/token", "offloaded", "saves", "")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser("models", help="the models that can be planned or loaded", description=DESCRIPTION)
    add_json(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    from tiered.planning.catalog import known_models

    models = known_models()
    aliases = ", ".join(f"{alias} = {preset}" for alias, preset in ALIASES.items())
    print_result(
        args,
        f"{_table([HEADER, *map(_cells, models)])}\naliases: {aliases}",
        {"models": [model.as_dict() for model in models], "aliases": dict(ALIASES)},
    )
    return 0


def _cells(model: "KnownModel") -> tuple[str, ...]:
    return (
        model.name,
        model.source,
        model.family,
        format_count(model.parameters),
        str(model.layers),
        format_bytes(model.kv_bytes_per_token),
        format_bytes(model.hidden_bytes_per_token[Codec.RAW]),
        format_bytes(model.hidden_bytes_per_token[Codec.NVFP4_DELTA]),
        f"{model.offload_saves:.0%}",
        "can be loaded" if model.loadable else "plan only",
    )


def _table(rows: list[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    aligned = "<<<>>>>>><"
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, aligned, widths, strict=True)).rstrip()
        for row in rows
    )
