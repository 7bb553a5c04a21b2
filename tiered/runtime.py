"""The runtime, a loaded model under a policy and a budget, with `generate` and `logits`."""

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

from jaxtyping import Float
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.call import CallContext
from tiered.core.buffers import dtype_name
from tiered.core.byte_size import format_bytes
from tiered.core.features import Tier
from tiered.core.ledger import Ledger
from tiered.core.modes import call_modes
from tiered.decoding.loop import Denoiser
from tiered.decoding.observers import Inspector, Streamer, check_inspector, check_streamer, ending
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
from tiered.prepare import PreparedCall, check_call, prepare, read_block, read_noise_mask
from tiered.tiers.stats import TierStats
from tiered.tiers.tiers import Tiers


class Runtime:
    """A loaded model, a policy, and the ledger of their memory.

    Later calls reuse the pinned host memory of a call, so it stays booked. As a context manager, a runtime closes
    itself: `with tiered.from_pretrained(…) as runtime:`.
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
        """
        Args:
            ledger: byte counts in which the weights are booked already; None for new ones without caps or weights.
            transport: makes a call's transport between the tiers; None for CUDA streams, or threads without CUDA.
            kv: code of keys and values; None for raw ones.
            weights: places of the model's weights, some perhaps below the device; None if all are on it.
        """
        self.policy = policy
        self.ledger = ledger or Ledger()
        self.tokenizer = tokenizer
        self.name = name
        self._call = CallContext(model, self.ledger, transport, kv, weights)
        self.device, self.dtype = self._call.device, next(model.parameters()).dtype

    def with_policy(self, policy: str | Policy, **policy_options: Any) -> "Runtime":
        """A runtime of the same loaded model and ledger under another policy. Closing either closes both.

        Raises:
            TypeError, ValueError: an unknown policy or option.
        """
        other = object.__new__(type(self))
        vars(other).update(vars(self), policy=make_policy(policy, **policy_options))
        return other

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        raise TypeError(
            f"{self!r} cannot be copied or pickled, because it owns a model and its memory: use `with_policy` for "
            "another runtime of this model, and tiered.from_pretrained in another process"
        )

    @property
    def model(self) -> DiffusionModel:
        """The loaded model. Raises `ValueError` if the runtime is closed."""
        return self._call.model

    @call_modes
    def close(self) -> None:
        """Drop the model and the host memory that calls share, and release both in the ledger. It waits for another
        thread's call whose layers are streamed. A second call does nothing.

        The model's memory is freed with its last reference; on CUDA, torch's allocator keeps it. Later calls of this
        runtime, and of runtimes that `with_policy` made from it, raise `ValueError`.
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
        parts = [str(self.policy), f"{dtype_name(self.dtype)} on {self.device}", *tiers]
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
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prior: Tensor | None = None,
        streamer: Streamer | None = None,
        inspector: Inspector | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Denoise an answer to every prompt.

        Several threads may call it at a time. If layers of the weights are streamed, calls of different threads run one
        after the other.

        Args:
            inputs: a string, strings, chat messages, several chats, or token ids. Ids are a tensor or a numpy array
                [batch, length], lists of ints (one prompt, or several, padded on the left), or a tokenizer's output. A
                string is a user's message if the tokenizer has a chat template; ids are continued as they are.
            generation_config: options, or a mapping of them; `options` override these.
            input_ids: ids in place of `inputs`, so that `generate(**tokenizer(texts))` works.
            attention_mask: mask of the ids' shape: 0 at padding, on any side. A padded prompt gets the same answer as
                alone.
            raw: whether strings are continued as they are, even if there is a chat template.
            chat_template_kwargs: variables of the chat template, such as `{"enable_thinking": True}`; None for none.
            prior: initial ids [batch, max_new_tokens + trailing_noise] of answers, for a rule that rewrites tokens.
                They replace the noise that `seed` draws, by noise of your own or by an answer to revise.
            streamer: receives prompts, drafts and final blocks (`tiered.decoding.observers.Streamer`).
            inspector: reads the caches after each forward (`tiered.decoding.observers.Inspector`). Its memory is booked
                with the call, and `timings` include its time.
            **options: fields of `GenerationOptions`, also under their names in official scripts; and `token_type_ids`,
                the zeros that tokenizers return.

        Raises:
            TierCapacityError: the call does not fit the budget; no work has started.
            NonFiniteError: logits are NaN or infinite, so no token can be chosen. The error has the tokens fixed
                before.
            TypeError, ValueError: an invalid argument, named in the message.
        """
        check_inspector(inspector)
        check_streamer(streamer)
        with ending(streamer), ExitStack() as reported:
            call = self.prepare(
                inputs,
                generation_config=generation_config,
                input_ids=input_ids,
                attention_mask=attention_mask,
                raw=raw,
                chat_template_kwargs=chat_template_kwargs,
                prior=prior,
                **options,
            )
            for warning in call.warnings:
                warnings.warn(warning, stacklevel=3)  # the caller's line, behind the decorator
            with self.begin(call, streamer=streamer, inspector=inspector, reported=reported) as (denoiser, tiers):
                denoised = denoiser.run()
                moved = None if tiers is None else tiers.ended()
            del denoiser  # it keeps the call's features, which the ledger has released
            return self.output(call, denoised, moved)

    def prepare(
        self,
        inputs: Inputs | None = None,
        *,
        generation_config: GenerationOptions | Mapping[str, Any] | None = None,
        raw: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        prior: Tensor | None = None,
        **options: Any,
    ) -> PreparedCall:
        """A call of `generate` with these arguments, checked but not begun.

        Raises:
            TypeError, ValueError: as `generate`.
        """
        model, name = self.model, self.name
        ids = {each: options.pop(each, None) for each in ENCODED}
        chosen = GenerationOptions.of(
            generation_config, options, mask_token_id=model.mask_token_id, shape=model.shape, name=name
        )
        check_call(chosen, model, self.policy, name=name)
        prompts = self._read(inputs, ids, raw=raw, chat_template_kwargs=chat_template_kwargs)
        return prepare(self._call, self.policy, chosen, prompts, prior)

    def check_alone(self, call: PreparedCall) -> None:
        """Raise `TierCapacityError` if the budget has no room for the call even without other calls."""
        self._call.check_alone(call.choice.policy, call.sizes)

    @contextmanager
    def begin(
        self,
        call: PreparedCall,
        *,
        streamer: Streamer | None = None,
        inspector: Inspector | None = None,
        beside: Sequence[PreparedCall] = (),
        reported: ExitStack | None = None,
    ) -> Iterator[tuple[Denoiser, Tiers | None]]:
        """Book the bytes of a call while the `with` lasts. Several calls that have begun may take turns in one thread.

        Yields the call's loop, before its first step, and its tiers (None if everything is on the device). `beside`,
        `reported`: see `CallContext.booked`.

        Raises:
            TierCapacityError: the call does not fit beside the bytes booked already.
        """
        sizes, inspected = call.sizes, {}
        if inspector is not None:
            inspected = inspector.device_bytes(
                sizes.shape, sequences=sizes.sequences, length=sizes.context, dtype=sizes.dtype
            )
        others = [(each.choice.policy, each.sizes) for each in beside]
        booked = self._call.booked(call.choice.policy, sizes, inspected, beside=others, reported=reported)
        with booked as (tiers, needed):
            yield denoiser(self._call, call, tiers, needed, streamer=streamer, inspector=inspector), tiers

    def output(self, call: PreparedCall, denoised: GenerationState, moved: TierStats | None) -> GenerationOutput:
        """The output of a finished call."""
        weights = self._call.weights
        return GenerationOutput.of(
            call.prompts,
            denoised,
            choice=call.choice,
            ends=call.options.ends(*self.model.ends),
            tokenizer=self.tokenizer,
            memory=self.ledger.report(allocator_peak=allocator_peak(self.device)),
            tiers=moved,
            weights=None if weights is None else weights.stats(),
        )

    def choose(self, inputs: Inputs | None = None, **asked: Any) -> Choice:
        """The policy of `generate` with these arguments, and the reason for it.

        It is the runtime's own, unless an option is "auto" (`policy`, `refresh`, `refresh_blocks`). The same arguments
        under the same budget give the same choice.

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
        columns: tuple[int, int] | None = None,
        token_type_ids: Ids | None = None,
    ) -> Float[Tensor, "batch columns vocab"]:
        """float32 logits from one uncached forward. They may hold NaN and infinity, for which `generate` raises.

        Logits of padding rows have no meaning. With a prediction shift (Dream), row r predicts token r + 1.

        Args:
            input_ids, attention_mask, token_type_ids: ids and their mask, as for `generate`.
            noise_mask: mask [batch, length] of a family that has one: 0 at clean tokens (padding included), 1 at noisy
                ones. Clean tokens come first, and see only clean tokens, or in a causal context only those before them.
                None for no clean token, or in a causal context for all tokens before the last block.
            block_length: block length of a block-causal family, counted from each sequence's first token; None for the
                one in config.json.
            columns: first column with logits, and the one behind the last; None for all. Only these take memory.

        Raises:
            TierCapacityError: the step does not fit the budget.
            TypeError, ValueError: ids or a mask of the wrong type, shape or range; a block length that is missing or
                differs from the checkpoint's; columns that are not there.
        """
        ids = {"input_ids": input_ids, "attention_mask": attention_mask, "token_type_ids": token_type_ids}
        prompts, shape = self._read(None, ids).to(self.device), self.model.shape
        batch, length = prompts.ids.shape
        check_positions(shape, length, "the ids make")
        clean = read_noise_mask(noise_mask, shape, (batch, length), self.device)
        block = read_block(block_length, shape, name=self.name)
        if columns is None:
            columns = 0, length
        if not (isinstance(columns, tuple) and [*map(type, columns)] == [int, int]):
            raise TypeError(
                f"columns = {columns!r}; two ints are allowed: the first column, and the one behind the last"
            )
        first, end = columns
        if not 0 <= first < end <= length:
            raise ValueError(f"columns = {columns}; 0 <= first < end <= {length} is allowed")
        sizes = self._call.sizes(batch, length, end - first, whole_logits=True)
        with self._call.booked(row_schedule("none"), sizes):
            forward = uncached(self._call, prompts, block)
            final = forward.limits.last_block() if clean is None else clean
            return forward.logits(Pass(prompts.ids, forward.rows, slice(first, end), final=final))

    def _read(self, inputs: Inputs | None, ids: Mapping[str, Any], **how: Any) -> Prompts:
        prompts = read_inputs(
            inputs,
            ids,
            tokenizer=self.tokenizer,
            tokenizer_missing=f"{self.name!r} has none ({TOKENIZER_SOURCES}, beside the weights)",
            pad_token_id=self.model.pad_token_id,
            vocab_size=self.model.shape.vocab_size,
            **how,
        )
        return prompts.to("cpu")
