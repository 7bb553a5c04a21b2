"""The runtime: a loaded model, a policy and a budget; `generate` and `logits`."""

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.budget import MemoryBudget
from tiered.decoding.canvas import Canvas
from tiered.decoding.loop import Denoised, Denoiser
from tiered.decoding.sampling import SequenceNoise
from tiered.feature_store import FeatureStore
from tiered.features import Account
from tiered.forward import Flow, Forward
from tiered.inputs import Inputs, Prompts, read_inputs
from tiered.ledger import Ledger
from tiered.models.base import DiffusionModel
from tiered.models.checkpoint import load_weights
from tiered.models.config_source import read_config
from tiered.models.families import family_of
from tiered.models.locate import checkpoint_directory
from tiered.models.shape import BYTES_PER_ELEMENT
from tiered.models.tokenizer import TOKENIZER_FILES, load_tokenizer
from tiered.offload.device import allocator_peak, pick_device, restart_allocator_peak
from tiered.options import GenerationOptions
from tiered.output import GenerationOutput, Timings
from tiered.planning.costs import call_bytes, weight_bytes
from tiered.policies import DEFAULT_POLICY
from tiered.policies.base import Policy
from tiered.policies.none import NoCache
from tiered.policies.registry import make_policy
from tiered.rows import Rows
from tiered.streaming import Streamer, StreamerListener


def from_pretrained(
    path_or_name: str | Path,
    *,
    policy: str | Policy = DEFAULT_POLICY,
    memory: MemoryBudget | int | str | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "auto",
    **policy_options: Any,
) -> "Runtime":
    """Load a checkpoint.

    Args:
        path_or_name: a directory in Hugging Face's layout, the id of a model in the local hub cache, or "embedded".
        policy: caching policy, by name (with `policy_options`) or as an object.
        memory: hard cap on what the runtime holds: a size of the device tier, or a `MemoryBudget`; None: no cap.
        dtype: of weights, features and activations: "float32", "bfloat16", "float16"; "auto": the checkpoint's.
        device: "cpu", "cuda", "cuda:N"; "auto": CUDA where there is any.

    Raises:
        TierCapacityError: the weights alone exceed the device budget; nothing has been loaded.
        ValueError, TypeError, FileNotFoundError: anything wrong with the checkpoint or an argument, named.
    """
    chosen = make_policy(policy, **policy_options)
    ledger = Ledger(MemoryBudget.of(memory))
    target = pick_device(device)
    directory = checkpoint_directory(path_or_name)
    config = read_config(directory)
    family = family_of(config)
    shape = family.shape(config)
    dtype_name = shape.dtype if dtype == "auto" else str(dtype).removeprefix("torch.")
    if dtype_name not in BYTES_PER_ELEMENT:
        raise ValueError(f"dtype = {dtype!r}; allowed: 'auto', {', '.join(map(repr, BYTES_PER_ELEMENT))}")
    with torch.device("meta"):
        model: DiffusionModel = family.resolve_loader().from_config(config)
    tokenizer = load_tokenizer(directory)
    ledger.allocate(
        {Account.WEIGHTS: weight_bytes(shape, dtype_name)},
        hint="raise `memory`, or load the weights in a smaller dtype",
    )
    load_weights(model, directory, dtype=getattr(torch, dtype_name), device=target)
    return Runtime(model, policy=chosen, ledger=ledger, tokenizer=tokenizer, name=str(path_or_name))


class Runtime:
    """A model that is loaded, a policy, and the books of what both hold. Calls leave no trace in it."""

    def __init__(
        self,
        model: DiffusionModel,
        *,
        policy: Policy,
        ledger: Ledger | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        name: str = "model",
    ) -> None:
        """`ledger` has the weights booked already; None makes one without caps, which does not count them."""
        self.model = model
        self.policy = policy
        self.ledger = ledger or Ledger()
        self.tokenizer = tokenizer
        self.name = name
        weights = next(model.parameters())
        self.device, self.dtype = weights.device, weights.dtype

    def with_policy(self, policy: str | Policy, **policy_options: Any) -> "Runtime":
        """The same loaded model and books under another policy."""
        return Runtime(
            self.model,
            policy=make_policy(policy, **policy_options),
            ledger=self.ledger,
            tokenizer=self.tokenizer,
            name=self.name,
        )

    @torch.no_grad()
    def generate(
        self,
        inputs: Inputs,
        *,
        generation_config: GenerationOptions | Mapping[str, Any] | None = None,
        attention_mask: Tensor | None = None,
        streamer: Streamer | None = None,
        **options: Any,
    ) -> GenerationOutput:
        """Denoise an answer to every prompt.

        Args:
            inputs: a string, strings, chat messages, several chats, or ids [batch, length].
            generation_config: options, or a mapping of them; `options` go on top.
            attention_mask: beside ids, 0 at padding on any side. A padded prompt is answered as it would be alone.
            streamer: gets prompts, drafts and final blocks (`tiered.streaming.Streamer`).
            **options: the fields of `GenerationOptions`, also under the names that official scripts use.

        Raises:
            TierCapacityError: the call does not fit the budget; no work has started.
            TypeError, ValueError: anything wrong with an argument, named.
        """
        chosen = GenerationOptions.of(generation_config, options, mask_token_id=self.model.mask_token_id)
        prompts = self._read(inputs, attention_mask)
        listener = None if streamer is None else StreamerListener(streamer)
        ids, pads = prompts.packed()
        batch, length = ids.shape[0], ids.shape[1] + chosen.max_new_tokens
        self._check_length(length, f"the prompt's {ids.shape[1]} tokens and max_new_tokens = {chosen.max_new_tokens}")
        self.ledger.restart_peaks()
        restart_allocator_peak(self.device)
        sequences = 2 * batch if chosen.cfg_scale else batch
        with self._reserve(self.policy, sequences, length, chosen.block, sampled=chosen.temperature > 0):
            canvas = Canvas(
                ids,
                pads,
                max_new_tokens=chosen.max_new_tokens,
                block_length=chosen.block,
                mask_token_id=self.model.mask_token_id,
            )
            if listener is not None:
                listener.prompts(prompts.ids)
            began = time.perf_counter()
            denoised = Denoiser(
                canvas,
                self._forward(canvas, self.policy, sequences),
                self.policy.start(),
                chosen.rule().start(chosen.steps_per_block),
                temperature=chosen.temperature,
                cfg_scale=chosen.cfg_scale,
                # A call that draws nothing leaves torch's default stream alone.
                noise=SequenceNoise(chosen.seed if chosen.draws else 0, batch, self.device),
                random_remasking=chosen.remasking == "random",
                stop_at_eos=chosen.stop_at_eos,
                output_history=chosen.output_history,
                listener=listener,
            ).run()
            seconds = time.perf_counter() - began
        if listener is not None:
            listener.end()
        return self._output(prompts, denoised, seconds)

    @torch.no_grad()
    def logits(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "batch length vocab"]:
        """float32 logits of all rows from one uncached forward; those of padding rows mean nothing.

        Raises:
            TierCapacityError: the pass does not fit the budget.
            TypeError, ValueError: ids or mask of the wrong type, shape or range.
        """
        prompts = self._read_ids(input_ids, attention_mask)
        batch, length = prompts.ids.shape
        with self._reserve(NoCache(), batch, length, block_length=length):
            forward = self._uncached(prompts)
            return forward.logits(prompts.ids, Rows.span(0, length), slice(0, length))

    @torch.no_grad()
    def hidden_states(
        self, input_ids: Int[Tensor, "batch length"], attention_mask: Tensor | None = None
    ) -> Float[Tensor, "layers batch length width"]:
        """The input rows of every layer in one uncached forward, in the model's dtype; those of padding rows mean
        nothing. They are what a hidden-state cache stores at a block's first step.

        Raises:
            TierCapacityError: the pass, or what it returns, does not fit the budget.
            TypeError, ValueError: ids or mask of the wrong type, shape or range.
        """
        prompts = self._read_ids(input_ids, attention_mask)
        (batch, length), shape = prompts.ids.shape, self.model.shape
        kept = shape.layers * batch * length * shape.width * self.dtype.itemsize
        with self.ledger.holding({Account.HIDDEN: kept}), self._reserve(NoCache(), batch, length, block_length=1):
            forward = self._uncached(prompts)
            states = torch.empty(shape.layers, batch, length, shape.width, dtype=self.dtype, device=self.device)
            flow = Flow(Rows.span(0, length), self.model.embed(prompts.ids), slice(0, length))
            for layer in range(shape.layers):
                states[layer] = flow.hidden
                if layer < shape.layers - 1:  # what comes out of the last layer is no layer's input
                    flow = forward.dense(layer, flow)
            return states

    def _read_ids(self, input_ids: Tensor, attention_mask: Tensor | None) -> Prompts:
        if not isinstance(input_ids, Tensor):
            raise TypeError(f"input_ids are a LongTensor [batch, length], not {type(input_ids).__name__}")
        prompts = self._read(input_ids, attention_mask)
        self._check_length(prompts.ids.shape[1], f"the {prompts.ids.shape[1]} ids")
        return prompts

    def _read(self, inputs: Inputs, attention_mask: Tensor | None) -> Prompts:
        prompts = read_inputs(
            inputs,
            attention_mask,
            tokenizer=self.tokenizer,
            tokenizer_missing=f"{self.name!r} has none ({' and '.join(TOKENIZER_FILES)} beside the weights)",
            pad_token_id=self.model.pad_token_id,
            vocab_size=self.model.shape.vocab_size,
        )
        return Prompts(ids=prompts.ids.to(self.device), mask=prompts.mask.to(self.device))

    def _check_length(self, length: int, what: str) -> None:
        if length > self.model.shape.max_context:
            raise ValueError(
                f"{what} make {length} positions; the model was made for {self.model.shape.max_context} (config.json)"
            )

    def _reserve(self, policy: Policy, batch: int, length: int, block_length: int, *, sampled: bool = False):
        """Book what a pass takes for as long as the block lasts."""
        amounts = call_bytes(
            self.model.shape,
            policy.features(self.model.shape),
            batch=batch,
            context=length,
            block_length=block_length,
            dtype=str(self.dtype).removeprefix("torch."),
            sampled=sampled,
        )
        return self.ledger.holding(
            amounts, hint="raise `memory`, shorten the prompt or max_new_tokens, or pass fewer sequences at once"
        )

    def _store(self, policy: Policy, batch: int, length: int) -> FeatureStore:
        return FeatureStore(
            self.model.shape,
            policy.features(self.model.shape),
            batch=batch,
            length=length,
            dtype=self.dtype,
            device=self.device,
        )

    def _uncached(self, prompts: Prompts) -> Forward:
        """One forward over `prompts`, with a store that every layer overwrites."""
        batch, length = prompts.ids.shape
        padded = not bool(prompts.mask.all())
        positions = prompts.mask.long().cumsum(dim=1).sub_(1).clamp_(min=0) if padded else None
        return Forward(
            self.model,
            self._store(NoCache(), batch, length),
            torch.arange(length, device=self.device)[None] if positions is None else positions,
            prompts.mask if padded else None,
        )

    def _forward(self, canvas: Canvas, policy: Policy, sequences: int) -> Forward:
        """The forward of one call; with guidance `sequences` is twice the canvas's."""
        positions, key_mask = canvas.positions(), canvas.key_mask()
        if key_mask is not None and sequences > canvas.batch:
            positions, key_mask = positions.repeat(2, 1), key_mask.repeat(2, 1)
        return Forward(self.model, self._store(policy, sequences, canvas.length), positions, key_mask)

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
