"""Receipts, explanations and overdue steps, over HTTP."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from ridgeline.observe.event_log import read_event_log
from ridgeline.observe.evidence import evidence_of
from ridgeline.observe.explain import explain
from tests.server.running import Running, fake_config, running, until
from tests.server.test_lifecycle import Asking, reference_text


@pytest.fixture(scope="module")
def server(fake_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    config = fake_config(fake_model, price_per_hour=3600.0)
    with running(config, tmp_path_factory.mktemp("server")) as started:
        yield started


def ask(server: Running, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    body: dict[str, Any] = {"model": "fake", "max_tokens": 8, "include_cost": True}
    if path.endswith("chat/completions"):
        body["messages"] = [{"role": "user", "content": "hello there"}]
    else:
        body["prompt"] = "!slow hello"
    with server.http as http:
        return http.post(path, json=body | more)


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def measured_s(server: Running) -> float:
    return server.metric("ridgeline_step_measured_seconds_total")


def test_receipts_of_all_requests_sum_to_what_the_steps_took(server: Running) -> None:
    server.wait_until_idle()
    before = measured_s(server)
    replies = [
        ask(server),
        ask(server, n=3, temperature=1.0),
        ask(server, prompt=["one", "two"], best_of=2, n=1, temperature=1.0),
        ask(server, "/v1/chat/completions"),
        ask(server, stream=True, stream_options={"include_usage": True}),
        ask(server, "/v1/chat/completions", stream=True, stream_options={"include_usage": True}),
    ]
    usages = [reply.json()["usage"] for reply in replies[:4]]
    usages += [events(reply)[-1]["usage"] for reply in replies[4:]]
    server.wait_until_idle()
    whole = sum(usage["cost"]["device_seconds"] for usage in usages)
    assert whole == pytest.approx(measured_s(server) - before, abs=1e-6)
    for usage in usages:
        cost = usage["cost"]
        assert cost["device_seconds"] > 0
        assert cost["money"] == pytest.approx(cost["device_seconds"], rel=1e-12)
        assert cost["flops"] > 0
        assert cost["bytes"] > 0
    assert usages[0]["cost"]["device_seconds"] > 8 * 0.02  # eight slow steps, alone


def test_a_stop_string_gets_a_receipt_too(server: Running) -> None:
    text = reference_text("hello", 8)
    usage = ask(server, prompt="hello", stop=[text[3:5]]).json()["usage"]
    assert usage["completion_tokens"] < 8
    assert usage["cost"]["device_seconds"] > 0


def test_nobody_gets_one_who_has_not_asked(server: Running) -> None:
    assert "cost" not in ask(server, include_cost=False).json()["usage"]
    assert "cost" not in ask(server, include_cost=None).json()["usage"]
    reply = ask(server, include_cost="yes")
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "include_cost")
    streamed = ask(server, stream=True, include_cost=False)
    assert all("usage" not in event for event in events(streamed))


def test_an_engine_without_prices_says_that_it_has_none(fake_model: Path, tmp_path: Path) -> None:
    """And a format that its builder brings is no unknown one."""
    plain = fake_config(fake_model, engine={"weight_format": "unpriced"})
    config = replace(plain, builder="tests.server.unpriced:build")
    with running(config, tmp_path) as server:
        assert ask(server).json()["usage"]["cost"] is None
        with server.http as http:
            assert http.get("/explain").status_code == 404
        assert server.metric("ridgeline_device_peak_flops_per_second") == 0


def test_metrics_hold_what_is_achieved_against_the_limit(server: Running) -> None:
    ask(server)
    server.wait_until_idle()
    assert server.metric("ridgeline_device_peak_bytes_per_second") == pytest.approx(3.35e12)
    for name in ("bandwidth", "flops"):
        assert 0 < server.metric(f"ridgeline_achieved_{name}_ratio") < 1
    assert server.metric("ridgeline_step_ideal_seconds_total") > 0
    assert server.metric("ridgeline_step_ideal_seconds_total") < measured_s(server)
    steps = server.metric("ridgeline_engine_steps_total")
    assert server.metric("ridgeline_measured_steps_total") == steps
    with server.http as http:
        page = http.get("/metrics").text
    labels = 'device="NVIDIA H100 SXM 80 GB",model_name="fake",origin="assumed"'
    assert f"ridgeline_cost_model_info{{{labels}}} 1.0" in page


def test_explain_sums_to_the_latency(server: Running) -> None:
    ask(server)
    ask(server, n=2)
    with server.http as http:
        report = http.get("/explain").json()
    assert report["model"] == "fake"
    assert report["server"]["origin"] == "assumed"
    assert len(report["requests"]) >= 3
    for request in report["requests"]:
        assert sum(request["parts"].values()) == pytest.approx(request["latency_s"], abs=1e-9)
    slow = [r for r in report["requests"] if r["num_output_tokens"] == 8]
    assert all(request["parts"]["decode"] > 7 * 0.02 for request in slow[-3:])
    assert report["server"]["binds"].startswith("something that the model does not know")


def test_explain_wants_a_key(fake_model: Path, tmp_path: Path) -> None:
    with running(fake_config(fake_model), tmp_path, key="key-of-eight-or-more") as server:
        assert httpx.get(f"{server.url}/explain", trust_env=False).status_code == 401
        with server.http as http:
            assert http.get("/explain").status_code == 200


def test_the_event_log_of_a_server_explains_it_after_its_end(
    fake_model: Path, tmp_path: Path
) -> None:
    path = tmp_path / "events.jsonl"
    config = fake_config(fake_model, engine={"event_log": str(path)})
    with running(config, tmp_path) as server:
        usage = ask(server, n=2).json()["usage"]
        server.wait_until_idle()
        with server.http as http:
            active = http.get("/explain").json()
        server.stop()
    report = explain(evidence_of(read_event_log(path)))
    assert [r.request_id for r in report.requests] == [r["request_id"] for r in active["requests"]]
    assert report.server.measured_s == active["server"]["measured_s"]
    assert usage["cost"]["device_seconds"] == pytest.approx(report.server.measured_s, abs=1e-6)
    assert "hello" not in path.read_text()


def test_a_step_far_over_its_price_is_told_before_the_old_deadline(
    fake_model: Path, tmp_path: Path
) -> None:
    limits = {"step_overdue_s": 0.3, "step_deadline_s": 1000.0, "drain_s": 0.1}
    with running(fake_config(fake_model, limits), tmp_path) as server:
        assert server.metric("ridgeline_engine_overdue_steps_total") == 0
        stuck = Asking(server, "!hang")
        until(lambda: not server.is_ready(), "readiness to go")
        with server.http as http:
            assert http.get("/health/live").status_code == 200
        assert server.metric("ridgeline_engine_overdue_steps_total") == 1
        line = "a step takes longer than it should step=1"
        until(lambda: line in server.log.read_text(), "a line in the log")
        assert server.metric("ridgeline_engine_overdue_steps_total") == 1
        assert server.stop() == 0
        stuck.wait()


def test_slow_steps_within_their_allowance_are_healthy(fake_model: Path, tmp_path: Path) -> None:
    with running(fake_config(fake_model, {"step_overdue_s": 5.0}), tmp_path) as server:
        asking = Asking(server, "!crawl", max_tokens=5)
        asking.first.wait(60)
        assert server.is_ready()
        asking.wait()
        assert server.metric("ridgeline_engine_overdue_steps_total") == 0
