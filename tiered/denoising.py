"""A prepared call put together: its features, its forward, its canvas, and the loop over them."""

import torch
from torch import Tensor

from tiered.call import CallContext
from tiered.core.canvas import Canvas
from tiered.decoding.attention_shift import AttentionShift
from tiered.decoding.generators import Generators
from tiered.decoding.guidance import Guidance
from tiered.decoding.loop import Denoiser
from tiered.decoding.observers import Inspector, Streamer
from tiered.decoding.output_writer import OutputWriter
from tiered.decoding.rules.rewriting import Adaptive
from tiered.decoding.token_sampler import TokenSampler
from tiered.forward.feature_store import FeatureStore
from tiered.forward.forward import Forward
from tiered.forward.forward_bytes import compared_at_a_time
from tiered.forward.parts import CanvasLimits
from tiered.forward.sizes import CallShape
from tiered.forward.streamed_store import StreamedFeatureStore
from tiered.forward.traced_model import traced
from tiered.inputs import Prompts
from tiered.models.base import DiffusionModel
from tiered.planning.call_bytes import CallBytes
from tiered.policies.base import Policy
from tiered.policies.row_schedule import row_schedule
from tiered.prepare import PreparedCall
from tiered.tiers.stored_rows import StoredRows
from tiered.tiers.tiers import Tiers


def denoiser(
    context: CallContext,
    call: PreparedCall,
    tiers: Tiers | None,
    needed: CallBytes,
    *,
    streamer: Streamer | None = None,
    inspector: Inspector | None = None,
) -> Denoiser:
    """The loop of a call, whose bytes are booked; `tiers`, `needed`: from `CallContext.booked`."""
    model, options, policy = context.model, call.options, call.choice.policy
    # A call that draws nothing leaves torch's default stream alone.
    draws = options.draws or (call.prior is None and model.shape.noise == "uniform")
    generators = Generators(options.seed if draws else 0, len(call.prompts.ids), context.device)
    prior = call.prior
    if prior is None and model.noise is not None:
        prior = generators.prior(options.columns, model.noise)
    canvas = _canvas(model, call, context.device, prior)
    if streamer is not None:
        streamer.put(call.prompts.ids)
    ends = options.ends(model.eos_token_id)
    rules = [options.rule.start(options.steps_per_block, generators)]
    if options.correction_steps:
        rules.append(Adaptive().start(options.correction_steps))
    publisher = OutputWriter(
        canvas,
        model,
        max_new_tokens=options.max_new_tokens,
        ends=ends,
        stop_at_eos=options.stop_at_eos,
        output_history=options.output_history,
        streamer=streamer,
    )
    return Denoiser(
        _forward(context, canvas, policy, call.sizes, tiers, needed),
        policy.start(),
        rules,
        TokenSampler(model, options.sampling(), generators, min_new_tokens=options.min_new_tokens, ends=ends),
        publisher,
        guidance=Guidance(options.cfg_scale, model.mask_token_id) if options.cfg_scale else None,
        shift=_attention_shift(context, call.sizes),
        inspector=inspector,
    )


def uncached(context: CallContext, prompts: Prompts, block_length: int | None = None) -> Forward:
    """A forward over all of `prompts`, with a store that every layer overwrites. `block_length`: length of the blocks
    that rows see; None for a model whose rows see the whole canvas."""
    batch, length = prompts.ids.shape
    padded = not bool(prompts.mask.all())
    positions = prompts.mask.long().cumsum(dim=1).sub_(1).clamp_(min=0) if padded else None
    return Forward(
        context.model,
        feature_store(context, row_schedule("none"), batch, length),
        torch.arange(length, device=context.device)[None] if positions is None else positions,
        CanvasLimits(
            context.model.shape,
            length,
            block_length or 0,
            positions if block_length else None,
            key_mask=prompts.mask if padded else None,
        ),
        weights=context.weights,
    )


def feature_store(context: CallContext, policy: Policy, batch: int, length: int, answer_start: int = 0) -> FeatureStore:
    """A store on the device for the features of `policy`, in the context's code of keys and values."""
    shape = context.model.shape
    return FeatureStore(
        shape,
        policy.features(shape),
        batch=batch,
        length=length,
        answer_start=answer_start,
        kv=context.kv,
        dtype=context.dtype,
        device=context.device,
    )


def _canvas(model: DiffusionModel, call: PreparedCall, device: torch.device, prior: Tensor | None) -> Canvas:
    prompts, options, shape = call.prompts.to(device), call.options, model.shape
    if shape.block_causal and options.block_edges == "sequence":
        ids, pads, tails = prompts.in_blocks(options.block)
    else:
        ids, pads = prompts.packed()
        tails = torch.zeros_like(pads) if shape.block_causal else None
    return Canvas(
        ids,
        pads,
        max_new_tokens=options.max_new_tokens,
        trailing=options.trailing_noise,
        block_length=options.block,
        mask_token_id=model.mask_token_id,
        prior=None if prior is None else prior.to(device),
        tails=tails,
    )


def _forward(
    context: CallContext,
    canvas: Canvas,
    policy: Policy,
    sizes: CallShape,
    tiers: Tiers | None,
    needed: CallBytes,
) -> Forward:
    shape, sequences = sizes.shape, sizes.sequences
    positions, key_mask, pads = canvas.positions(), canvas.key_mask(), canvas.pads if canvas.padded else None
    if key_mask is not None and sequences > canvas.batch:
        positions, key_mask, pads = positions.repeat(2, 1), key_mask.repeat(2, 1), canvas.pads.repeat(2)
    length, start = canvas.length, canvas.prompt_length
    if needed.streams is None or tiers is None:
        store = feature_store(context, policy, sequences, length, answer_start=start)
    else:
        of_call = {"length": length, "answer_start": start, "dtype": context.dtype}
        store = StreamedFeatureStore(policy.features(shape), needed.streams, tiers, **of_call)
    limits = CanvasLimits(
        shape,
        canvas.length,
        canvas.block_length if shape.block_causal else 0,
        first=canvas.prompt_length,
        key_mask=key_mask,
        pads=pads,
    )
    forward = Forward(traced(context.model), store, positions, limits, tiers, context.weights)
    if needed.records is not None and tiers is not None:
        forward.stored = StoredRows(tiers, needed.records, sequences)
    forward.most_rows = policy.needs(sizes).most_rows or canvas.length
    return forward


def _attention_shift(context: CallContext, sizes: CallShape) -> AttentionShift | None:
    if not sizes.compared:
        return None
    return AttentionShift(
        sizes.batch,
        sizes.shape.heads,
        sizes.block_length,
        sizes.context,
        chunk=compared_at_a_time(sizes),
        device=context.device,
        soft_cap=sizes.shape.soft_cap,
        sink_keys=context.model.sink_keys(sizes.shape.layers - 1),
    )
