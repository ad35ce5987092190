"""What does docs/metrics.md say? The page, made from the declared metrics.

python -m tools.docs_metrics > docs/metrics.md
"""

from __future__ import annotations

from ridgeline.server import route_metrics
from ridgeline.server.metrics import GROUPS
from ridgeline.server.metrics_page import PREFIX, Declared

HEAD = """# Metrics

`GET /metrics` of `ridgeline serve` answers in Prometheus' text format. When the server has API keys, it wants one here
too (`authorization: Bearer KEY`), with the right `metrics` ([rights](deployment.md#keys-and-rights)). This page is made from the code (`make docs`).

All metrics but those of connections have the label `model_name`: the name that clients put into `model`; until the
first start of the engine it is what `--served-model-name` says. Histograms have the usual `_bucket`, `_sum` and
`_count`. Counters of the engine begin at 0 again when its process is replaced, which `rate` and `increase` allow for.

In `deploy/` are a [dashboard](../deploy/grafana/dashboard.json) for Grafana and, for Prometheus, a
[configuration](../deploy/prometheus/prometheus.yml) and [alert rules](../deploy/prometheus/alerts.yml), each of which
says what to do. `ridgeline explain --url URL` says in words where the time went ([explain.md](explain.md)).

## Expressions

| question | expression |
|---|---|
| tokens a second | `sum(rate(ridgeline_generation_tokens_total[5m]))` |
| 95 % of first tokens come within | `histogram_quantile(0.95, sum by (le) (rate(ridgeline_time_to_first_token_seconds_bucket[5m])))` |
| mean time in the queue | `rate(ridgeline_request_queue_seconds_sum[5m]) / rate(ridgeline_request_queue_seconds_count[5m])` |
| mean batch | `rate(ridgeline_batch_rows_total[5m]) / rate(ridgeline_engine_steps_total[5m])` |
| prefix cache hit rate | `rate(ridgeline_prefix_cache_hit_tokens_total[5m]) / rate(ridgeline_prefix_cache_queried_tokens_total[5m])` |
| draft acceptance | `rate(ridgeline_draft_accepted_tokens_total[5m]) / rate(ridgeline_draft_tokens_total[5m])` |
| measured over expected time | `sum(rate(ridgeline_step_measured_seconds_total[5m])) / sum(rate(ridgeline_step_expected_seconds_total[5m]))` |
"""  # noqa: E501


ROUTER = "What [`ridgeline route`](deployment.md#several-servers-behind-one-address) counts."


def page() -> str:
    parts = [HEAD]
    for title, metrics in GROUPS.items():
        rows = "\n".join(_row(metric) for metric in metrics)
        parts.append(
            f"## {title}\n\n| name | type | labels | meaning |\n|---|---|---|---|\n{rows}\n"
        )
    parts.append(f"## Router\n\n{ROUTER}\n\n{_router()}")
    return "\n".join(parts)


def _router() -> str:
    rows: list[tuple[str, str, tuple[str, ...], str]] = [
        (name, "gauge", ("backend",), text) for name, (text, _) in route_metrics.GAUGES.items()
    ]
    rows.append(("replicas_wanted", "gauge", (), route_metrics.WANTED))
    for name, (text, labels) in route_metrics.COUNTERS.items():
        rows.append((name, "counter", labels, text))
    for name, (text, label) in route_metrics.READ.items():
        rows.append((name, "counter", (label,), text))
    rows += [(name, "histogram", (), text) for name, text in route_metrics.HISTOGRAMS.items()]
    lines = ["| name | type | labels | meaning |", "|---|---|---|---|"]
    for name, kind, labels, text in rows:
        names = ", ".join(f"`{label}`" for label in labels)
        lines.append(f"| `{route_metrics.PREFIX}{name}` | {kind} | {names} | {text} |")
    return "\n".join(lines) + "\n"


def _row(metric: Declared) -> str:
    labels = ", ".join(f"`{name}`" for name in metric.label_names)
    return f"| `{PREFIX}{metric.name}` | {metric.kind} | {labels} | {metric.text} |"


if __name__ == "__main__":
    print(page(), end="")
