"""Makes the canvas, the feature store, the forward and the loop of a prepared call."""

import torch

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
from tiered.forward.attention_bytes import attention_rows
from tiered.forward.feature_store import FeatureStore, allocated
from tiered.forward.forward import Forward
from tiered.forward.parts import CanvasLimits
from tiered.forward.streamed_store import StreamedFeatureStore
from tiered.forward.traced_model import traced
from tiered.inputs import Prompts
from tiered.kernels.host_values import on_device
from tiered.planning.call_bytes import CallBytes
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
    streamer: Streamer | None,
    inspector: Inspector | None,
) -> Denoiser:
    """The loop of a call whose bytes are booked; `tiers`, `needed`: from `CallContext.booked`."""
    model, device = context.model, context.device
    options, sizes, policy, shape = call.options, call.sizes, call.choice.policy, model.shape
    # A call without random numbers does not advance torch's default stream.
    draws = options.draws or (call.prior is None and shape.noise != "mask")
    generators = Generators(options.seed if draws else 0, sizes.batch, device)
    prior = call.prior
    if prior is None and model.noise is not None:
        prior = generators.prior(options.columns, model.noise)
    if prior is None and shape.noise == "random":
        prior = generators.tokens(sizes.answer or 0, shape.vocab_size)
    canvas = Canvas(
        on_device(call.packed.ids, device),
        call.packed.pads,
        max_new_tokens=options.max_new_tokens,
        trailing=options.trailing_noise,
        block_length=options.block,
        mask_token_id=model.mask_token_id,
        prior=None if prior is None else prior.to(device),
        tails=call.packed.tails if shape.block_causal else None,
    )
    if streamer is not None:
        streamer.put(call.prompts.ids)
    publisher = OutputWriter(
        canvas,
        model,
        max_new_tokens=options.max_new_tokens,
        ends=options.ends(*model.ends),
        stop_at_eos=options.stop_at_eos,
        output_history=options.output_history,
        streamer=streamer,
    )
    rules = [options.rule.start(options.steps_per_block, generators)]
    if options.correction_steps:
        rules.append(Adaptive().start(options.correction_steps, generators))
    shift = None
    if needed.compared is not None:
        kept = allocated(attention_rows(sizes)[0], device)
        shift = AttentionShift(kept, needed.compared, soft_cap=shape.soft_cap, sink_keys=model.sink_keys(-1))
    return Denoiser(
        _forward(context, call, canvas, tiers, needed),
        policy.start(),
        rules,
        TokenSampler(model, options.sampling(), generators, min_new_tokens=options.min_new_tokens, ends=publisher.ends),
        publisher,
        finishes_blocks=shape.finishes_blocks if options.eos_early_stop is None else not options.eos_early_stop,
        guidance=Guidance(options.cfg_scale, model.mask_token_id) if options.cfg_scale else None,
        shift=shift,
        inspector=inspector,
    )


def uncached(context: CallContext, prompts: Prompts, block_length: int | None = None) -> Forward:
    """A forward over all of `prompts`, with a store that every layer overwrites. `block_length`: block length of a
    block-causal model; None for a model whose rows see the whole canvas."""
    (batch, length), policy = prompts.ids.shape, row_schedule("none")
    sizes = context.sizes(batch, length, length)
    padded = not bool(prompts.mask.all())
    positions = prompts.mask.long().cumsum(dim=1).sub_(1).clamp_(min=0) if padded else None
    return Forward(
        context.model,
        FeatureStore(sizes, policy.features(sizes.shape), context.device),
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


def _forward(
    context: CallContext, call: PreparedCall, canvas: Canvas, tiers: Tiers | None, needed: CallBytes
) -> Forward:
    sizes, shape = call.sizes, context.model.shape
    features = call.choice.policy.features(shape)
    positions, key_mask, pads = canvas.positions(), canvas.key_mask(), canvas.pads if canvas.padded else None
    if key_mask is not None and sizes.guidance:
        positions, key_mask, pads = positions.repeat(2, 1), key_mask.repeat(2, 1), canvas.pads.repeat(2)
    if needed.streams is None or tiers is None:
        store = FeatureStore(sizes, features, context.device, needed.most_rows)
    else:
        store = StreamedFeatureStore(features, needed.streams, tiers, needed.most_rows)
    limits = CanvasLimits(
        shape,
        canvas.length,
        canvas.block_length if shape.block_causal else 0,
        first=canvas.prompt_length,
        key_mask=key_mask,
        pads=pads,
    )
    forward = Forward(traced(context.model), store, positions, limits, context.weights)
    if needed.records is not None and tiers is not None:
        forward.stored = StoredRows(tiers, needed.records, sizes.sequences)
    forward.most_rows = needed.most_rows or canvas.length
    return forward
