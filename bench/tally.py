"""What a number of calls came to: tokens, seconds, rows, passes, and bytes.

A part of the other scripts here.
"""

from collections import Counter

from tiered.output import GenerationOutput


class Tally:
    """Sums over calls; bytes are the largest of any call. Give it to `score_examples` as `watch`.

    Attributes:
        tokens, seconds: of the answers, and from the first forward of each call to its last commit.
        rows, columns: of every forward, the rows of a sequence that it recomputed, and the columns of the canvas, which
            is what a full pass recomputes.
        passes: forwards by kind.
        device, host: peak bytes.
        moved: bytes by direction.
    """

    def __init__(self) -> None:
        self.tokens, self.seconds = 0, 0.0
        self.rows: list[float] = []
        self.columns: list[int] = []
        self.passes: Counter[str] = Counter()
        self.device = self.host = 0
        self.moved: Counter[str] = Counter()

    def __call__(self, out: GenerationOutput) -> None:
        self.tokens += out.timings.tokens
        self.seconds += out.timings.total
        self.rows += out.rows_per_forward
        self.columns += [out.sequences.shape[1]] * len(out.rows_per_forward)
        self.passes.update(out.passes)
        self.device = max(self.device, out.memory.peak_device_bytes)
        self.host = max(self.host, out.memory.peak_host_bytes)
        self.moved.update(out.memory.moved)

    @property
    def updates(self) -> int:
        """Forwards that renewed rows beside those of a step."""
        return self.passes["update"]

    @property
    def rows_per_forward(self) -> float:
        """Rows of a sequence that a forward recomputed, on average."""
        return sum(self.rows) / len(self.rows)

    @property
    def cache_ratio(self) -> float:
        """Share of a full pass's rows that were read from cache instead, over all forwards."""
        return 1 - sum(self.rows) / sum(self.columns)
