"""Calls of policies in turn, beside an earlier checkout's and the official code's; and launches by kind of forward."""

import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import mean
from tempfile import TemporaryDirectory
from typing import Any

from baselines.asked import PeerError
from baselines.checkout import Checkout
from baselines.matches import official_of
from baselines.official import Official, commit_of
from measuring.provenance import ROOT
from measuring.worker import RefusedError

from workloads.models import VOCABULARY, save_random

OF = ("policy", "kind", "op")
TIMED = (
    *("seconds", "full_seconds", "floor_seconds", "over_floor"),
    *("before_seconds", "over_before", "official_seconds", "over_official", "ms", "before_ms"),
)
BLOCK = 32
WARM_UP = 64  # tokens of a prompt whose answer is not timed: it pays for thread pools and workspaces
WARM_CALL = {"max_new_tokens": BLOCK, "block_length": BLOCK, "steps": BLOCK}


def measure(
    settings: Mapping[str, Any], *, before: str | None, official: Mapping[str, str | None]
) -> Iterator[dict[str, Any]]:
    """Rows of `settings["part"]`, "seconds" or "launches".

    Args:
        settings: "policies" has, by the name of its rows, a policy's name and its options.
        before: root of an earlier checkout; None for no checkout.
        official: "code" and "python"; None if it is not asked.
    """
    if settings["part"] == "launches":
        yield from launches(settings["policies"], before)
    else:
        yield from seconds(settings, before, official)


def seconds(
    settings: Mapping[str, Any], before: str | None, official: Mapping[str, str | None]
) -> Iterator[dict[str, Any]]:
    """For each policy a row of its call, one for each kind of forward, and one for each operation in a kind.

    `settings` has "width" and "layers" of a random model, "prompt" tokens, "blocks" of `BLOCK` tokens, "steps" of each,
    and "threads".
    """
    draws, answer, threads = random.Random(settings["seed"]), settings["blocks"] * BLOCK, settings["threads"]
    prompt, policies = [draws.randrange(VOCABULARY - 8) for _ in range(settings["prompt"])], settings["policies"]
    call = {"max_new_tokens": answer, "block_length": BLOCK, "steps": settings["blocks"] * settings["steps"]}
    with ExitStack() as stack:
        with TemporaryDirectory() as folder:  # gone once all have loaded: a process that is killed later leaves nothing
            checkpoint = Path(folder)
            save_random(checkpoint, settings["width"], settings["layers"], len(prompt) + answer)
            roots = [ROOT] if before is None else [Path(before), ROOT]
            checkouts = [stack.enter_context(Checkout(root, checkpoint, threads=threads)) for root in roots]
            asked = {} if official["code"] is None else {name: official_of(name) for name in policies}
            theirs = {name: Theirs(name, options, call) for name, options in filter(None, asked.values())}
            for each in theirs.values():
                each.load(stack, checkpoint, prompt[:WARM_UP], threads=threads, **official)
        for checkout in checkouts:
            for policy, options in policies.values():
                checkout.call(prompt[:WARM_UP], policy, options, WARM_CALL)

        def full() -> float:
            one = {"max_new_tokens": answer, "block_length": answer, "steps": 1}
            return checkouts[-1].call(prompt, "none", {}, one)["seconds"]

        passes, answers = [full()], dict[str, list[dict[str, Any]]]()
        for name, (policy, options) in policies.items():
            if (peer := asked.get(name)) is not None:
                theirs[peer[0]].ask(prompt)
            answers[name] = [checkout.call(prompt, policy, options, call) for checkout in checkouts]
        passes.append(full())
    commit = None if before is None else commit_of(Path(before))
    for name, found in answers.items():
        now, earlier = found[-1], found[:-1]
        row: dict[str, Any] = {figure: now[figure] for figure in ("seconds", "rows", "forwards")}
        row["floor_seconds"] = mean(passes) * now["rows"] / (len(prompt) + answer)
        row |= {"full_seconds": mean(passes), "over_floor": now["seconds"] / row["floor_seconds"]}
        for was in earlier:
            same = [a == b for a, b in zip(was["tokens"], now["tokens"], strict=True)]
            row |= {"before_seconds": was["seconds"], "over_before": now["seconds"] / was["seconds"]}
            row |= {"before_commit": commit, "same_tokens": mean(same)}
        if (peer := asked.get(name)) is not None:
            row |= theirs[peer[0]].columns(now["seconds"])
        yield {"policy": name} | row
        for kind, own in now["kinds"].items():
            known = [was["kinds"][kind] for was in earlier if kind in was["kinds"]]
            yield from ({"policy": name} | each for each in rows_of(kind, own, *known))


class Theirs:
    """An official implementation, asked once a round, whichever policies stand beside it. If it cannot be had, or
    breaks, it ends alone."""

    def __init__(self, name: str, options: Mapping[str, Any], call: Mapping[str, Any]) -> None:
        """`options` under its own names; `call`: options of `Runtime.generate`."""
        self._name, self._options, self._call = name, options, call
        self._official: Official | None = None
        self._columns: dict[str, Any] = {"official": name}

    def load(self, stack: ExitStack, checkpoint: Path, warm_up: list[int], **where: Any) -> None:
        """Start it; `where`: keywords of `Official`."""
        with self._ending():
            if self._name == "polestar" and self._call["steps"] < self._call["max_new_tokens"]:
                raise RefusedError("it commits one token a step, or by a threshold")
            official = stack.enter_context(Official(self._name, checkpoint, **where))
            official.ask(warm_up, WARM_CALL, self._options)
            self._official = official

    def ask(self, prompt: list[int]) -> None:
        """Ask it, unless it was asked."""
        if self._official is not None and "official_seconds" not in self._columns:
            with self._ending():
                answer = self._official.ask(prompt, self._call, self._options)
                self._columns |= {"official_seconds": answer["seconds"], "commits": self._official.about["commits"]}

    def columns(self, seconds: float) -> dict[str, Any]:
        """Columns for the row of a policy that took `seconds`."""
        over = {"over_official": seconds / self._columns["official_seconds"]} if "commits" in self._columns else {}
        return self._columns | over

    @contextmanager
    def _ending(self) -> Iterator[None]:
        try:
            yield
        except (RefusedError, PeerError) as error:
            self._columns["official_why"], self._official = str(error), None


def rows_of(kind: str, now: Mapping[str, Any], *before: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Rows of a forward of that kind, on average: its ms, then those of each operation. `before`: the same of at most
    one earlier checkout; an operation that it lacks took no time there."""
    row = {"kind": kind, "forwards": now["forwards"], "rows": now["rows"] / now["forwards"]}
    yield row | {name: of["ms"] / of["forwards"] for name, of in zip(("ms", "before_ms"), (now, *before), strict=False)}
    for op in dict.fromkeys(op for of in (now, *before) for op in of["ops"]):
        ms = [of["ops"].get(op, 0.0) / of["forwards"] for of in (now, *before)]
        yield {"kind": kind, "op": op} | dict(zip(("ms", "before_ms"), ms, strict=False))


def launches(policies: Mapping[str, Any], before: str | None) -> Iterator[dict[str, Any]]:
    """For each policy the rows of `workloads.launches.count`; those of an earlier checkout in columns "before_…"."""
    with ExitStack() as stack:
        now, *earlier = (stack.enter_context(Checkout(Path(root))) for root in filter(None, (ROOT, before)))
        for name, of in policies.items():
            was = {(row["kind"], row.get("op")): row for checkout in earlier for row in checkout.launches(*of)}
            for row in now.launches(*of):
                same = was.get((row["kind"], row.get("op")), {})
                told = {f"before_{figure}": same[figure] for figure in ("launches", "reads") if same}
                yield {"policy": name} | row | told
