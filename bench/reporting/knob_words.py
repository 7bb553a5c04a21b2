"""What C, M and T do to a figure, as a sentence, and how far its figures can be trusted."""

from reporting.metrics import Metric
from reporting.points import Point, wilson
from reporting.slices import Effect, Slice, effects
from reporting.wording import counted, listed, plain


def sentence(metric: Metric, points: Slice) -> str:
    """What the knobs do, the strongest first, or that none does more than chance."""
    found = effects(points, lambda point: _value(point, metric))
    spreads = [s.high - s.low for p in points.points if (s := p.spread(metric.of)) is not None]
    noise = max(spreads, default=0.0)
    noun = metric.noun
    if not found:
        return f"{noun.capitalize()} by C, M and T: too few points have a figure to say what one of them does."
    first, *rest = found
    if first.size == 0:
        return f"{_subject(found)} {noun} not at all."
    if first.size <= noise:
        return f"{_subject(found)} {noun} by no more than runs of the same point differ ({_change(metric, noise)})."
    low, high = sorted((min(first.means.values()), max(first.means.values())))
    ends = [level for level, mean in first.means.items() if mean in (low, high)]
    ends = [ends[0], next(level for level in reversed(ends) if first.means[level] != first.means[ends[0]])]
    shown = ", ".join(f"{metric.show(first.means[level])} at {first.knob} {level}" for level in ends)
    others = [f"{effect.knob} {_size(metric, effect, noise)}" for effect in rest]
    size = f", {_times(low, high)}" if metric.ratio and low else ""
    return f"{first.knob} moves {noun} most{size}: {shown}{'; ' if others else ''}{', '.join(others)}."


def certainty(metric: Metric, points: Slice) -> str:
    """How far figures can be trusted: the spread of runs, and the interval of shares."""
    runs = max((len({row["run"] for row in point.rows}) for point in points.points), default=0)
    words = f" Means of up to {runs} runs; under each, how far a run was from it." if runs > 1 else " One run a point."
    if metric.name == "accuracy" and (counts := [asked_of(point) for point in points.points if point.rows]):
        halves = sorted((high - low) / 2 for low, high in (wilson(*count) for count in counts))
        asked = max(asked for _, asked in counts)
        words += f" A point was asked {counted(asked, 'question')}; its 95 % interval is about "
        words += f"\N{PLUS-MINUS SIGN}{plain(round(100 * halves[len(halves) // 2], 1))} points."
    return words


def asked_of(point: Point) -> tuple[int, int]:
    """Right answers and questions: of the first run, since runs ask the same."""
    first = [row for row in point.rows if row["run"] == point.rows[0]["run"]]
    return sum(row["correct"] for row in first), sum(row["examples"] for row in first)


def _subject(found: list[Effect]) -> str:
    return listed([effect.knob for effect in found]) + (" changes" if len(found) == 1 else " change")


def _value(point: Point, metric: Metric) -> float | None:
    spread = point.spread(metric.of)
    return None if spread is None else spread.value


def _size(metric: Metric, effect: Effect, noise: float) -> str:
    low, high = min(effect.means.values()), max(effect.means.values())
    if low == high:
        return "not at all"
    if high - low <= noise:
        return "no more than noise"
    return _times(low, high) if metric.ratio and low else f"by {_change(metric, high - low)}"


def _times(low: float, high: float) -> str:
    return f"{plain(high / low)}\N{MULTIPLICATION SIGN}"


def _change(metric: Metric, size: float) -> str:
    return metric.show(size) if metric.ratio else f"{plain(round(100 * size, 1))} points"
