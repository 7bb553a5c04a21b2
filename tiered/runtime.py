"""The runtime: a loaded model, a policy and a budget; `generate` and `logits`."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.call import CallContext
from tiered.core.byte_size import format_bytes
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.core.modes import call_modes
from tiered.decoding.loop import Denoiser
from tiered.decoding.observers import Inspector, Streamer, check_streamer, ending
from tiered.decoding.output_writer import GenerationState
from tiered.denoising import denoiser, uncached
from tiered.forward.passes import Pass
from tiered.forward.streamed_weights import StreamedWeights
from tiered.inputs import ENCODED, Ids, Inputs, Prompts, read_inputs
from tiered.kernels.row_code import RowCode
from tiered.models.base import DiffusionModel
from tiered.models.tokenizer import TOKENIZER_SOURCES
from tiered.offload.device import allocator_peak
from tiered.offload.transport import Transport
from tiered.options import GenerationOptions
from tiered.output import GenerationOutput
from tiered.planning.checks import check_positions
from tiered.planning.choice import Choice
from tiered.policies.base import Policy
from tiered.policies.registry import make_policy
from tiered.policies.row_schedule import row_schedule
from tiered.prepare import PreparedCall, check_call, check_inspector, prepare, read_block, read_noise_mask
from tiered.tiers.stats import TierStats
from tiered.tiers.tiers import Tiers


class Runtime:
    """A loaded model, a policy, and the books of their memory. Host memory that a call pinned stays booked, and serves
    the next calls.

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
        kv: RowCode | None = None,
        weights: StreamedWeights | None = None,
    ) -> None:
        """`ledger` has the weights booked already; None makes one without caps, which does not count them.
        `transport` makes, for each call, what carries copies between the tiers; None: streams on CUDA, threads else.
        `kv`: code of keys and values. `weights`: what has those of the model, where some may lie below the device
        already; None: all are on it."""
        self.policy = policy
        self.ledger = ledger or Ledger()
        self.tokenizer = tokenizer
        self.name = name
        self.transport = transport
        self._call = CallContext(model, self.ledger, transport, kv, weights)
        of_model = next(model.parameters())
        self.device, self.dtype = of_model.device, of_model.dtype

    def with_policy(self, policy: str | Policy, **policy_options: Any) -> "Runtime":
        """The same loaded model and books under another policy; what closes one closes both.

        Raises:
            TypeError, ValueError: no such policy or option, named.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self), policy=make_policy(policy, **policy_options))
        return other

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self!r} can be neither copied nor pickled, since it owns a model and the books of its memory: "
            "`with_policy` makes another of the same model; each process loads its own with tiered.from_pretrained"
        )

    @property
    def model(self) -> DiffusionModel:
        """The loaded model. Raises `ValueError` once the runtime is closed."""
        return self._call.model

    @call_modes
    def close(self) -> None:
        """Free the model and the host memory that calls share, and take both off the books. A second call does nothing.

        The model's memory is free once no other reference is left; on CUDA it stays with torch's allocator. Later calls
        of this runtime, and of others made from it by `with_policy`, raise `ValueError`.
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

    @call_modes
    def generate(
        self,
        inputs: Inputs | None = None,
        *,
        generation_config: GenerationOptions | Mapping[str, Any] | None = None,
        input_ids: Ids | None = None,
        attention_mask: Ids | None = None,
        raw: bool = False,
        prior: Tensor | None = None,
        streamer: Streamer | None = None,
        inspector: Inspector | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Denoise an answer to every prompt. Several threads may call it at a time; where layers of the weights are
        streamed, one call waits for the calls of another thread to end.

        Args:
            inputs: a string, strings, chat messages, several chats, or ids: a tensor or a numpy array [batch, length],
                lists of ints (one prompt, or several, padded on the left), or what a tokenizer returns. A string is a
                user's message where the tokenizer has a chat template; ids are continued as they stand.
            generation_config: options, or a mapping of them; `options` go on top.
            input_ids: ids, in place of `inputs`: `generate(**tokenizer(texts))` works.
            attention_mask: beside ids, of their shape: 0 at padding on any side. A padded prompt is answered as it
                would be alone.
            raw: strings are continued as they stand, whatever template there is.
            prior: ids [batch, max_new_tokens + trailing_noise] that answers begin as, in place of noise that `seed`
                draws, for a rule that rewrites tokens: noise of one's own, or an answer to go on from.
            streamer: gets prompts, drafts and final blocks (`tiered.decoding.observers.Streamer`).
            inspector: looks into the caches after each forward (`tiered.decoding.observers.Inspector`). What it takes
                is booked with the call, and its time counts in `timings`.
            **options: the fields of `GenerationOptions`, also under the names that official scripts use; and
                `token_type_ids`, zeros, as tokenizers return them.

        Raises:
            TierCapacityError: the call does not fit the budget; no work has started.
            NonFiniteError: logits are NaN or infinite, so that no token can be told from them; the error has the tokens
                that were fixed before.
            TypeError, ValueError: anything wrong with an argument, named.
        """
        check_inspector(inspector)
        check_streamer(streamer)
        options |= {"input_ids": input_ids, "attention_mask": attention_mask}
        with ending(streamer), ExitStack() as reported:
            call = self.prepare(inputs, generation_config=generation_config, raw=raw, prior=prior, **options)
            for warning in call.warnings:
                warnings.warn(warning, stacklevel=3)  # the caller's line, behind the decorator
            with self.begin(call, streamer=streamer, inspector=inspector, reported=reported) as (denoiser, tiers):
                denoised = denoiser.run()
                moved = None if tiers is None else tiers.ended()
            del denoiser  # it keeps the call's features, which are off the books
            return self.output(call, denoised, moved)

    def prepare(
        self,
        inputs: Inputs | None = None,
        *,
        generation_config: GenerationOptions | Mapping[str, Any] | None = None,
        raw: bool = False,
        prior: Tensor | None = None,
        **options: Any,
    ) -> PreparedCall:
        """A call of `generate` with these arguments, checked and not begun.

        Raises:
            TypeError, ValueError: as `generate`.
        """
        model, name = self.model, self.name
        ids = {each: options.pop(each, None) for each in ENCODED}
        chosen = GenerationOptions.of(
            generation_config, options, mask_token_id=model.mask_token_id, shape=model.shape, name=name
        )
        check_call(chosen, model, self.policy, name=name)
        prompts = self._read(inputs, ids, raw=raw)
        return prepare(self._call, self.policy, chosen, prompts, prior)

    def check_alone(self, call: PreparedCall) -> None:
        """Raise `TierCapacityError` if the budget has no room for the call even while no other is under way."""
        self._call.check_alone(call.choice.policy, call.sizes)

    @contextmanager
    def begin(
        self,
        call: PreparedCall,
        *,
        streamer: Streamer | None = None,
        inspector: Inspector | None = None,
        reported: ExitStack | None = None,
    ) -> Iterator[tuple[Denoiser, Tiers | None]]:
        """Book the bytes of a call while the `with` lasts. Gives the call's loop, which has not begun, and its tiers
        (None if everything is on the device). Several calls that have begun may take turns in one thread. `reported`:
        see `CallContext.booked`.

        Raises:
            TierCapacityError: the call does not fit beside what is booked.
        """
        sizes, inspected = call.sizes, {}
        if inspector is not None:
            inspected = inspector.device_bytes(
                sizes.shape, sequences=sizes.sequences, length=sizes.context, dtype=sizes.dtype
            )
        booked = self._call.booked(call.choice.policy, sizes, inspected, reported=reported)
        with booked as (tiers, needed):
            yield denoiser(self._call, call, tiers, needed, streamer=streamer, inspector=inspector), tiers

    def output(self, call: PreparedCall, denoised: GenerationState, moved: TierStats | None) -> GenerationOutput:
        """The output of a call that is over."""
        weights = self._call.weights
        return GenerationOutput.of(
            call.prompts.ids,
            denoised,
            choice=call.choice,
            ends=call.options.ends(self.model.eos_token_id),
            tokenizer=self.tokenizer,
            memory=self.ledger.report(allocator_peak=allocator_peak(self.device)),
            tiers=moved,
            weights=None if weights is None else weights.stats(),
        )

    def choose(self, inputs: Inputs | None = None, **asked: Any) -> Choice:
        """The policy that `generate` with these arguments runs under, and why: the runtime's own, unless an option is
        "auto" (`policy`, `refresh`, `refresh_blocks`). The same arguments under the same budget have the same choice.

        Raises:
            TypeError, ValueError: as `generate`.
        """
        return self.prepare(inputs, **asked).choice

    @call_modes
    def logits(
        self,
        input_ids: Ids | Mapping[str, Any],
        attention_mask: Ids | None = None,
        noise_mask: Tensor | None = None,
        block_length: int | None = None,
        *,
        token_type_ids: Ids | None = None,
    ) -> Float[Tensor, "batch length vocab"]:
        """float32 logits of all rows from one uncached forward, as they are: NaN and infinity too, where `generate`
        raises. Those of padding rows mean nothing. With a prediction shift (Dream) row r predicts token r + 1.

        Args:
            input_ids, attention_mask, token_type_ids: ids and their mask, as for `generate`.
            noise_mask: [batch, length], in a family with one: 0 at clean tokens, padding among them, which see each
                other alone; they stand in front of all others. None: no token is clean. Where contexts are causal,
                clean tokens see those in front of them; None: all in front of the last block are clean.
            block_length: of a family that sees blocks, counted from each sequence's first token; None: that of
                config.json.

        Raises:
            TierCapacityError: the step does not fit the budget.
            TypeError, ValueError: ids or a mask of the wrong type, shape or range; a block length that is missing, or
                not the checkpoint's.
        """
        ids = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        prompts, shape = self._read(None, ids), self.model.shape
        batch, length = prompts.ids.shape
        check_positions(shape, length, "the ids make")
        clean = read_noise_mask(noise_mask, shape, (batch, length), self.device)
        block = read_block(block_length, shape, name=self.name)
        with self._call.booked(row_schedule("none"), self._call.sizes(batch, length, length)):
            forward = uncached(self._call, prompts, block)
            final = forward.limits.last_block() if clean is None else clean
            return forward.logits(Pass(prompts.ids, forward.rows, slice(0, length), final=final))

    def _read(self, inputs: Inputs | None, ids: Mapping[str, Any], *, raw: bool = False) -> Prompts:
        prompts = read_inputs(
            inputs,
            ids,
            tokenizer=self.tokenizer,
            tokenizer_missing=f"{self.name!r} has none ({TOKENIZER_SOURCES}, beside the weights)",
            pad_token_id=self.model.pad_token_id,
            vocab_size=self.model.shape.vocab_size,
            raw=raw,
        )
        return prompts.to("cpu")
