"""A model of transformers with the runtime's `generate`, so that both are asked and timed alike.

Bytes are counted, not booked: the storages of weights and cached tensors, after each forward. Activations, logits and
tensors that a cache puts together while a layer runs do not count.
"""

from collections import Counter
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from baselines.bidirectional_llama import forward, llama_of
from baselines.by_hand import denoise
from baselines.prefix_caches import PACKAGES, PrefixCache, storage_bytes
from tiered.core.features import Tier
from tiered.core.memory_report import MemoryReport, TierReport
from tiered.inputs import Inputs, read_inputs
from tiered.output import GenerationOutput, Timings
from tiered.planning.choice import Choice
from tiered.prepare import packed
from tiered.runtime import Runtime

Options = Mapping[str, Any] | None


class ByTransformers:
    """One baseline over the weights of a runtime; the tensors are shared."""

    def __init__(self, runtime: Runtime, options: Options) -> None:
        """`options`: a value of `matches.TRANSFORMERS`.

        Raises:
            ValueError: transformers cannot answer a short prompt here; the message says why, or what to install. This
                prompt also loads everything that a first call loads.
        """
        self._runtime, self._options, self.model = runtime, options, llama_of(runtime.model)
        prompt = torch.zeros(1, 8, dtype=torch.long, device=runtime.device)
        self.generate(prompt, max_new_tokens=4, block_length=4)

    @torch.no_grad()
    def generate(
        self,
        inputs: Inputs,
        *,
        attention_mask: Tensor | None = None,
        max_new_tokens: int,
        block_length: int,
        confidence_threshold: float | None = None,
        stop_at_eos: bool = True,
        seed: int = 0,
    ) -> GenerationOutput:
        """As `Runtime.generate`, with some of its options. Nothing is drawn, whatever the `seed`.

        Raises:
            ValueError: as on construction, if the length or the batch is the reason.
        """
        runtime = self._runtime
        prompts = read_inputs(
            inputs,
            {"attention_mask": attention_mask},
            tokenizer=runtime.tokenizer,
            tokenizer_missing="there is none",
            pad_token_id=runtime.model.pad_token_id,
            vocab_size=runtime.model.shape.vocab_size,
        )
        ids, pads, _ = packed(prompts)
        call = _Call(self, self._options, ids, pads, max_new_tokens)
        try:
            done = denoise(
                call.logits,
                ids,
                answer=max_new_tokens,
                block=block_length,
                threshold=confidence_threshold,
                mask_token=runtime.model.mask_token_id,
                end_token=runtime.model.eos_token_id if stop_at_eos else -1,  # no token is -1
                pad_token=runtime.model.pad_token_id,
                watch=call.count,
            )
        except ImportError as error:
            package = PACKAGES.get((self._options or {}).get("backend", ""))
            raise ValueError(f"not installed: pip install {package}" if package else _one_line(error)) from error
        except (AssertionError, IndexError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            raise ValueError(f"transformers on {runtime.device.type}: {_one_line(error)}") from error
        tokens = (done.answers == runtime.model.eos_token_id).cumsum(dim=1) == 0
        counts, reader = tokens.sum(dim=1), runtime.tokenizer
        said = [answer[kept].tolist() for answer, kept in zip(done.answers, tokens, strict=True)]
        return GenerationOutput(
            choice=Choice(runtime.policy),
            sequences=torch.cat([prompts.ids, done.answers], dim=1),
            text=None if reader is None else reader.batch_decode(said, skip_special_tokens=True),
            num_forwards=len(done.seconds),
            forwards=done.forwards,
            tokens_per_forward=counts / torch.tensor(done.forwards),
            steps_by_kind={name: count for name, count in call.passes.items() if count},
            rows_per_step=call.rows,
            memory=call.memory(),
            timings=Timings(
                total=sum(done.seconds),
                first_block=sum(done.seconds[: done.first_block]),
                steps=done.seconds,
                tokens=int(counts.sum()),
            ),
            history=None,
        )


class _Call:
    """The model and its cache during one call."""

    def __init__(self, owner: ByTransformers, options: Options, ids: Tensor, pads: Tensor, answer: int) -> None:
        self._llama, self._options = owner.model, options
        self._length = ids.shape[1] + answer
        columns, padded = torch.arange(self._length, device=ids.device)[None], bool(pads.any())
        # A mask is passed only if there is padding: without one the attention kernel is a faster one.
        self._mask = (columns >= pads[:, None]).long() if padded else None
        self._positions = (columns - pads[:, None]).clamp(min=0) if padded else columns
        self._cache: PrefixCache | None = None
        self._device, self._peak = ids.device.type, Counter[str]()
        self.passes = {"refresh": 0, "step": 0}
        self.rows: list[float] = []

    def logits(self, left: Tensor, canvas: Tensor, start: int, stop: int, first: bool) -> Tensor:
        """See `by_hand.Logits`."""
        if first and self._options is not None:
            self._cache = PrefixCache(self._llama.config, self._length - start, **self._options)
        cache = self._cache
        begin = 0 if (whole := first or cache is None) else start
        found = forward(
            self._llama,
            canvas[:, begin:],
            mask=None if self._mask is None else self._mask[left],
            positions=self._positions[left, begin:] if self._mask is not None else self._positions[:, begin:],
            output=torch.arange(start - begin, stop - begin, device=canvas.device),
            cache=None if cache is None else cache.next(),
        )
        self.passes["refresh" if whole else "step"] += 1
        self.rows.append(self._length - begin)
        return found

    def count(self) -> None:
        """Count the bytes that are held now."""
        cached = () if self._cache is None else self._cache.tensors()
        self._peak |= storage_bytes([*self._llama.parameters(), *self._llama.buffers(), *cached])

    def memory(self) -> MemoryReport:
        """The largest counts, as a report of the ledger. Bytes that move between tiers are not counted."""
        host = 0 if self._device == "cpu" else self._peak["cpu"]
        sizes = {Tier.DEVICE: self._peak[self._device], Tier.HOST: host, Tier.DISK: 0}
        report = {tier: TierReport(current=n, peak=n, required=n, at_peak={}, cap=None) for tier, n in sizes.items()}
        return MemoryReport(tiers=report, moved={})


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}".removesuffix(".")
