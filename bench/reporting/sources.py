"""All inputs of the report, and where each comes from if nothing else is said."""

from dataclasses import dataclass
from pathlib import Path

from reporting.points import Point, points_of
from reporting.reading import compare_rows, memory_calls, ops_calls, overlap_rows, read_json, throughput_rows
from reporting.skips import Skip, Source
from reporting.sweep_rows import read_sweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Paths:
    """The files; None: not given."""

    sweep: Path
    memory: Path | None
    compare: Path | None
    overlap: Path | None
    ops: Path | None
    throughput: Path | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Sources:
    """What was read. `points`: of the sweep."""

    sweep: Source
    memory: Source
    compare: Source
    overlap: Source
    ops: Source
    throughput: Source
    points: list[Point]

    def all(self) -> list[Source]:
        """In the order of the figures."""
        return [self.sweep, self.compare, self.memory, self.overlap, self.ops, self.throughput]

    @property
    def gaps(self) -> list[str]:
        """Why inputs are missing."""
        return [source.gap for source in self.all() if source.gap is not None]

    @property
    def skipped(self) -> list[Skip]:
        """What was left out of the inputs."""
        return [skip for source in self.all() for skip in source.skipped]


def read_sources(paths: Paths) -> Sources:
    """Reads what is there. Nothing is raised for what files hold."""
    sweep = read_sweep(paths.sweep)
    return Sources(
        sweep=sweep,
        memory=read_json(paths.memory, "memory.json", "calls", memory_calls),
        compare=read_json(paths.compare, "compare.json", "rows", compare_rows),
        overlap=read_json(paths.overlap, "overlap.json", "rows", overlap_rows),
        ops=read_json(paths.ops, "ops.json", "calls", ops_calls),
        throughput=read_json(paths.throughput, "throughput.json", "rows", throughput_rows),
        points=points_of(sweep.rows),
    )
