"""A trained model as a checkpoint that `tiered.from_pretrained` loads."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tiered.core.whole_file import write_then_rename
from tiered.models.base import DiffusionModel
from training.tokenizer import save_tokenizer


def export(model: DiffusionModel, config: Mapping[str, Any], directory: Path, report: Mapping[str, Any]) -> None:
    """Write weights, config.json, the tokenizer's files, and `report` as training.json.

    The caller names the folder: the package's own assets belong to the model that docs/embedded-model.md describes.
    """
    save_tokenizer(directory, model_max_length=model.shape.max_context)
    weights = {
        official: model.get_parameter(model.config.parameter_names[official]).detach().contiguous()
        for official in model.shape.weight_shapes
    }
    write_then_rename(directory / "model.safetensors", lambda part: save_file(weights, part, {"format": "pt"}))
    for name, content in (("config.json", config), ("training.json", report)):
        text = json.dumps(content, indent=2) + "\n"
        write_then_rename(directory / name, lambda part, text=text: part.write_text(text))
