"""One call of `generate` put together: its canvas, how tokens are drawn and committed, and the loop over both."""

from collections.abc import Callable

import torch
from torch import Tensor

from tiered.core.canvas import Canvas
from tiered.decoding.attention_shift import AttentionShift
from tiered.decoding.guidance import Guidance
from tiered.decoding.loop import Denoiser
from tiered.decoding.observers import Inspector, Streamer
from tiered.decoding.proposer import Proposer
from tiered.decoding.publishing import Publisher
from tiered.decoding.random_streams import RandomStreams
from tiered.decoding.rules.adaptive import Adaptive
from tiered.forward.forward import Forward
from tiered.inputs import Prompts
from tiered.models.base import DiffusionModel
from tiered.options import GenerationOptions
from tiered.policies.base import Policy


def denoiser(
    model: DiffusionModel,
    prompts: Prompts,
    chosen: GenerationOptions,
    policy: Policy,
    make_forward: Callable[[Canvas], Forward],
    *,
    prior: Tensor | None = None,
    shift: AttentionShift | None = None,
    streamer: Streamer | None = None,
    inspector: Inspector | None = None,
) -> Denoiser:
    """What answers `prompts`, which are on the model's device.

    Args:
        make_forward: the forward over a canvas, within what is booked for the call.
        prior: what answers begin as; None: masks, or noise that the seed draws.
        shift: measures for a rule that needs it (`CommitRule.needs_shift`).
    """
    if model.shape.block_causal and chosen.block_edges == "sequence":
        ids, pads, tails = prompts.in_blocks(chosen.block)
    else:
        ids, pads = prompts.packed()
        tails = torch.zeros_like(pads) if model.shape.block_causal else None
    batch, device = len(ids), ids.device
    # A call that draws nothing leaves torch's default stream alone.
    draws = chosen.draws or (prior is None and model.shape.noise == "uniform")
    streams = RandomStreams(chosen.seed if draws else 0, batch, device)
    if prior is None and model.noise is not None:
        prior = streams.prior(chosen.columns, model.noise)
    canvas = Canvas(
        ids,
        pads,
        max_new_tokens=chosen.max_new_tokens,
        trailing=chosen.trailing_noise,
        block_length=chosen.block,
        mask_token_id=model.mask_token_id,
        prior=None if prior is None else prior.to(device),
        tails=tails,
    )
    if streamer is not None:
        streamer.put(prompts.ids.cpu())
    ends = chosen.ends(model.eos_token_id)
    return Denoiser(
        canvas,
        make_forward(canvas),
        policy.start(),
        chosen.rule().start(chosen.steps_per_block, streams),
        Proposer(model, chosen.sampling(), streams, min_new_tokens=chosen.min_new_tokens, ends=ends),
        Publisher(
            canvas,
            model,
            max_new_tokens=chosen.max_new_tokens,
            ends=ends,
            stop_at_eos=chosen.stop_at_eos,
            output_history=chosen.output_history,
            streamer=streamer,
        ),
        guidance=Guidance(chosen.cfg_scale, model.mask_token_id) if chosen.cfg_scale else None,
        correction=Adaptive().start(chosen.correction_steps) if chosen.correction_steps else None,
        shift=shift,
        inspector=inspector,
    )
