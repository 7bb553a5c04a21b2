"""A tiny random DiffusionGemma in transformers' hands and in the library's; and the sums of a step's logits."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

import torch
from allocations import Allocations
from measuring.table import Row
from measuring.worker import RefusedError
from torch import Tensor

import tiered
from tiered.decoding.generators import Generators
from tiered.decoding.tiled_sums import TiledBlock, TiledSums
from tiered.models import shape as books
from tiered.models.families import family_of
from tiered.models.logit_tiles import LogitTiles
from tiered.policies.base import StepKind

WINDOW, CANVAS, VOCABULARY = 12, 16, 512
KINDS = {"windows": 5 * ["sliding_attention"] + ["full_attention"], "full": 6 * ["full_attention"]}
OURS = "tiered"
CACHES = ("dynamic", "static", "quantized", OURS)
TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 6, "num_attention_heads": 4, "head_dim": 16,
    "num_key_value_heads": 2, "global_head_dim": 32, "num_global_key_value_heads": 1, "sliding_window": WINDOW,
    "num_experts": 8, "top_k_experts": 2, "moe_intermediate_size": 32, "vocab_size": VOCABULARY,
    "max_position_embeddings": 1024,
}  # fmt: skip


def cache_rows(settings: Mapping[str, Any]) -> Iterator[Row]:
    """Logits of a canvas behind a prompt, as transformers' `generate` computes them with each cache: how far they are
    from those of its dynamic cache, and how far another prompt moves them. 0 says that the prompt has no part in
    them. `settings` has "layers", a key of `KINDS`, "cache", one of `CACHES`, and "prompt", its tokens."""
    draws = torch.Generator().manual_seed(settings["prompt"])
    prompts = torch.randint(3, VOCABULARY, (2, 1, settings["prompt"]), generator=draws)
    canvas = torch.randint(0, VOCABULARY, (1, CANVAS), generator=draws)
    theirs = _transformers(KINDS[settings["layers"]])
    expected = _their_logits(theirs, prompts[0], canvas, "dynamic")
    if settings["cache"] == OURS:
        with tempfile.TemporaryDirectory() as folder:
            theirs.save_pretrained(folder)
            own, other = (_our_logits(folder, prompt, canvas) for prompt in prompts)
    else:
        own, other = (_their_logits(theirs, prompt, canvas, settings["cache"]) for prompt in prompts)
    yield {"difference": float((own - expected).abs().max()), "moved": float((own - other).abs().max())}


def _transformers(kinds: list[str]) -> Any:
    try:
        from transformers import DiffusionGemmaConfig, DiffusionGemmaForBlockDiffusion
    except ImportError as error:
        raise RefusedError("transformers 5.23 or newer is needed") from error
    torch.manual_seed(0)
    config = DiffusionGemmaConfig(text_config=TEXT | {"layer_types": kinds}, canvas_length=CANVAS)
    model = DiffusionGemmaForBlockDiffusion(config).eval()
    for name, weight in model.named_parameters():  # as large as those of trained models, so that prompts matter
        if weight.dim() >= 2 and "vision" not in name:
            torch.nn.init.normal_(weight, std=0.15)
    return model


def _their_logits(model: Any, prompt: Tensor, canvas: Tensor, cache: str) -> Tensor:
    seen: list[Tensor] = []
    hook = model.lm_head.register_forward_hook(lambda _, given, found: seen.append(30 * (found.float() / 30).tanh()))
    call = {"max_new_tokens": CANVAS, "max_denoising_steps": 1, "cache_implementation": cache}
    try:
        model.generate(prompt, decoder_input_ids=canvas, **call)
    except (ValueError, ImportError) as error:
        raise RefusedError(" ".join(str(error).split())) from error
    finally:
        hook.remove()
    return seen[0]


def _our_logits(folder: str, prompt: Tensor, canvas: Tensor) -> Tensor:
    runtime = tiered.from_pretrained(folder)
    call = runtime.prepare(prompt, prior=canvas, max_new_tokens=CANVAS, seed=0)
    with torch.no_grad(), runtime.begin(call) as (denoiser, _):
        steps = denoiser.steps()
        forward, pass_ = next(steps)
        while pass_.kind is not StepKind.STEP:
            forward, pass_ = steps.send(forward.answer(pass_))
        return forward.logits(pass_)


def head_rows(settings: Mapping[str, Any]) -> Iterator[Row]:
    """Sums of the logits of "rows" rows with a head of "width" × "vocab_size", whole and in tiles: bytes that torch
    allocates, and the median of "repeats" times, in turn."""
    text = TEXT | {"hidden_size": settings["width"], "vocab_size": settings["vocab_size"], "num_hidden_layers": 1}
    config = {"model_type": "diffusion_gemma", "text_config": text | {"layer_types": KINDS["full"][:1]}}
    with torch.device("meta"):
        model = family_of(config).resolve_loader().from_config(config)
    draws = torch.Generator().manual_seed(0)
    model.wte.weight = torch.nn.Parameter(
        torch.randn(settings["vocab_size"], settings["width"], generator=draws).mul_(0.02), requires_grad=False
    )
    model.ln_f.weight = torch.nn.Parameter(torch.ones(settings["width"]), requires_grad=False)
    hidden = torch.randn(1, settings["rows"], settings["width"], generator=draws)
    tiles = {"whole": settings["vocab_size"], "tiles": books.VOCABULARY_TILE}
    seconds: dict[str, list[float]] = {name: [] for name in tiles}
    nbytes = {}
    with torch.no_grad():
        for name, tile in tiles.items():
            with Allocations() as allocated:
                _sums(model, hidden, tile)
            nbytes[name] = allocated.peak
        for _ in range(settings["repeats"]):
            for name, tile in tiles.items():
                began = time.perf_counter()
                _sums(model, hidden, tile)
                seconds[name].append(time.perf_counter() - began)
    yield {f"{name}_bytes": nbytes[name] for name in tiles} | {f"{name}_s": median(seconds[name]) for name in tiles}


def _sums(model: Any, hidden: Tensor, tile: int) -> TiledSums:
    before, books.VOCABULARY_TILE = books.VOCABULARY_TILE, tile
    try:
        pending = torch.ones(hidden.shape[:2], dtype=torch.bool)
        block = TiledBlock(LogitTiles(model, hidden), pending, [hidden.shape[1]], lambda tokens, logits: None)
        return TiledSums.of(block, 0.6, Generators(0, 1, hidden.device))
    finally:
        books.VOCABULARY_TILE = before
