"""Do the dashboard and the alert rules ask for metrics, labels and flags that there are?

The page is that of a real server: a tiny model that drafts its own tokens.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.config import EngineConfig
from ridgeline.declared import declared
from ridgeline.server import Limits, ServeConfig
from tests.server.running import ROOT, running
from tests.tiny_model import make_tiny_model

DEPLOY = ROOT / "deploy"
SCRAPED = {"job", "instance"}  # labels that Prometheus itself adds
WORDS = {"and", "or", "unless", "offset", "by", "without", "on", "ignoring", "bool"}
Page = dict[str, set[str]]  # labels by name of a sample


class Asked(NamedTuple):
    """What an expression asks for: names of samples with the labels that are matched, and labels
    that are grouped by."""

    samples: list[tuple[str, set[str]]]
    groups: set[str]


def asked(expression: str) -> Asked:
    text = re.sub(r'"[^"]*"', '""', expression)
    text = re.sub(r"\[[^\]]*\]", "", text)
    lists = r"\b(?:by|without|on|ignoring)\s*\(([^)]*)\)"
    groups = {name.strip() for names in re.findall(lists, text) for name in names.split(",")}
    text = re.sub(lists, "", text)
    names = re.findall(r"(?<![\w.])([a-zA-Z_]\w*)(?!\w|\s*\()(\{[^}]*\})?", text)
    samples = [
        (name, set(re.findall(r"(\w+)\s*[=!]", matchers)))
        for name, matchers in names
        if name not in WORDS
    ]
    return Asked(samples, groups)


def test_expressions_are_read() -> None:
    found = asked(
        'histogram_quantile(0.95, sum by (instance, le) (rate(a_bucket{x=~"b|c{}", y!="d"}[5m])))'
        " / on (model_name) (e > 2 * f offset 6h > 1e9) unless g"
    )
    assert found.samples == [("a_bucket", {"x", "y"}), ("e", set()), ("f", set()), ("g", set())]
    assert found.groups == {"instance", "le", "model_name"}


@cache
def dashboard() -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((DEPLOY / "grafana/dashboard.json").read_text())
    return loaded


@cache
def rules() -> list[dict[str, Any]]:
    groups = yaml.safe_load((DEPLOY / "prometheus/alerts.yml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def expressions() -> Iterator[str]:
    for panel in dashboard()["panels"]:
        yield from (target["expr"] for target in panel.get("targets", ()))
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            metric, label = re.fullmatch(
                r"label_values\((.*), (\w+)\)", variable["query"]["query"]
            ).groups()  # type: ignore[union-attr]
            yield f"max by ({label}) ({metric})"
    yield from (rule["expr"] for rule in rules())


@pytest.fixture(scope="module")
def active(tmp_path_factory: pytest.TempPathFactory) -> Page:
    folder = tmp_path_factory.mktemp("tiny")
    model = make_tiny_model(folder / "model")
    engine = EngineConfig(
        model=str(model), device="cpu", dtype="float32", num_blocks=64, threads=1,
        speculate="ngram:3",
    )  # fmt: skip
    with running(ServeConfig(engine=engine, port=0), folder) as server, server.http as http:
        body = {"model": "model", "prompt": "abc" * 20, "max_tokens": 40, "temperature": 0}
        assert http.post("/v1/completions", json=body).status_code == 200
        server.wait_until_idle()
        text = http.get("/metrics").text
    page: Page = {"up": set()}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            page.setdefault(sample.name, set()).update(sample.labels)
    return page


def test_every_expression_asks_for_what_is_there(active: Page) -> None:
    known_labels = set().union(*active.values()) | SCRAPED
    num_samples = 0
    for expression in expressions():
        found = asked(expression)
        assert found.samples, expression
        num_samples += len(found.samples)
        for name, labels in found.samples:
            assert name in active, f"{name} is not on the page: {expression}"
            assert labels <= active[name] | SCRAPED, f"{name} has no such label: {expression}"
        assert found.groups <= known_labels, expression
    assert num_samples > 60


def test_panels_say_what_they_show() -> None:
    panels = [panel for panel in dashboard()["panels"] if panel["type"] != "row"]
    assert len({panel["title"] + panel["type"] for panel in panels}) == len(panels)
    assert len({panel["id"] for panel in dashboard()["panels"]}) == len(dashboard()["panels"])
    for panel in panels:
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_rules_name_flags_and_log_lines_that_there_are() -> None:
    options = {name for kind in (EngineConfig, ServeConfig, Limits) for name in declared(kind)}
    sources = "".join(path.read_text() for path in (ROOT / "ridgeline").rglob("*.py"))
    for rule in rules():
        text = rule["annotations"]["description"]
        assert rule["annotations"]["summary"].endswith(".")
        assert len(text.split()) > 12
        assert rule["labels"]["severity"] in ("critical", "warning")
        for flag in re.findall(r"--([a-z-]+)", text):
            assert flag.replace("-", "_") in options | {"url"}, f"serve has no --{flag}"
        for line in re.findall(r'log line "([^"]*)"', text):
            assert f'"{line}"' in sources, f"nothing logs {line!r}"
