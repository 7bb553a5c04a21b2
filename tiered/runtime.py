"""The runtime: a loaded model, a policy and a budget; `generate` and `logits`."""

import time
from collections.abc import Callable, Mapping
from copy import copy
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.call import CallSpace
from tiered.call_checks import check_call, check_inspector, check_prior, read_noise_mask
from tiered.core.byte_size import format_bytes
from tiered.core.canvas import Canvas
from tiered.core.features import Account, Tier
from tiered.core.ledger import Ledger
from tiered.core.rows import Rows
from tiered.decoding.denoised import Denoised
from tiered.decoding.loop import Denoiser
from tiered.decoding.observers import Inspector
from tiered.decoding.proposer import Proposer
from tiered.decoding.rules.adaptive import Adaptive
from tiered.decoding.sequence_noise import SequenceNoise
from tiered.forward.forward import Flow
from tiered.inputs import Inputs, Prompts, read_inputs
from tiered.models.base import DiffusionModel
from tiered.models.tokenizer import TOKENIZER_SOURCES
from tiered.offload.device import allocator_peak, restart_allocator_peak
from tiered.offload.transport import Transport
from tiered.options import GenerationOptions
from tiered.output import GenerationOutput, Timings
from tiered.planning.call_sizes import check_positions
from tiered.policies.base import Policy
from tiered.policies.none import NoCache
from tiered.policies.registry import make_policy
from tiered.streaming import Streamer, StreamerListener


class Runtime:
    """A model that is loaded, a policy, and the books of what both hold. Calls leave no trace in it.

    As a context manager it closes itself: `with tiered.from_pretrained(…) as runtime:`.
    """

    def __init__(
        self,
        model: DiffusionModel,
        *,
        policy: Policy,
        ledger: Ledger | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "model",
        transport: Callable[[], Transport] | None = None,
    ) -> None:
        """`ledger` has the weights booked already; None makes one without caps, which does not count them.
        `transport` makes, for each call, what carries copies between the tiers; None: streams on CUDA, threads else."""
        self.policy = policy
        self.ledger = ledger or Ledger()
        self.tokenizer = tokenizer
        self.name = name
        self.transport = transport
        self._call = CallSpace(model, self.ledger, transport)
        weights = next(model.parameters())
        self.device, self.dtype = weights.device, weights.dtype

    def with_policy(self, policy: str | Policy, **policy_options: Any) -> "Runtime":
        """The same loaded model and books under another policy; what closes one closes both.

        Raises:
            TypeError, ValueError: no such policy or option, named.
        """
        other = copy(self)
        other.policy = make_policy(policy, **policy_options)
        return other

    @property
    def model(self) -> DiffusionModel:
        """The loaded model. Raises `ValueError` once the runtime is closed."""
        return self._call.model

    def close(self) -> None:
        """Let the model go, and take its weights off the books. Nothing else outlives a call.

        Its memory is free once nobody else refers to it, and on CUDA stays with torch's allocator for the next model.
        From then on calls of this runtime, and of others made from it by `with_policy`, raise `ValueError`. A second
        time does nothing.
        """
        self._call.close()

    def __enter__(self) -> "Runtime":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        if self._call.closed:
            return f"<Runtime {self.name!r}: closed>"
        held = {tier: (self.ledger.held(tier), self.ledger.budget.cap(tier)) for tier in Tier}
        tiers = [
            f"{tier} {format_bytes(now)}" + ("" if cap is None else f" of {format_bytes(cap)}")
            for tier, (now, cap) in held.items()
            if now or cap is not None
        ]
        parts = [str(self.policy), f"{str(self.dtype).removeprefix('torch.')} on {self.device}", *tiers]
        return f"<Runtime {self.name!r}: {', '.join(parts)}>"

    @torch.no_grad()
    def generate(
        self,
        inputs: Inputs,
        *,
        generation_config: GenerationOptions | Mapping[str, Any] | None = None,
        attention_mask: Tensor | None = None,
        raw: bool = False,
        prior: Tensor | None = None,
        streamer: Streamer | None = None,
        inspector: Inspector | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Denoise an answer to every prompt.

        Args:
            inputs: a string, strings, chat messages, several chats, or ids [batch, length]. A string is a user's
                message where the tokenizer has a chat template; ids are continued as they stand.
            generation_config: options, or a mapping of them; `options` go on top.
            attention_mask: beside ids, 0 at padding on any side. A padded prompt is answered as it would be alone.
            raw: strings are continued as they stand, whatever template there is.
            prior: ids [batch, max_new_tokens + trailing_noise] that answers begin as, in place of noise that `seed`
                draws, for a rule that rewrites tokens: noise of one's own, or an answer to go on from.
            streamer: gets prompts, drafts and final blocks (`tiered.streaming.Streamer`).
            inspector: looks into the caches after each forward (`tiered.decoding.observers.Inspector`). What it takes
                is booked with the call, and its time counts in `timings`.
            **options: the fields of `GenerationOptions`, also under the names that official scripts use.

        Raises:
            TierCapacityError: the call does not fit the budget; no work has started.
            NonFiniteError: logits are NaN or infinite, so that no token can be told from them; the error has the tokens
                that were fixed before.
            TypeError, ValueError: anything wrong with an argument, named.
        """
        chosen = GenerationOptions.of(
            generation_config, options, mask_token_id=self.model.mask_token_id, noise=self.model.shape.noise
        )
        check_call(chosen, self.model, self.policy, name=self.name)
        check_inspector(inspector)
        prompts = self._read(inputs, attention_mask, raw=raw)
        end = self.model.eos_token_id if chosen.stop_at_eos else None
        listener = None if streamer is None else StreamerListener(streamer, end)
        ids, pads = prompts.packed()
        batch, behind = ids.shape[0], chosen.max_new_tokens + chosen.trailing_noise
        length = ids.shape[1] + behind
        what = f"the prompt's {ids.shape[1]} tokens and max_new_tokens = {chosen.max_new_tokens}"
        if chosen.trailing_noise:
            what += f" and trailing_noise = {chosen.trailing_noise}"
        check_positions(self.model.shape, length, f"{what} make")
        if prior is not None:
            check_prior(prior, (batch, behind), chosen, vocab_size=self.model.shape.vocab_size)
        self.ledger.restart_peaks()
        restart_allocator_peak(self.device)
        sequences = 2 * batch if chosen.cfg_scale else batch
        rule = chosen.rule()
        measured = batch if rule.needs_drift else 0
        sampling = chosen.sampling()
        costs = self._call.costs(
            self.policy,
            sequences,
            length,
            chosen.block,
            answer=behind,
            guidance=chosen.cfg_scale > 0,
            sampled=sampling.needs_room or (rule.rewrites and rule.draws),
            attention_rows=measured,
            inspector=inspector,
        )
        with (
            self._call.reserve(costs, self._call.inspector_bytes(inspector, sequences, length)),
            self._call.tiers(costs) as tiers,
        ):
            # A call that draws nothing leaves torch's default stream alone.
            draws = chosen.draws or (prior is None and self.model.shape.noise == "uniform")
            noise = SequenceNoise(chosen.seed if draws else 0, batch, self.device)
            canvas = Canvas(
                ids,
                pads,
                max_new_tokens=chosen.max_new_tokens,
                block_length=chosen.block,
                mask_token_id=self.model.mask_token_id,
                prior=self._prior(batch, behind, noise) if prior is None else prior.to(self.device),
            )
            if listener is not None:
                listener.prompts(prompts.ids)
            began = time.perf_counter()
            state = self.policy.start()
            correction = Adaptive().start(chosen.correction_steps, noise) if chosen.correction_steps else None
            denoised = Denoiser(
                canvas,
                self._call.forward(canvas, self.policy, sequences, tiers, costs.streams),
                state,
                rule.start(chosen.steps_per_block, noise),
                proposer=Proposer(self.model, sampling, noise, min_new_tokens=chosen.min_new_tokens),
                cfg_scale=chosen.cfg_scale,
                noise=noise,
                correction=correction,
                drift=self._call.attention_drift(measured, sequences, length, chosen.block) if measured else None,
                random_remasking=chosen.remasking == "random",
                stop_at_eos=chosen.stop_at_eos,
                output_history=chosen.output_history,
                listener=listener,
                inspector=inspector,
            ).run()
            seconds = time.perf_counter() - began
            if tiers is not None:
                tiers.synchronize()
            moved = None if tiers is None else tiers.stats()
        if listener is not None:
            listener.end()
        return replace(self._output(prompts, denoised, seconds), updates=state.updates, tiers=moved)

    @torch.no_grad()
    def logits(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Tensor | None = None,
        noise_mask: Tensor | None = None,
    ) -> Float[Tensor, "batch length vocab"]:
        """float32 logits of all rows from one uncached forward, as they are: NaN and infinity too, where `generate`
        raises. Those of padding rows mean nothing. With a prediction shift (Dream) row r predicts token r + 1.

        Args:
            input_ids, attention_mask: as for `generate`.
            noise_mask: [batch, length], in a family with one: 0 at clean tokens, padding among them, which see each
                other alone; they stand in front of all others. None: no token is clean.

        Raises:
            TierCapacityError: the pass does not fit the budget.
            TypeError, ValueError: ids or a mask of the wrong type, shape or range.
        """
        prompts = self._read_ids(input_ids, attention_mask)
        batch, length = prompts.ids.shape
        clean = read_noise_mask(noise_mask, self.model.shape, (batch, length), self.device)
        with self._call.reserve(self._call.costs(NoCache(), batch, length, block_length=length)):
            forward = self._call.uncached(prompts)
            return forward.logits(prompts.ids, Rows.span(0, length), slice(0, length), clean=clean)

    @torch.no_grad()
    def hidden_states(
        self,
        input_ids: Int[Tensor, "batch length"],
        attention_mask: Tensor | None = None,
        noise_mask: Tensor | None = None,
    ) -> Float[Tensor, "layers batch length width"]:
        """The input rows of every layer in one uncached forward, in the model's dtype; those of padding rows mean
        nothing. They are what a hidden-state cache stores at a block's first step.

        Args:
            input_ids, attention_mask, noise_mask: as for `logits`.

        Raises:
            TierCapacityError: the pass, or what it returns, does not fit the budget.
            TypeError, ValueError: ids or a mask of the wrong type, shape or range.
        """
        prompts = self._read_ids(input_ids, attention_mask)
        (batch, length), shape = prompts.ids.shape, self.model.shape
        clean = read_noise_mask(noise_mask, shape, (batch, length), self.device)
        kept = shape.layers * batch * length * shape.width * self.dtype.itemsize
        costs = self._call.costs(NoCache(), batch, length, block_length=1)
        with self.ledger.holding({Account.HIDDEN: kept}), self._call.reserve(costs):
            forward = self._call.uncached(prompts)
            forward.clean = clean
            states = torch.empty(shape.layers, batch, length, shape.width, dtype=self.dtype, device=self.device)
            flow = Flow(Rows.span(0, length), self.model.embed(prompts.ids), slice(0, length))
            for layer in range(shape.layers):
                states[layer] = flow.hidden
                if layer < shape.layers - 1:  # what comes out of the last layer is no layer's input
                    flow = forward.dense(layer, flow)
            return states

    def _prior(self, batch: int, columns: int, noise: SequenceNoise) -> Int[Tensor, "batch columns"]:
        """What answers begin as: the noise that the model knows."""
        if self.model.noise is not None:
            return noise.prior(columns, self.model.noise)
        return torch.full((batch, columns), self.model.mask_token_id, device=self.device)

    def _read_ids(self, input_ids: Tensor, attention_mask: Tensor | None) -> Prompts:
        if not isinstance(input_ids, Tensor):
            raise TypeError(f"input_ids are a LongTensor [batch, length], not {type(input_ids).__name__}")
        prompts = self._read(input_ids, attention_mask)
        check_positions(self.model.shape, prompts.ids.shape[1], "the ids make")
        return prompts

    def _read(self, inputs: Inputs, attention_mask: Tensor | None, *, raw: bool = False) -> Prompts:
        prompts = read_inputs(
            inputs,
            attention_mask,
            tokenizer=self.tokenizer,
            tokenizer_missing=f"{self.name!r} has none ({TOKENIZER_SOURCES}, beside the weights)",
            pad_token_id=self.model.pad_token_id,
            vocab_size=self.model.shape.vocab_size,
            raw=raw,
        )
        return Prompts(ids=prompts.ids.to(self.device), mask=prompts.mask.to(self.device))

    def _output(self, prompts: Prompts, denoised: Denoised, seconds: float) -> GenerationOutput:
        def behind_prompts(answers: Tensor) -> Tensor:
            return torch.cat([prompts.ids.to(answers.device), answers], dim=1)

        answers = denoised.answers
        before_end = (answers == self.model.eos_token_id).cumsum(dim=1) == 0
        tokens = before_end.sum(dim=1)
        text = None
        if self.tokenizer is not None:
            kept = [answer[mask].tolist() for answer, mask in zip(answers.cpu(), before_end.cpu(), strict=True)]
            text = self.tokenizer.batch_decode(kept, skip_special_tokens=True)
        return GenerationOutput(
            sequences=behind_prompts(answers),
            text=text,
            num_forwards=len(denoised.step_seconds),
            forwards=denoised.forwards,
            tokens_per_forward=tokens.cpu() / torch.tensor(denoised.forwards),
            passes={kind.value: count for kind, count in denoised.passes.items()},
            rows_per_forward=denoised.rows,
            memory=self.ledger.report(allocator_peak=allocator_peak(self.device)),
            timings=Timings(
                total=seconds,
                first_block=sum(denoised.step_seconds[: denoised.block_ends[0]]),
                steps=denoised.step_seconds,
                tokens=int(tokens.sum()),
            ),
            history=[behind_prompts(state) for state in denoised.history] or None,
        )
