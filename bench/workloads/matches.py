"""Peers in a match: implementations of one algorithm on one checkpoint, asked the same prompts in turn; a row each.

A peer is a policy; or "POLICY, parity" (baselines/parity.py); or "official, NAME" (baselines/official.py); or
"transformers, KIND" (baselines/by_transformers.py), whose options are None for no cache.
No peer stops at the end of an answer, so that whole answers can be compared.
"""

import random
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from baselines import parity
from baselines.asked import PeerError
from baselines.official import Official
from measuring.worker import RefusedError, refusing
from training import tasks

import tiered
from tiered.models.locate import checkpoint_directory
from tiered.policies.registry import make_policy
from tiered.runtime import Runtime
from workloads.models import VOCABULARY, save_random

OF = ("peer", "task")
TIMED = ("seconds", "tokens_per_second", "over_official")
WARM_UP = 64  # tokens of a prompt whose answer is not timed: it pays for thread pools and workspaces


@dataclass(frozen=True, slots=True)
class Answer:
    """The answer to one prompt. `rows`: recomputed rows, in sum over the forwards; None if they are not known."""

    tokens: list[int]
    seconds: float
    forwards: int
    rows: float | None = None


@dataclass(slots=True)
class Peer:
    """A peer of the match. `why`: why it is out, with the `status` of its rows; `about`: columns of its rows."""

    name: str
    ask: Callable[[list[int]], Answer] | None = None
    about: dict[str, Any] = field(default_factory=dict)
    status: str = "ok"
    why: str = ""

    def out(self, error: Exception) -> None:
        """Take the peer out, because of `error`."""
        self.status, self.why = "refused" if isinstance(error, RefusedError) else "failed", str(error)


@dataclass(frozen=True, slots=True)
class Questions:
    """Prompts of one row. `right`: True for a right answer, by its prompt's number; None if there are none."""

    task: str
    prompts: list[list[int]]
    right: Callable[[int, list[int]], bool] | None = None


def measure(
    settings: Mapping[str, Any], *, paths: Mapping[str, str], official: Mapping[str, str | None]
) -> Iterator[dict[str, Any]]:
    """A row for each of `settings["peers"]`, which has their options by name, and each task.

    Beside them `settings` has "model", "call" (options of `generate`), and "agree". The model is "random", of "width"
    and "layers", with one prompt of "prompt" tokens, or an embedded one, with "tasks" as in `answers`. The first
    "agree" peers fail if their answers are not, token for token, those of the first peer that can be had. `paths`:
    paths of the models; `official`: "code" and "python".
    """
    with ExitStack() as stack:
        with TemporaryDirectory() as folder:  # gone once all have loaded: a process that is killed later leaves nothing
            if settings["model"] == "random":
                checkpoint, context = Path(folder), settings["prompt"] + settings["call"]["max_new_tokens"]
                save_random(checkpoint, settings["width"], settings["layers"], context)
            else:
                checkpoint = checkpoint_directory(paths[settings["model"]])
            runtime = tiered.from_pretrained(checkpoint, policy="none", dtype="float32", device=settings["device"])
            peers = [Peer(name) for name in settings["peers"]]
            for peer in peers:
                kind, _, name = peer.name.partition(", ")
                options, call = settings["peers"][peer.name], settings["call"]
                try:
                    if kind == "official":
                        if settings["device"] != "cpu":
                            raise RefusedError("official code is measured on the CPU alone")
                        theirs = Official(name, checkpoint, threads=settings["threads"], **official)
                        peer.about, peer.ask = theirs.about, by_official(stack.enter_context(theirs), call, options)
                    else:
                        peer.ask = by_runtime(runtime, peer.name, options, call)
                except (RefusedError, PeerError) as error:
                    peer.out(error)
        for questions in questions_of(settings, runtime):
            yield from rows_of(peers, questions, agree=settings["agree"])


def rows_of(peers: list[Peer], questions: Questions, *, agree: int) -> Iterator[dict[str, Any]]:
    """All peers on one prompt before the next one: a slow spell of the machine hits all of them."""
    peers = [replace(peer) for peer in peers]  # a peer that cannot answer these may answer others
    answers: dict[str, list[Answer]] = {peer.name: [] for peer in peers}
    for number, prompt in enumerate([questions.prompts[0][:WARM_UP], *questions.prompts]):
        for peer in peers:
            if peer.ask is not None and not peer.why:
                try:
                    answers[peer.name] += [peer.ask(prompt)][: number > 0]
                except (RefusedError, PeerError) as error:
                    peer.out(error)
    first = next((answers[peer.name] for peer in peers if not peer.why), [])
    official = next((p for p in peers if not p.why and p.name.startswith("official, ")), None)
    for number, peer in enumerate(peers):
        of = {"peer": peer.name, "task": questions.task} | peer.about
        if peer.why:
            yield of | {"status": peer.status, "why": peer.why}
            continue
        row = figures(answers[peer.name], first, questions)
        if official not in (None, peer):
            row["over_official"] = row["seconds"] * len(first) / sum(each.seconds for each in answers[official.name])
        if number < agree and row["same_tokens"] < 1:
            row |= {"status": "failed", "why": f"{1 - row['same_tokens']:.1%} of its tokens are not the first peer's"}
        yield of | row


def figures(own: list[Answer], first: list[Answer], questions: Questions) -> dict[str, Any]:
    """Columns: seconds, forwards and recomputed rows of a call, on average; right answers. And the number of answers,
    and the share of their tokens, that are as those of the `first` peer."""
    count, tokens = len(own), sum(len(answer.tokens) for answer in own)
    pairs = [pair for a, b in zip(own, first, strict=True) for pair in zip(a.tokens, b.tokens, strict=True)]
    row: dict[str, Any] = {
        "examples": count,
        "seconds": sum(answer.seconds for answer in own) / count,
        "tokens_per_second": tokens / sum(answer.seconds for answer in own),
        "nfe": sum(answer.forwards for answer in own) / count,
        "same_tokens": sum(a == b for a, b in pairs) / tokens,
        "same_answers": sum(a.tokens == b.tokens for a, b in zip(own, first, strict=True)),
    }
    rows = [answer.rows for answer in own if answer.rows is not None]
    row |= {"rows": sum(rows) / count} if rows else {}
    if questions.right is not None:
        row["correct"] = sum(questions.right(number, answer.tokens) for number, answer in enumerate(own))
    return row


def by_runtime(
    runtime: Runtime, peer: str, options: Mapping[str, Any] | None, call: Mapping[str, Any]
) -> Callable[[list[int]], Answer]:
    """A function that asks the policy of that name, or "transformers". Raises `RefusedError`."""
    kind, _, variant = peer.partition(", ")
    with refusing():
        if kind == "transformers":
            from baselines.by_transformers import ByTransformers  # here: it imports another model

            answerer: Any = ByTransformers(runtime, options)
        else:
            make = parity.policy if variant == "parity" else make_policy
            answerer = runtime.with_policy(make(kind, **(options or {})))

    def ask(prompt: list[int]) -> Answer:
        ids = torch.tensor([prompt], device=runtime.device)
        began = time.perf_counter()
        with refusing():
            out = answerer.generate(ids, stop_at_eos=False, **call)
        seconds = time.perf_counter() - began
        return Answer(out.sequences[0, len(prompt) :].tolist(), seconds, out.num_forwards, sum(out.rows_per_step))

    return ask


def by_official(theirs: Official, call: Mapping[str, Any], options: Mapping[str, Any]) -> Callable[[list[int]], Answer]:
    """A function that asks an official implementation."""
    return lambda prompt: Answer(**theirs.ask(prompt, call, options))


def questions_of(settings: Mapping[str, Any], runtime: Runtime) -> Iterator[Questions]:
    """One random prompt, or the prompts of each task."""
    if settings["model"] == "random":
        rng = random.Random(settings["seed"])
        yield Questions("random", [[rng.randrange(VOCABULARY - 8) for _ in range(settings["prompt"])]])
        return
    tokenizer: Any = runtime.tokenizer
    end = runtime.model.eos_token_id
    assert tokenizer is not None, "the tasks are asked in text"
    for task, size, count in settings["tasks"]:
        examples = [tasks.sample(task, "test", settings["seed"] + number, size=size) for number in range(count)]
        prompts = []
        for example in examples:
            chat = [{"role": "user", "content": example.prompt}]
            prompts.append(
                tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=True)["input_ids"]
            )

        def right(number: int, tokens: list[int], examples: list[tasks.Example] = examples) -> bool:
            kept = tokens[: tokens.index(end)] if end in tokens else tokens
            return tasks.score(examples[number], tokenizer.decode(kept, skip_special_tokens=True))

        yield Questions(task, prompts, right)
