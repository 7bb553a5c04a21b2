"""A checkout of this repository, today's or an earlier one, in a process of its own: both are asked the same way."""

import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from measuring.process import BENCH

from baselines.asked import Asked, PeerError


class Checkout(Asked):
    """The code of `root`, asked by this one's benchmarks."""

    def __init__(self, root: Path, checkpoint: Path | None = None, *, threads: int = 1) -> None:
        """`checkpoint`: folder that it loads; None for launches alone, which are counted in Triton's interpreter.

        Raises:
            PeerError: it does not load, or another checkout is found in its place.
        """
        # -P keeps the current folder from coming before `root`.
        command = [sys.executable, "-P", "-m", "baselines.checkout_worker"]
        environment = {"PYTHONPATH": os.pathsep.join([str(root), str(BENCH)])}
        if checkpoint is None:
            environment["TRITON_INTERPRET"] = "1"
        else:
            command.append(str(checkpoint))
        super().__init__(command, threads=threads, environment=environment)
        if Path(self.about["root"]) != root.resolve():
            self.__exit__()
            raise PeerError("another checkout is found in its place")

    def call(
        self, prompt: list[int], policy: str, options: Mapping[str, Any], call: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Answer `prompt` under `policy` by `Runtime.generate` with the options `call`: {"tokens", "seconds",
        "forwards", "rows", "kinds"}. "kinds" has sums for each kind of forward, {"forwards", "rows", "ms", "ops"}, the
        last in ms by operation. Raises `PeerError`."""
        return self.request(prompt=prompt, policy=policy, options=options, call=call)

    def launches(self, policy: str, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        """As `workloads.launches.count`. Raises `PeerError`."""
        return self.request(launches=policy, options=options)["rows"]
