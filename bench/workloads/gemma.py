"""A tiny random DiffusionGemma in transformers and in the library; and a step's logits whole and in tiles."""

import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch
from allocations import Allocations
from measuring.table import Row
from measuring.worker import RefusedError
from torch import Tensor
from torch.nn import Parameter

import tiered
from tiered.core.buffers import phase_bytes
from tiered.core.features import Account
from tiered.decoding.asking import next_pass
from tiered.decoding.generators import Generators
from tiered.decoding.open_block import OpenBlock
from tiered.decoding.sampling import propose as propose_tokens
from tiered.decoding.sampling_options import GREEDY, Sampling
from tiered.decoding.tiled_sums import TiledSums
from tiered.forward.forward_bytes import logit_buffers
from tiered.forward.sizes import CallShape
from tiered.models import shape as books
from tiered.models.base import head
from tiered.models.families import family_of
from tiered.models.logit_tiles import LogitTiles
from tiered.policies.base import StepKind

WINDOW, CANVAS, VOCABULARY = 12, 16, 512
# Width and vocabulary of released heads.
HEADS = {"diffusion-gemma": (2816, 262144), "llada-8b": (4096, 126464)}
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
    """Logits of a canvas behind a prompt, by transformers' `generate` with a cache, or by the library. "difference" is
    their distance from those of the dynamic cache. "moved" is their distance from those behind another prompt, 0 if the
    prompt has no part in them. `settings` has "layers", a key of `KINDS`, "cache", and "prompt", its tokens."""
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
        forward, pass_ = next_pass(steps)
        while pass_.kind is not StepKind.STEP:
            forward, pass_ = next_pass(steps, forward.answer(pass_))
        return forward.logits(pass_)


def head_rows(settings: Mapping[str, Any]) -> Iterator[Row]:
    """Costs of proposing the tokens of "rows" rows with the head of a released model, whole and in tiles. They are
    bytes that torch allocates, and the median of "repeats" times, in turn. And they are bytes that the plan books of
    logits in a call of 4,096 tokens in bfloat16. "head" is a key of `HEADS`, whose sizes are divided by "divisor".
    "propose" is "sums" for those that its rule reads, "likeliest" for likeliest tokens, and "cut" for draws under a
    cut."""
    model = _headed(settings["head"], settings["divisor"])
    hidden = torch.randn(1, settings["rows"], model.shape.width, generator=torch.Generator().manual_seed(0))
    seconds: dict[str, list[float]] = {"whole": [], "tiles": []}
    found: Row = {}
    with torch.no_grad():
        for form in seconds:
            with Allocations() as allocated, _sized(model, settings["propose"], form):
                _proposed(model, hidden, settings["propose"])
                found[f"{form}_bytes"], found[f"{form}_booked"] = allocated.peak, _booked(model, settings)
        for _ in range(settings["repeats"]):
            for form, of_form in seconds.items():
                with _sized(model, settings["propose"], form):
                    began = time.perf_counter()
                    _proposed(model, hidden, settings["propose"])
                    of_form.append(time.perf_counter() - began)
    yield found | {f"{form}_s": median(of_form) for form, of_form in seconds.items()}


def _headed(head: str, divisor: int) -> Any:
    """A model of one layer, with the weights of its head alone."""
    width, vocabulary = (size // divisor for size in HEADS[head])
    if head == "diffusion-gemma":
        text = TEXT | {"hidden_size": width, "vocab_size": vocabulary, "num_hidden_layers": 1}
        config = {"model_type": "diffusion_gemma", "text_config": text | {"layer_types": KINDS["full"][:1]}}
    else:
        sizes = {"d_model": width, "n_layers": 1, "n_heads": 4, "mlp_hidden_size": width, "vocab_size": vocabulary}
        tokens = {"mask_token_id": 0, "eos_token_id": 1, "pad_token_id": 1}
        config = {"model_type": "llada", "max_sequence_length": 4096, "rope_theta": 5e5} | sizes | tokens
    with torch.device("meta"):
        model = family_of(config).resolve_loader().from_config(config)
    weight = torch.randn(vocabulary, width, generator=torch.Generator().manual_seed(0)).mul_(0.02)
    (model.wte if model.config.head_tied else model.ff_out).weight = Parameter(weight, requires_grad=False)
    model.ln_f.weight = Parameter(torch.ones(width), requires_grad=False)
    return model


@contextmanager
def _sized(model: Any, propose: str, form: str) -> Iterator[None]:
    """Tiles as they are, or one tile of all logits."""
    name, whole = ("VOCABULARY_TILE", model.shape.vocab_size) if propose == "sums" else ("WHOLE_LOGITS", 2**62)
    before = getattr(books, name)
    try:
        setattr(books, name, whole if form == "whole" else before)
        yield
    finally:
        setattr(books, name, before)


def _proposed(model: Any, hidden: Tensor, propose: str) -> None:
    pending, rows = torch.ones(hidden.shape[:2], dtype=torch.bool), hidden.shape[1]
    tiled = model.shape.tiles_logits(rows)
    block = OpenBlock(
        logits=LogitTiles(model, hidden) if tiled else head(model, hidden.clone()),
        tokens=pending.long(),
        pending=pending,
        remaining=[rows],
        mask_token_id=0,
        streams=Generators(0, 1, hidden.device),
        sampling=Sampling(temperature=0.7, top_p=0.9) if propose == "cut" else GREEDY,
    )
    _ = TiledSums.of(block, 0.6) if propose == "sums" else propose_tokens(block)


def _booked(model: Any, settings: Mapping[str, Any]) -> int:
    sizes = CallShape(
        shape=model.shape, batch=1, context=4096, block_length=settings["rows"], dtype="bfloat16",
        sampled=settings["propose"] == "cut",
    )  # fmt: skip
    return phase_bytes(logit_buffers(sizes, settings["rows"]), Account.LOGITS)
