"""Names of options in official scripts, and their names here. The only such table."""

from collections.abc import Iterable, Mapping
from typing import Any

from tiered.core.checks import unknown_name

ALIASES: Mapping[str, str] = {
    "gen_length": "max_new_tokens",  # LLaDA
    "block_size": "block_length",  # Fast-dLLM v2
    "diffusion_steps": "steps",
    "max_denoising_steps": "block_steps",  # transformers' DiffusionGemma
    "threshold": "confidence_threshold",  # Fast-dLLM
    "threshold_early": "early_threshold",  # Polestar
    "alg": "commit",  # Dream
    "alg_temp": "confidence_temperature",
    "eps": "schedule_floor",
    "return_history": "output_history",
    "sampling_method": "commit",  # GIDD
    "min_length": "min_new_tokens",
    "denoising_steps": "block_steps",  # SDAR
    "remasking_strategy": "commit",
    "stopping_criteria_idx": "stop_tokens",
    "eos_id": "stop_tokens",  # LLaDA2
}
# For scripts of GIDD, recognised by `sampling_method`. In other scripts, `steps` counts the steps of all blocks.
GIDD_ALIASES: Mapping[str, str] = {"steps": "block_steps", "max_length": "max_new_tokens"}
# For block-causal models, whose scripts count the steps of one block.
BLOCK_ALIASES: Mapping[str, str] = {"steps": "block_steps"}
# Options of policies.
POLICY_ALIASES: Mapping[str, str] = {
    "cache_reloading_step": "refresh_interval",  # dKV-Cache on LLaDA
    "cache_steps": "refresh_interval",  # dKV-Cache on Dream
    "window_size": "window",  # dKV-Cache-Greedy
    "prompt_interval_steps": "prompt_interval",  # dLLM-Cache
    "gen_interval_steps": "response_interval",
    "cfg_interval_steps": "guidance_interval",
    "transfer_ratio": "update_ratio",
    "window_length": "window",  # Elastic-Cache
    "gamma": "similarity_threshold",
    "track_num": "tracked",
}
# Values of `commit` in official scripts, such as of Dream's `alg` and SDAR's `remasking_strategy`.
COMMIT_ALIASES: Mapping[str, Mapping[str, str]] = {
    "confidence_threshold": {"commit": "threshold"},
    "low_confidence": {"commit": "static"},
    "random": {"commit": "static", "remasking": "random"},
    "maskgit_plus": {"commit": "timestep", "confidence": "probability"},
    "topk_margin": {"commit": "timestep", "confidence": "margin"},
    "entropy": {"commit": "timestep", "confidence": "entropy"},
    "low_confidence_static": {"commit": "quota"},
    "low_confidence_dynamic": {"commit": "quota"},
}
SDAR_THRESHOLD = 0.85  # default of SDAR's dynamic strategy; its other strategies accept a threshold and ignore it
MASK_NAMES = ("mask_id", "mask_token_id")
# Options that official scripts need to return an object; the runtime always returns one.
ALWAYS_NAMES = ("return_dict_in_generate", "return_dict")


def resolve_aliases(
    options: Mapping[str, Any], names: Iterable[str], *, mask_token_id: int, block_causal: bool = False
) -> dict[str, Any]:
    """`options` under the library's own `names`; `block_causal`: whether the script is for a block-causal model. The
    mask token's id and `return_dict` are checked and dropped.

    Raises:
        ValueError: an unknown name (with the nearest one), two names of one option with different values, another mask
            token than the model's, or a false `return_dict`.
    """
    names = tuple(names)
    aliases = {**ALIASES, **(GIDD_ALIASES if "sampling_method" in options else {})}
    if block_causal:
        aliases |= BLOCK_ALIASES
    if "remasking_strategy" in options:
        options = _of_sdar(options)
    resolved: dict[str, Any] = {}
    first: dict[str, str] = {}  # the caller's name and value of each
    for given_as, value in options.items():
        if given_as in MASK_NAMES:
            if value is not None and value != mask_token_id:
                raise ValueError(f"{given_as} = {value!r}, but the model's mask token is {mask_token_id}")
            continue
        if given_as in ALWAYS_NAMES:
            if value is not None and value is not True:
                raise ValueError(f"{given_as} = {value!r}, but the result is always an object; True is allowed")
            continue
        name = aliases.get(given_as, given_as)
        if name not in names:
            raise unknown_name("option", given_as, (*names, *aliases, *MASK_NAMES))
        spelled_out = COMMIT_ALIASES.get(value) if name == "commit" and isinstance(value, str) else None
        for own_name, own_value in (spelled_out or {name: value}).items():
            said = f"{given_as} = {value!r}"
            if own_name in first and resolved[own_name] != own_value:
                raise ValueError(f"{said} contradicts {first[own_name]}; give one of them")
            resolved[own_name] = own_value
            first.setdefault(own_name, said)
    return resolved


def _of_sdar(options: Mapping[str, Any]) -> dict[str, Any]:
    given, threshold = dict(options), options.get("confidence_threshold")
    if given["remasking_strategy"] == "low_confidence_dynamic":
        given["confidence_threshold"] = SDAR_THRESHOLD if threshold is None else threshold
    elif given["remasking_strategy"] in ("low_confidence_static", "sequential"):
        given.pop("confidence_threshold", None)
    if given.get("top_k") == 0:  # off
        given["top_k"] = None
    return given
