"""From requests to calls of `generate`: what all of them ask for is read and checked before the first is answered."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.call_checks import check_call
from tiered.evaluation.batches import Job
from tiered.evaluation.call_totals import CallTotals
from tiered.evaluation.gen_kwargs import RequestSettings, read_gen_kwargs
from tiered.evaluation.model_arguments import split_length
from tiered.evaluation.prompts import encode, fit
from tiered.options import GenerationOptions
from tiered.runtime import Runtime

# Where neither the task nor the model's arguments name a length, as in the harness's own models.
DEFAULT_MAX_GEN_TOKS = 256
_SEEDS = 2**62


class Answering:
    """Answers requests with one loaded model.

    Attributes:
        options: of `generate`, for requests that do not set them.
        max_gen_toks: tokens of an answer, for requests that do not say.
        totals: what all calls so far came to.
    """

    def __init__(
        self,
        runtime: Runtime,
        tokenizer: PreTrainedTokenizerBase,
        generation: Mapping[str, Any],
        *,
        add_bos_token: bool = False,
    ) -> None:
        """`generation`: options of `generate`, and a length, under any of their names.

        Raises:
            TypeError, ValueError: an option that is wrong, at odds with another, or not for this model or policy.
        """
        model = runtime.model
        self._runtime, self._tokenizer, self._add_bos_token = runtime, tokenizer, add_bos_token
        self.options, length = split_length(generation, mask_token_id=model.mask_token_id)
        self.max_gen_toks = DEFAULT_MAX_GEN_TOKS if length is None else length
        self.totals = CallTotals()
        chosen = GenerationOptions.of(
            None, self.settings({}).options, mask_token_id=model.mask_token_id, noise=model.shape.noise
        )
        check_call(chosen, model, runtime.policy, name=runtime.name)

    def settings(self, gen_kwargs: Mapping[str, Any]) -> RequestSettings:
        """How a request with these `gen_kwargs` is answered."""
        return read_gen_kwargs(gen_kwargs, self.options, self._runtime, max_gen_toks=self.max_gen_toks)

    def jobs(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Job]:
        """What is to be done for every (context, gen_kwargs).

        Raises:
            TypeError, ValueError: bad `gen_kwargs`, or an answer that leaves no room for a prompt.
        """
        keys = [json.dumps(gen_kwargs, default=repr) for _, gen_kwargs in requests]
        # One reading, and one warning, for all requests of a task.
        read = {
            key: self.settings(gen_kwargs) for key, (_, gen_kwargs) in dict(zip(keys, requests, strict=True)).items()
        }
        longest = self._runtime.model.shape.max_context
        for settings in read.values():
            if settings.columns >= longest:
                raise ValueError(
                    f"max_gen_toks = {settings.max_gen_toks} takes {settings.columns} of the model's {longest} "
                    "positions and leaves none for a prompt"
                )
        prompts = fit([self.encode(context) for context, _ in requests], [longest - read[key].columns for key in keys])
        return [
            Job(index=i, ids=ids, settings=read[key]) for i, (ids, key) in enumerate(zip(prompts, keys, strict=True))
        ]

    def answer(self, batch: list[Job], number: int) -> Int[Tensor, "batch columns"]:
        """Ids behind the prompts of jobs with equal options, the first of which is the `number`-th to be answered."""
        rows = [torch.tensor(job.ids) for job in batch]
        pad = self._runtime.model.pad_token_id
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        longest = ids.shape[1]
        mask = torch.arange(longest) >= longest - torch.tensor([len(row) for row in rows])[:, None]
        options = dict(batch[0].settings.options)
        options["seed"] = (self.seed(options) + number) % _SEEDS
        out = self._runtime.generate(ids, attention_mask=mask, **options)
        self.totals.add(out)
        return out.sequences[:, longest:]

    def seed(self, options: Mapping[str, Any] | None = None) -> int:
        """The option's; where it is not given, what torch was seeded with: the harness does that by `--seed`."""
        given = (self.options if options is None else options).get("seed")
        return torch.initial_seed() % _SEEDS if given is None else given

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        eos = self._runtime.model.eos_token_id
        return encode(self._tokenizer, text, eos_token_id=eos, add_bos_token=self._add_bos_token)
