"""Who is compared in the figure of device bytes against speed, by workload: points of the sweep, policies, baselines.

Only what answered the same calls on the same machine with the same weights stands in one panel.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from comparing.rounds import AGAIN

from reporting.metrics import device_bytes, tokens_per_second
from reporting.points import Point, Spread
from reporting.skips import Source
from reporting.wording import confidence_name

CLOSE = 0.02  # accuracies this near to the best count as as good
ONE_A_STEP = {"one a step": confidence_name(None)}  # what bench/compare.py calls it


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """One mark.

    Attributes:
        name: of the policy or baseline, with C, M and T where it is of the sweep.
        kind: "sweep", "policy" or "baseline".
        settings: more of them, for those who point at it.
        nbytes, speed: peak of the device tier; tokens a second.
        counted: whether `nbytes` is weights and cached tensors alone, the least that it takes.
        right: by task, right answers and questions.
    """

    name: str
    kind: str
    settings: str
    nbytes: float
    speed: Spread
    right: dict[str, tuple[int, int]]
    counted: bool = False


@dataclass(slots=True, kw_only=True)
class Workload:
    """Contenders who answered the same calls. `key`: what makes calls the same; `title` says it."""

    key: tuple[Any, ...]
    title: str
    files: list[str]
    contenders: list[Contender] = field(default_factory=list)

    @property
    def tasks(self) -> list[str]:
        """Those that all were asked."""
        asked = [contender.right for contender in self.contenders]
        return [task for task in asked[0] if all(task in each for each in asked)] if asked else []

    def accuracy(self, contender: Contender) -> float | None:
        """Right answers over all that `tasks` asked; None: no task was asked of all."""
        counts = [contender.right[task] for task in self.tasks]
        asked = sum(examples for _, examples in counts)
        return sum(correct for correct, _ in counts) / asked if asked else None

    def close(self) -> list[Contender]:
        """Those within `CLOSE` of the best accuracy; all where there is none."""
        known = {id(each): share for each in self.contenders if (share := self.accuracy(each)) is not None}
        best = max(known.values(), default=0.0)
        return [each for each in self.contenders if known.get(id(each), best) >= best - CLOSE - 1e-9]


def frontier(contenders: Iterable[Contender]) -> list[Contender]:
    """Those to whom no other is both as small and as fast, by size; without those whose bytes are counted in part."""
    contenders = list(contenders)
    whole = [each for each in contenders if not each.counted] or contenders
    best: list[Contender] = []
    for each in sorted(whole, key=lambda contender: (contender.nbytes, -contender.speed.value)):
        if not best or each.speed.value > best[-1].speed.value:
            best.append(each)
    return best


def workloads(sweep: Source, points: Iterable[Point], compare: Source) -> list[Workload]:
    """All workloads with two contenders or more; that with most kinds of them, and most of them, first."""
    found: dict[tuple[Any, ...], Workload] = {}
    for point in points:
        if (contender := _of_point(point)) is not None:
            settings = point.settings
            fixed = _inside(sweep.head, "grid", "fixed")
            answer = (fixed.get("max_new_tokens"), fixed.get("block_length"))
            call = (settings["context"], settings["batch"], confidence_name(settings["confidence"]), *answer)
            _put(found, sweep, call, contender, fixed.get("weights_sha256") or sweep.head.get("weights_sha256"))
    answer = (compare.head.get("canvas"), compare.head.get("block"))
    for row in compare.rows:
        # Who is measured twice to see the noise is no other contender.
        if "why" not in row and row["size"] is not None and row["policy"] != AGAIN:
            commit = ONE_A_STEP.get(row["commit"], row["commit"])
            call = (row["size"], row.get("batch", 1), commit, *answer)
            _put(found, compare, call, _of_row(row, compare.rows), compare.head.get("weights_sha256"))
    chosen = [workload for workload in found.values() if len(workload.contenders) > 1]
    return sorted(chosen, key=lambda each: (-len({c.kind for c in each.contenders}), -len(each.contenders)))


def _put(
    found: dict[tuple[Any, ...], Workload], source: Source, call: tuple[Any, ...], who: Contender, weights: Any
) -> None:
    machine = tuple(str(source.head.get(name)) for name in ("processor", "threads"))
    key = (*call, str(weights), *machine)
    if None in call or "None" in key:
        key = (*key, source.file)  # what is not known is not the same
    context, batch, commit, answer, block = call
    title = f"Lookup prompts of {context} tokens, {commit}"
    title += "" if batch == 1 else f", {batch} sequences a call"
    title += "" if answer is None or block is None else f", answers of {answer} tokens in blocks of {block}"
    workload = found.setdefault(key, Workload(key=key, title=title, files=[]))
    workload.contenders.append(who)
    if source.file not in workload.files:
        workload.files.append(source.file)


def _of_point(point: Point) -> Contender | None:
    """Speed and bytes of the lookups, as in comparisons; of all tasks where none was asked."""
    tasks = [task for task in point.tasks if task == "lookup"] or point.tasks
    speed, size = point.spread(tokens_per_second, tasks), point.spread(device_bytes, tasks)
    if speed is None or size is None:
        return None
    context, first = point.settings["context"], [row for row in point.rows if row["run"] == point.rows[0]["run"]]
    named = {row["task"]: f"lookup {context}" if row["task"] == "lookup" else row["task"] for row in first}
    shown = [str(point.settings[name]) for name in ("codec", "budget") if point.settings[name] is not None]
    return Contender(
        name=point.label,
        kind="sweep",
        settings=", ".join(shown),
        nbytes=size.value,
        speed=speed,
        right={named[row["task"]]: (row["correct"], row["examples"]) for row in first},
    )


def _of_row(row: dict[str, Any], rows: list[dict[str, Any]]) -> Contender:
    right = {
        other["task"] if other["size"] is None else f"{other['task']} {other['size']}": (
            other["correct"],
            other["examples"],
        )
        for other in rows
        if "why" not in other and (other["policy"], other["commit"]) == (row["policy"], row["commit"])
    }
    speed = row["tokens_per_second"]
    low, high = (row.get(name) for name in ("low", "high"))
    spread = Spread(
        value=speed,
        low=speed if low is None else min(low, speed),
        high=speed if high is None else max(high, speed),
        runs=1 if low is None or high is None else 2,
    )
    return Contender(
        name=row["policy"],
        kind="baseline" if row["policy"].startswith("transformers") else "policy",
        settings="",
        nbytes=row["device_bytes"],
        speed=spread,
        right=right,
        counted=row.get("bytes") == "counted",
    )


def _inside(head: dict[str, Any], *names: str) -> dict[str, Any]:
    place: Any = head
    for name in names:
        place = place.get(name) if isinstance(place, dict) else None
    return place if isinstance(place, dict) else {}
