"""Metrics of a scheduler for Prometheus, read at every scrape."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiered.core.features import Tier
from tiered.serving.counts import Work
from tiered.serving.request import RequestState
from tiered.serving.scheduler import Scheduler

_OVER = (RequestState.DONE, RequestState.FAILED, RequestState.CANCELLED, RequestState.LATE)


class SchedulerMetrics(Collector):
    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def collect(self) -> Iterator[Metric]:
        scheduler, counts = self._scheduler, self._scheduler.counts
        yield GaugeMetricFamily("tiered_requests_waiting", "Requests in the queue", scheduler.waiting)
        yield GaugeMetricFamily("tiered_requests_running", "Requests being denoised", scheduler.running)
        ended = CounterMetricFamily("tiered_requests", "Finished requests, by final state", labels=["state"])
        for state in _OVER:
            ended.add_metric([state.value], counts.ended[state])
        yield ended
        yield CounterMetricFamily("tiered_answer_tokens", "Tokens of finished answers", counts.tokens)
        yield CounterMetricFamily("tiered_forwards", "Passes through the layers, shared ones once", counts.forwards)
        yield CounterMetricFamily("tiered_request_forwards", "Forwards, counted for each request", counts.taken)
        yield GaugeMetricFamily(
            "tiered_tokens_per_forward", "Tokens per forward of a request (TPF)", counts.tokens_per_forward
        )
        seconds = CounterMetricFamily("tiered_seconds", "Seconds of rounds, by kind of work", labels=["work"])
        for work in Work:
            seconds.add_metric([work.value], counts.clock.seconds[work])
        yield seconds
        ledger = scheduler.runtime.ledger
        held = GaugeMetricFamily("tiered_tier_bytes", "Bytes that a tier holds", labels=["tier"])
        caps = GaugeMetricFamily("tiered_tier_cap_bytes", "Bytes that a tier may hold", labels=["tier"])
        for tier in Tier:
            held.add_metric([tier.value], ledger.held(tier))
            if (cap := ledger.budget.cap(tier)) is not None:
                caps.add_metric([tier.value], cap)
        yield held
        yield caps
        moved = CounterMetricFamily(
            "tiered_moved_bytes", "Bytes copied between tiers", labels=["source", "destination"]
        )
        for (source, destination), nbytes in ledger.moved.items():
            moved.add_metric([source.value, destination.value], nbytes)
        yield moved
        share = "Share of the time of feature copies during which compute ran"
        yield GaugeMetricFamily("tiered_hidden_copy_share", share, counts.hidden_share)


def registry_of(scheduler: Scheduler) -> CollectorRegistry:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(SchedulerMetrics(scheduler))
    return registry
