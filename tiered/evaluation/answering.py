"""From requests to calls of `generate`: all are read and checked before the first is answered, in as few calls as their
number allows."""

import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from tiered.core.checks import check_integer
from tiered.core.errors import TierCapacityError
from tiered.evaluation.arguments import Defaults, RequestSettings
from tiered.evaluation.text import encode, fit
from tiered.output import GenerationOutput
from tiered.policies.base import Policy
from tiered.runtime import Runtime

logger = logging.getLogger(__name__)

AUTO_BATCH_SIZE = 64
_SEEDS = 2**62


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One request: its place in the list, its prompt's ids, and how it is answered: under the policy that it would be
    alone, so that what it is batched with changes nothing."""

    index: int
    ids: list[int]
    settings: RequestSettings
    policy: Policy


@dataclass(slots=True)
class CallTotals:
    """Sums over calls of `generate`: a score means little without its price.

    Attributes:
        calls, sequences: how many there were.
        forwards: of all sequences, each counted as often as it took part.
        tokens: of all answers, before they are cut; end-of-sequence and padding not counted.
        seconds: from first forwards to last commits.
        policies: sequences by the policy that they were answered under.
        peak_bytes: the largest peak of each tier, from the ledger.
    """

    calls: int = 0
    sequences: int = 0
    forwards: int = 0
    tokens: int = 0
    seconds: float = 0.0
    policies: dict[str, int] = field(default_factory=dict)
    peak_bytes: dict[str, int] = field(default_factory=dict)

    def add(self, out: GenerationOutput) -> None:
        """Count one call."""
        self.calls += 1
        self.sequences += len(out.forwards)
        self.forwards += sum(out.forwards)
        self.tokens += out.timings.tokens
        self.seconds += out.timings.total
        policy = str(out.choice.policy)
        self.policies[policy] = self.policies.get(policy, 0) + len(out.forwards)
        for tier, report in out.memory.tiers.items():
            self.peak_bytes[str(tier)] = max(self.peak_bytes.get(str(tier), 0), report.peak)

    def as_dict(self) -> dict[str, Any]:
        """Plain types for JSON; ratios where there is anything to divide by."""
        figures = asdict(self)
        if self.sequences:
            figures["forwards_per_sequence"] = self.forwards / self.sequences
            figures["tokens_per_forward"] = self.tokens / self.forwards
            figures["tokens_per_second"] = self.tokens / self.seconds
        return figures


class Answering:
    """Answers requests with one loaded model.

    Attributes:
        defaults: for requests that do not set an option.
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
        """`generation`, and errors: as in `Defaults`."""
        self._runtime, self._tokenizer, self._add_bos_token = runtime, tokenizer, add_bos_token
        self.defaults, self.totals = Defaults(runtime, generation), CallTotals()

    def jobs(self, requests: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Job]:
        """What is to be done for every (context, gen_kwargs).

        Raises:
            TypeError, ValueError: bad `gen_kwargs`, or an answer that leaves no room for a prompt.
        """
        # One reading, and one warning, for all requests of a task.
        read: dict[str, RequestSettings] = {}
        settings: list[RequestSettings] = []
        longest = self._runtime.model.shape.max_context
        for _, gen_kwargs in requests:
            key = json.dumps(gen_kwargs, default=repr)
            own = read[key] = read.get(key) or self.defaults.settings(gen_kwargs)
            if own.columns >= longest:
                raise ValueError(
                    f"max_gen_toks = {own.max_gen_toks} takes {own.columns} of the model's {longest} positions and "
                    "leaves none for a prompt"
                )
            settings.append(own)
        prompts = fit([self.encode(context) for context, _ in requests], [longest - own.columns for own in settings])
        return [
            Job(index=i, ids=ids, settings=own, policy=self._runtime.choose(torch.tensor([ids]), **own.options).policy)
            for i, (ids, own) in enumerate(zip(prompts, settings, strict=True))
        ]

    def answer(self, batch: list[Job], number: int) -> Int[Tensor, "batch columns"]:
        """Ids behind the prompts of jobs with equal options and policies, the first of which is the `number`-th to be
        answered."""
        rows = [torch.tensor(job.ids) for job in batch]
        pad = self._runtime.model.pad_token_id
        ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad, padding_side="left")
        longest = ids.shape[1]
        mask = torch.arange(longest) >= longest - torch.tensor([len(row) for row in rows])[:, None]
        options = dict(batch[0].settings.options)
        options["seed"] = (self.seed(options) + number) % _SEEDS
        out = self._runtime.with_policy(batch[0].policy).generate(ids, attention_mask=mask, **options)
        self.totals.add(out)
        return out.sequences[:, longest:]

    def seed(self, options: Mapping[str, Any]) -> int:
        """The option's; where it is not given, what torch was seeded with: the harness does that by `--seed`."""
        given = options.get("seed")
        return torch.initial_seed() % _SEEDS if given is None else given

    def encode(self, text: str) -> list[int]:
        """Ids of a prompt."""
        eos = self._runtime.model.eos_token_id
        return encode(self._tokenizer, text, eos_token_id=eos, add_bos_token=self._add_bos_token)


def parse_batch_size(batch_size: int | str, max_batch_size: int | None) -> tuple[int, bool]:
    """Sequences of a call, and whether fewer will do where memory is short ("auto", "auto:N").

    Raises:
        TypeError, ValueError: anything but that or a positive number.
    """
    if isinstance(batch_size, str) and batch_size.partition(":")[0] == "auto":
        size, auto = AUTO_BATCH_SIZE if max_batch_size is None else max_batch_size, True
    else:
        text = isinstance(batch_size, str) and batch_size.isdecimal()
        size, auto = int(batch_size) if text else batch_size, False
    if isinstance(size, str):
        raise ValueError(f"batch_size = {size!r}; a positive int or 'auto' is allowed")
    check_integer("max_batch_size" if auto else "batch_size", size, least=1)
    return size, auto


def answer_in_batches(
    jobs: Sequence[Job], size: int, answer: Callable[[list[Job], int], Int[Tensor, "batch columns"]], *, auto: bool
) -> Iterator[tuple[Job, list[int]]]:
    """Every job with the ids of its canvas, in the order in which they are done.

    Jobs of one `RequestSettings.key` and policy go together, longest prompts first: the call that takes most memory
    comes first, and little is padded.

    Args:
        jobs: in the order of the requests.
        size: jobs of a batch, at most.
        answer: ids behind the prompts of a batch, whose first job is the n-th to be done (from 0).
        auto: where memory is short, go on with half as many.
    """
    groups: dict[tuple[str, Policy], list[Job]] = {}
    for job in jobs:
        groups.setdefault((job.settings.key, job.policy), []).append(job)
    done = 0
    for group in groups.values():
        group.sort(key=lambda job: -len(job.ids))
        while group:
            batch = group[:size]
            try:
                answers = answer(batch, done).tolist()
            except (TierCapacityError, torch.OutOfMemoryError) as error:
                if not auto or len(batch) == 1:
                    raise
                size = len(batch) // 2
                logger.info("%d sequences do not fit: going on with %d. %s", len(batch), size, error)
                continue
            yield from zip(batch, answers, strict=True)
            done += len(batch)
            del group[: len(batch)]
