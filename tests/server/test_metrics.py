"""Are the metrics there as they are declared, does each text stand alone, do they count right?"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from ridgeline.server.metrics import METRICS
from ridgeline.server.metrics_page import PREFIX, Declared
from tests.server.running import Running, fake_config, running

UNITS = {"_seconds": "econds", "_bytes": "ytes", "_ratio": "0 to 1", "_per_second": "a second"}
# A text that begins so leans on the one before it.
NO_BEGINNING = {"it", "its", "of", "they", "their", "them", "these", "that", "this", "the", "and"}


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One that has counted nothing yet."""
    with running(fake_config(fake_model), tmp_path_factory.mktemp("server")) as started:
        yield started


def page(server: Running) -> str:
    with server.http as http:
        reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return reply.text


def test_the_page_is_what_is_declared(server: Running) -> None:
    families = {f.name: f for f in text_string_to_metric_families(page(server))}
    assert set(families) == {PREFIX + m.name.removesuffix("_total") for m in METRICS}
    for metric in METRICS:
        family = families[PREFIX + metric.name.removesuffix("_total")]
        assert (family.type, family.documentation) == (metric.kind, metric.text)
        for sample in family.samples:
            names = {*metric.label_names, *({"le"} & {*sample.labels})}
            assert set(sample.labels) == names, metric.name
            assert sample.labels.get("model_name", "fake") == "fake"


@pytest.mark.parametrize("metric", METRICS, ids=lambda metric: metric.name)
def test_names_and_texts_follow_the_conventions(metric: Declared) -> None:
    assert re.fullmatch(r"[a-z][a-z0-9_]*", metric.name)
    assert metric.name.endswith("_total") == (metric.kind == "counter")
    assert not re.search("guess|check|ledger|regime", metric.name + metric.text)
    assert metric.text.endswith(".")
    assert metric.text[0].isupper() or metric.text[0].isdigit()
    assert re.split(r"\W", metric.text)[0].lower() not in NO_BEGINNING
    assert len(metric.text.split()) >= 6, "it says too little to stand alone"
    base = metric.name.removesuffix("_total")
    unit = next((text for end, text in UNITS.items() if base.endswith(end)), None)
    assert unit is None or unit in metric.text
    if metric.kind == "histogram":
        assert unit == "econds"
        assert "counted" in metric.text or "share" in metric.text


def test_no_two_metrics_say_the_same() -> None:
    assert len({m.name for m in METRICS}) == len({m.text for m in METRICS}) == len(METRICS)


def test_the_page_is_there_before_the_model_is(fake_model: Path, tmp_path: Path) -> None:
    config = fake_config(fake_model, engine={"attention_backend": "slow"})
    with running(config, tmp_path, wait=False) as server:
        assert server.metric("ridgeline_engine_up") == server.metric("ridgeline_ready") == 0
        assert 'ridgeline_ready{model_name="fake"} 0.0' in page(server)
        server.wait_until_ready()
        assert server.metric("ridgeline_engine_up") == server.metric("ridgeline_ready") == 1


def test_they_count(server: Running) -> None:
    before = {name: server.metric(name) for name in ("ridgeline_generation_tokens_total",)}
    with server.http as http:
        for prompt, n in (("a" * 40, 1), ("a" * 40, 2), ("b", 1)):
            body = {"model": "fake", "prompt": prompt, "max_tokens": 10, "n": n, "temperature": 1}
            assert http.post("/v1/completions", json=body).status_code == 200
        http.post("/v1/completions", json={"model": "fake", "prompt": "a" * 999})
        http.get("/nothing")
        http.post("/v1/completions", json={"model": "fake", "prompt": "!eos"})
    server.wait_until_idle()
    made = (
        server.metric("ridgeline_generation_tokens_total")
        - before["ridgeline_generation_tokens_total"]
    )
    assert made == 44  # the end token counts as made
    assert server.metric("ridgeline_requests_total") == 4
    assert server.metric("ridgeline_sequences_total") == 5
    assert server.metric("ridgeline_prompt_tokens_total") == 41 + 41 + 2 + 5
    assert server.metric("ridgeline_prefix_cache_hit_tokens_total") >= 32
    assert server.metric("ridgeline_time_to_first_token_seconds_count") == 5
    assert server.metric("ridgeline_inter_token_latency_seconds_count") == 39
    assert server.metric("ridgeline_request_e2e_seconds_count") == 5
    # Forks wait with their first.
    assert server.metric("ridgeline_request_queue_seconds_count") == 4
    text = page(server)
    for name, count in {"length": 4, "stop": 1, "abort": 0}.items():
        labels = f'{{finish_reason="{name}",model_name="fake"}}'
        assert f"ridgeline_sequences_finished_total{labels} {count}.0" in text
    for code, count in {"context_length_exceeded": 1, "not_found": 1, "overloaded": 0}.items():
        labels = f'{{code="{code}",model_name="fake"}}'
        assert f"ridgeline_request_errors_total{labels} {count}.0" in text
    for name in ("resident_memory_bytes", "cpu_seconds_total", "open_fds"):
        assert server.metric(f"ridgeline_process_{name}") > 0
    assert server.metric("ridgeline_engine_busy_seconds_total") > 0
    assert server.metric("ridgeline_device_memory_used_bytes") == 1 << 29
