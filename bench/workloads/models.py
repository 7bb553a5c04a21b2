"""The models that are measured: embedded ones and other exports, by their weights, and random ones of any size."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file

from tiered.forward.weight_records import WeightRecords
from tiered.models.base import DiffusionModel
from tiered.models.llada import LLaDA
from tiered.models.locate import checkpoint_directory, read_config
from tiered.models.weight_form import RAW_WEIGHTS

VOCABULARY = 8192
STD = 0.02  # standard deviation of random weights
AnyModel = TypeVar("AnyModel", bound=DiffusionModel)


@cache
def weights(model: str) -> dict[str, str]:
    """Settings of a point: the model's name, without the folders of a path, and a hash of its weights."""
    file = checkpoint_directory(model) / "model.safetensors"
    return {"model": Path(model).name, "weights_sha256": hashlib.sha256(file.read_bytes()).hexdigest()}


def paths(models: Sequence[str]) -> Mapping[str, str]:
    """Paths of the models, which only this machine knows, by the name that settings have."""
    return {Path(model).name: model for model in models}


def local(axes: Mapping[str, Any]) -> dict[str, Any]:
    """The `local` of a study of models."""
    return {"paths": paths(axes["model"])}


def random_model(width: int, layers: int, context: int) -> LLaDA:
    """A LLaDA of LLaDA-8B's proportions (MLP three times the width) with random weights, float32. Its answers mean
    nothing, and no token of them is ever confident."""
    torch.manual_seed(0)
    return drawn(LLaDA.from_config(_random_config(width, layers, context)))


def drawn(model: AnyModel, std: float = STD) -> AnyModel:
    """The model, with normal numbers in its matrices, drawn from torch's own generator; vectors stay as they are."""
    for parameter in model.parameters():
        if parameter.dim() > 1:
            torch.nn.init.normal_(parameter, std=std)
    return model


def in_records(model: AnyModel) -> AnyModel:
    """The same model with the matrices of each dense layer in one piece of memory, as loading puts them."""
    records = WeightRecords(model, model.wte.weight.dtype, RAW_WEIGHTS)
    for layer in records.layers:
        record = torch.empty(records.layer.nbytes, dtype=torch.uint8)
        records.write(layer, record)
        records.assign(layer, record)
        model.blocks[layer].join_biases()
    return model


def save_random(directory: Path, width: int, layers: int, context: int) -> None:
    """As `random_model`, written in the layout of Hugging Face that the official code reads. Its logits have a standard
    deviation of about 4, so that rounding decides no ranking, and it never answers with a mask."""
    model = random_model(width, layers, context)
    std = {"wte.weight": 1.0, "ff_out.weight": 4 * width**-0.5}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.mul_(std.get(name, parameter.shape[1] ** -0.5) / STD)
        model.get_parameter("ff_out.weight")[model.mask_token_id] = 0
    names = {official: model.config.parameter_names[official] for official in model.shape.weight_shapes}
    weights = {official: model.get_parameter(name).detach() for official, name in names.items()}
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = read_config("embedded") | _random_config(width, layers, context)
    (directory / "config.json").write_text(json.dumps(config))


def _random_config(width: int, layers: int, context: int) -> dict[str, Any]:
    return {
        "d_model": width,
        "n_layers": layers,
        "n_heads": width // 64,
        "n_kv_heads": width // 64,
        "mlp_hidden_size": 3 * width,
        "vocab_size": VOCABULARY,
        "embedding_size": VOCABULARY,
        "max_sequence_length": context,
        "rope_theta": 500000.0,
        "mask_token_id": VOCABULARY - 1,
        "eos_token_id": VOCABULARY - 2,
        "pad_token_id": VOCABULARY - 2,
    }
