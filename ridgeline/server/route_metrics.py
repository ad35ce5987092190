"""What does the router count? Its page for Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ridgeline.clock import Clock
from ridgeline.observe.latency import Traffic
from ridgeline.router.backend import Backend, Placed

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
PREFIX = "ridgeline_router_"
Read = Callable[[Backend, float], float]
# Of each backend, read when the page is asked for.
GAUGES: dict[str, tuple[str, Read]] = {
    "backend_ready": (
        "1 while requests are sent to it, else 0.", lambda one, now: one.is_ready(now)
    ),
    "breaker_open": ("1 while it gets none, or one to try.", lambda one, _: one.breaker.is_open),
    "open_requests": ("Requests that are at it.", lambda one, _: len(one.open)),
    "prefix_entries": (
        "Pieces of prompts that its cache is thought to hold.", lambda one, _: len(one.prefixes)
    ),
    "prompt_tokens_per_second": (
        "How fast it is thought to read prompts.", lambda one, _: one.speed.tokens_per_s
    ),
}  # fmt: skip
COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "answers_total": ("Answers of backends, by status.", ("backend", "status")),
    "retries_total": (
        "Requests that were sent to another backend, by the reason: no answer, or the code of the "
        "refusal.",
        ("reason",),
    ),
    "prompt_tokens_total": ("Prompt tokens, as answers tell.", ("backend",)),
    "cached_tokens_total": ("Those of them that were cached.", ("backend",)),
}
READ = {  # counters that stand elsewhere, with their label
    "breaker_opened_total": ("How often its breaker opened.", "backend"),
    "refused_total": ("Requests that the router refused, by code.", "code"),
}
WANTED = "Servers that what came of late keeps busy, at the speed they tell, with some spare."
HISTOGRAMS = {
    "first_token_seconds": "From sending a streamed request to the first bytes of its answer.",
    "predicted_first_token_seconds": "The same as it was predicted, of the same requests.",
}


class RouteMetrics(Collector):
    def __init__(
        self,
        backends: Sequence[Backend],
        clock: Clock,
        traffic: Traffic,
        need: Callable[[], float | None],
    ) -> None:
        self._need = need
        self._backends = backends
        self._clock = clock
        self._traffic = traffic
        self._registry = CollectorRegistry()
        self._registry.register(self)
        counters = {
            name: Counter(PREFIX + name, text, labels, registry=self._registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self.retries = counters["retries_total"]
        self._answers = counters["answers_total"]
        self._prompt = counters["prompt_tokens_total"]
        self._cached = counters["cached_tokens_total"]
        self._seconds, self._predicted = (
            Histogram(PREFIX + name, text, buckets=SECONDS, registry=self._registry)
            for name, text in HISTOGRAMS.items()
        )

    def answered(self, backend: Backend, status: int) -> None:
        self._answers.labels(backend.url, str(status)).inc()

    def first_token(self, placed: Placed, now: float) -> None:
        self._seconds.observe(now - placed.at)
        self._predicted.observe(placed.predicted_s)

    def prompt(self, backend: Backend, num_tokens: int, num_cached: int) -> None:
        self._prompt.labels(backend.url).inc(num_tokens)
        self._cached.labels(backend.url).inc(num_cached)

    def page(self) -> bytes:
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        now = self._clock.now()
        for name, (text, read) in GAUGES.items():
            gauge = GaugeMetricFamily(PREFIX + name, text, labels=("backend",))
            for backend in self._backends:
                gauge.add_metric((backend.url,), float(read(backend, now)))
            yield gauge
        if (need := self._need()) is not None:
            yield GaugeMetricFamily(PREFIX + "replicas_wanted", WANTED, value=need)
        for name, (text, label) in READ.items():
            counter = CounterMetricFamily(PREFIX + name, text, labels=(label,))
            for value, number in self._read(name):
                counter.add_metric((value,), number)
            yield counter

    def _read(self, name: str) -> Iterable[tuple[str, int]]:
        if name == "refused_total":
            return self._traffic.refused.items()
        return [(backend.url, backend.breaker.num_opened) for backend in self._backends]
