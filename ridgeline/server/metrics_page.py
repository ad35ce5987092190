"""How do declared metrics look to Prometheus? Read on request, from plain numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, ProcessCollector, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from ridgeline.observe.latency import Histogram
from ridgeline.observe.run import REGIMES
from ridgeline.server.engine_client import EngineClient
from ridgeline.server.errors import ApiError
from ridgeline.server.service import Service
from ridgeline.server.wire import DraftCosts, Gauges, Prices, StepCosts

CONTENT_TYPE = "text/plain; version=1.0.0; charset=utf-8"
PREFIX = "ridgeline_"
NO_PRICES = Prices("", "", 0.0, 0.0)

Rows = Mapping[tuple[str, ...], float]  # by values of the labels
Value = float | Rows | Histogram


class Seen:
    """The server at one moment."""

    def __init__(self, service: Service, processes: Mapping[str, Mapping[str, float]]) -> None:
        self.service = service
        self.engine: EngineClient = service.engine
        self.ready = service.engine.ready
        self.gauges: Gauges = service.engine.gauges
        self.costs = self.gauges.costs or StepCosts()
        self.drafts: DraftCosts = self.costs.drafts
        self.prices = (None if self.ready is None else self.ready.prices) or NO_PRICES
        self._processes = processes

    @property
    def model_name(self) -> str:
        """As clients say it; before the first start of the engine, as far as that is known."""
        if self.service.model is not None:
            return self.service.model.name
        return next(iter(self.service.config.served_names), "")

    @property
    def num_blocks(self) -> int:
        return 0 if self.ready is None else self.ready.num_blocks

    @property
    def would_serve(self) -> bool:
        try:
            self.service.check_ready()
        except ApiError:
            return False
        return True

    def by_kind(self, attribute: str) -> Rows:
        """Of steps of each kind."""
        regimes = {regime.name: regime for regime in self.costs.regimes}
        return {(name,): float(getattr(regimes.get(name), attribute, 0)) for name in REGIMES}

    def by_rank(self, attribute: str) -> Rows:
        """Of the ranks of a group; empty where there is none."""
        ranks = self.gauges.ranks
        return {(str(one.rank), one.host): float(getattr(one, attribute)) for one in ranks}

    def by_position(self, counts: Sequence[int]) -> Rows:
        """Only positions that a draft token was ever seen at."""
        seen = self.drafts.num_looked
        return {(str(i),): float(count) for i, count in enumerate(counts) if seen[i]}

    def by_process(self, name: str) -> Rows:
        return {(who,): rows[name] for who, rows in self._processes.items() if name in rows}

    def share(self, amount: float, limit: float) -> float:
        """Of what the devices could do at best while steps ran."""
        best = limit * self.costs.measured_s
        return amount / best if best > 0 else 0.0


def _pids(service: Service) -> Mapping[str, str]:
    others = {"engine": service.engine.engine_pid, "text": service.text.fork_server_pid}
    return {"server": "self"} | {name: str(pid) for name, pid in others.items() if pid}


def _processes(pids: Mapping[str, str]) -> Mapping[str, Mapping[str, float]]:
    """Of each process: numbers of the system, which take long when many files are open."""
    return {name: _process(pid) for name, pid in pids.items()}


def _process(pid: str) -> Mapping[str, float]:
    found = ProcessCollector(pid=lambda: pid, registry=None).collect()
    return {metric.name: metric.samples[0].value for metric in found}


@dataclass(frozen=True, slots=True)
class Declared:
    """One metric. `of_model`: it has the label model_name, before its other `labels`."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str  # after PREFIX; of a counter, with _total
    text: str  # whole without anything around it: what is counted, in which unit, when it moves
    read: Callable[[Seen], Value]
    labels: tuple[str, ...] = ()
    of_model: bool = True

    @property
    def label_names(self) -> tuple[str, ...]:
        return ("model_name", *self.labels) if self.of_model else self.labels


async def render(service: Service, metrics: Sequence[Declared]) -> bytes:
    """The whole page. Raises ApiError rate_limit_exceeded."""
    pages = service.pages
    async with pages.turn():
        processes = await pages.run(_processes, _pids(service))
        families = pages.run_here(_families, Seen(service, processes), metrics)
        return await pages.run(_write, families)


def _families(seen: Seen, metrics: Sequence[Declared]) -> Sequence[Metric]:
    return [_family(declared, seen) for declared in metrics]


def _write(families: Sequence[Metric]) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(families))
    return generate_latest(registry)


class _Collected(Collector):
    def __init__(self, families: Sequence[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterator[Metric]:
        return iter(self._families)


def _family(declared: Declared, seen: Seen) -> Metric:
    name, names = PREFIX + declared.name, declared.label_names
    first = [seen.model_name] if declared.of_model else []
    value = declared.read(seen)
    if isinstance(value, Histogram):
        histogram = HistogramMetricFamily(name, declared.text, labels=names)
        buckets = [(bound, float(count)) for bound, count in value.cumulative()]
        histogram.add_metric(first, buckets, value.sum)
        return histogram
    make = CounterMetricFamily if declared.kind == "counter" else GaugeMetricFamily
    family = make(name, declared.text, labels=names)
    rows = {(): float(value)} if isinstance(value, float | int) else value
    for labels, number in rows.items():
        family.add_metric([*first, *labels], number)
    return family
