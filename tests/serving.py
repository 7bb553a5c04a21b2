"""A server of the embedded model in a thread, for tests of its clients."""

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from tiered.core.features import Tier
from tiered.runtime import Runtime
from tiered.serving.app import LOCAL, Service
from tiered.serving.openai_fields import Limits
from tiered.serving.scheduler import Scheduler
from tiered.serving.server import Server, listen


@dataclass(frozen=True)
class Served:
    url: str
    port: int
    scheduler: Scheduler
    server: Server

    def held(self) -> dict[Tier, int]:
        """Bytes by tier once nothing is under way."""
        deadline = time.monotonic() + 30
        while (self.scheduler.running or self.scheduler.waiting) and time.monotonic() < deadline:
            time.sleep(0.01)
        ledger = self.scheduler.runtime.ledger
        return {tier: ledger.held(tier) - ledger.idle(tier) for tier in Tier}


@contextmanager
def serving(
    runtime: Runtime,
    *,
    key: str | None = None,
    limits: Limits | None = None,
    of_server: Mapping[str, Any] | None = None,
    **of_scheduler: Any,
) -> Iterator[Served]:
    """Serve `runtime` as "embedded" as long as the block lasts."""
    scheduler = Scheduler(runtime, **of_scheduler)
    service = Service(scheduler=scheduler, model="embedded", key=key, limits=limits or Limits(), hosts=LOCAL)
    server = Server(service, **{"grace_seconds": 1} | dict(of_server or {}))
    with listen("127.0.0.1", 0) as listening:
        port = listening.getsockname()[1]
        thread = threading.Thread(target=server.serve_at, args=(listening,))
        thread.start()
        try:
            yield Served(f"http://127.0.0.1:{port}", port, scheduler, server)
        finally:
            server.should_exit = True
            thread.join(30)
    assert not thread.is_alive(), "the server ends"
