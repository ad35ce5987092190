"""How do our counters look to Prometheus? Rendered on request, from plain numbers.

The names are an interface: dashboards hang on them. tests/server/test_metrics.py lists them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import ridgeline
from ridgeline.observe.histogram import Histogram
from ridgeline.server.service import Service
from ridgeline.server.wire import GuessCosts, Prices, StepCosts

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
PREFIX = "ridgeline_"


def render(service: Service) -> bytes:
    """The whole page."""
    registry = CollectorRegistry()
    registry.register(ServiceCollector(service))
    return generate_latest(registry)


class ServiceCollector(Collector):
    def __init__(self, service: Service) -> None:
        self._service = service

    def collect(self) -> Iterator[Metric]:
        yield self._info()
        yield from self._traffic()
        yield from self._latency()
        yield from self._engine()
        yield from self._prices()
        yield from self._memory()
        yield from self._process()

    def _info(self) -> Metric:
        model = self._service.model
        name = "" if model is None else model.name
        labels = {"version": ridgeline.__version__, "model": name}
        return _labelled("info", "What is being served.", {(): 1.0}, (), labels)

    def _traffic(self) -> Iterator[Metric]:
        traffic = self._service.engine.traffic
        yield _counter("requests", "HTTP requests that the engine admitted.", traffic.num_requests)
        yield _counter("sequences", "Sequences that the engine admitted.", traffic.num_sequences)
        yield _counter("prompt_tokens", "Prompt tokens admitted.", traffic.num_prompt_tokens)
        yield _counter("generation_tokens", "Tokens generated.", traffic.num_output_tokens)
        yield _counter(
            "late_outputs", "Outputs for requests that were gone.", traffic.num_late_outputs
        )
        yield _counters(
            "sequences_finished", "Sequences that ended.", "finish_reason", traffic.finished
        )
        yield _counters("requests_refused", "Requests that got an error.", "code", traffic.refused)

    def _latency(self) -> Iterator[Metric]:
        latency = self._service.engine.latency
        yield _histogram("request_queue_seconds", "Arrival to first scheduling.", latency.queue)
        yield _histogram(
            "time_to_first_token_seconds", "Arrival to first token.", latency.first_token
        )
        yield _histogram(
            "inter_token_latency_seconds", "Between tokens of a sequence.", latency.between_tokens
        )
        yield _histogram("request_e2e_seconds", "Arrival to end.", latency.whole_request)

    def _engine(self) -> Iterator[Metric]:
        engine = self._service.engine
        gauges = engine.gauges
        total = engine.ready.num_blocks if engine.ready is not None else 0
        usage = gauges.num_used_blocks / total if total else 0.0
        yield _gauge("engine_up", "Whether the engine takes requests.", engine.is_up)
        yield _gauge("requests_running", "Sequences in the batch.", gauges.num_running)
        yield _gauge("requests_waiting", "Sequences in the queue.", gauges.num_waiting)
        yield _gauge("kv_blocks", "Blocks of the KV cache.", total)
        yield _gauge("kv_blocks_used", "Blocks that requests hold.", gauges.num_used_blocks)
        yield _gauge("kv_cache_usage_ratio", "Share of blocks that requests hold.", usage)
        yield _counter("engine_steps", "Steps executed.", gauges.num_steps)
        yield _counter("engine_failed_steps", "Steps that failed.", gauges.num_failed_steps)
        yield _counter("engine_busy_seconds", "Time with a step in flight.", gauges.busy_s)
        yield _counter(
            "engine_scheduled_tokens", "Tokens computed, prompts included.",
            gauges.num_scheduled_tokens,
        )  # fmt: skip
        yield _counter("preemptions", "Requests put back to free blocks.", gauges.num_preemptions)
        yield _counter(
            "prefix_cache_queried_tokens", "Prompt tokens looked up.",
            gauges.num_prefix_queried_tokens,
        )  # fmt: skip
        yield _counter(
            "prefix_cache_hit_tokens", "Prompt tokens found.", gauges.num_prefix_hit_tokens
        )
        yield _counter("engine_restarts", "Engine processes replaced.", engine.num_restarts)

    def _prices(self) -> Iterator[Metric]:
        """What steps took, against what they should have taken and against the device's limits."""
        engine = self._service.engine
        costs = engine.gauges.costs or StepCosts()
        prices = None if engine.ready is None else engine.ready.prices
        prices = prices or Prices("", "", 0.0, 0.0)
        labels = {"device": prices.device, "origin": prices.origin}
        yield _labelled("price_info", "What prices of steps rest on.", {(): 1.0}, (), labels)
        yield _counter("step_measured_seconds", "Time that steps took.", costs.measured_s)
        yield _counter("step_expected_seconds", "Time they should take.", costs.expected_s)
        yield _counter("step_ideal_seconds", "Time on an ideal device.", costs.ideal_s)
        yield _counter("host_gap_seconds", "The device waited for the host.", costs.host_s)
        yield _counter("step_flops", "Operations of the model.", costs.flops)
        yield _counter("step_bytes", "Bytes that it moved.", costs.bytes)
        yield _counter("batch_rows", "Rows of all batches.", costs.num_rows)
        yield _counter("graph_padded_rows", "Rows that pad a graph.", costs.num_padded_rows)
        rates = (
            ("bandwidth", costs.bytes, prices.bytes_per_s),
            ("flops", costs.flops, prices.flops_per_s),
        )
        for name, amount, limit in rates:
            best = limit * costs.measured_s
            share = amount / best if best > 0 else 0.0
            yield _gauge(f"limit_{name}_per_second", "What the devices could do.", limit)
            yield _gauge(f"achieved_{name}_ratio", "Of it, while steps ran.", share)
        yield from _regimes(costs)
        yield from _guesses(costs.guesses)
        yield _counter(
            "engine_overdue_steps", "Steps far over their price.", engine.watchdog.num_overdue
        )

    def _memory(self) -> Iterator[Metric]:
        ready = self._service.engine.ready
        lines = () if ready is None else ready.memory
        rows: dict[tuple[str, ...], float] = {(what,): float(size) for what, size in lines}
        total = 0 if ready is None else ready.device_memory_total
        used = self._service.engine.gauges.device_memory_used
        yield _labelled(
            "memory_contract_bytes", "What the engine planned to take.", rows, ("what",), {}
        )
        started = () if ready is None else ready.startup
        seconds: dict[tuple[str, ...], float] = {(name,): value for name, value in started}
        yield _labelled("start_seconds", "What the engine's start took.", seconds, ("phase",), {})
        yield _gauge("device_memory_bytes", "Memory of the device.", total)
        yield _gauge("device_memory_used_bytes", "Of it in use, by anyone.", used)

    def _process(self) -> Iterator[Metric]:
        service = self._service
        connections = len(service.connections)
        yield _gauge("http_connections", "Open connections.", connections)
        yield _gauge("http_requests_open", "Requests being served.", service.admission.num_requests)
        yield _gauge("http_body_bytes_held", "Bytes of bodies held.", service.admission.num_bytes)
        yield _gauge("http_tasks", "Tasks of the event loop.", len(asyncio.all_tasks()))


def _gauge(name: str, text: str, value: float) -> Metric:
    return GaugeMetricFamily(PREFIX + name, text, value=float(value))


def _counter(name: str, text: str, value: float) -> Metric:
    return CounterMetricFamily(PREFIX + name, text, value=float(value))


def _counters(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(PREFIX + name, text, labels=[label])
    for key, value in sorted(values.items()):
        family.add_metric([key], float(value))
    return family


def _regimes(costs: StepCosts) -> Iterator[Metric]:
    """Decodes, prompts and mixtures apart: what is measured over what is expected of each."""
    for name, text, attribute in (
        ("regime_steps", "Steps by kind.", "num_steps"),
        ("regime_measured_seconds", "Time they took.", "measured_s"),
        ("regime_expected_seconds", "Time they should take.", "expected_s"),
    ):
        family = CounterMetricFamily(PREFIX + name, text, labels=["regime"])
        for regime in costs.regimes:
            family.add_metric([regime.name], float(getattr(regime, attribute)))
        yield family


def _guesses(costs: GuessCosts) -> Iterator[Metric]:
    """Steps that checked guesses, apart from those that read prompts. The time of such a step is
    put to drafting and checking by the prices of the two."""
    yield _counter("guess_steps", "Steps that checked guesses.", costs.num_steps)
    yield _counter("guess_rows", "Rows of these steps.", costs.num_rows)
    yield _counter("guess_row_tokens", "Tokens that these rows got.", costs.num_tokens)
    yield _counter("guesses", "Guesses checked.", costs.num_guesses)
    yield _counter("guesses_accepted", "Of them right, all before them too.", costs.num_accepted)
    yield _counter("guess_drafting_seconds", "Time to make them, by price.", costs.drafting_s)
    yield _counter("guess_checking_seconds", "Time to check them, by price.", costs.checking_s)
    yield _counter(
        "guess_plain_seconds", "Price of the same tokens without guesses.", costs.plain_s
    )
    for name, text, counts in (
        ("guesses_reached", "Guesses of which all before were right.", costs.num_looked),
        ("guesses_right", "Of them right.", costs.num_right),
    ):
        family = CounterMetricFamily(PREFIX + name, text, labels=["position"])
        for position, count in enumerate(counts):
            if costs.num_looked[position]:
                family.add_metric([str(position)], float(count))
        yield family


def _labelled(
    name: str,
    text: str,
    rows: Mapping[tuple[str, ...], float],
    labels: tuple[str, ...],
    fixed: Mapping[str, str],
) -> Metric:
    family = GaugeMetricFamily(PREFIX + name, text, labels=[*labels, *fixed])
    for key, value in rows.items():
        family.add_metric([*key, *fixed.values()], value)
    return family


def _histogram(name: str, text: str, values: Histogram) -> Metric:
    buckets = [(bound, float(count)) for bound, count in values.cumulative()]
    return HistogramMetricFamily(PREFIX + name, text, buckets=buckets, sum_value=values.sum)
