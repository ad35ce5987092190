"""Are the metrics there, under the names that dashboards hang on, and do they count right?"""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.server.running import Running

NAMES = {
    "ridgeline_info": "gauge",
    "ridgeline_requests": "counter",
    "ridgeline_sequences": "counter",
    "ridgeline_prompt_tokens": "counter",
    "ridgeline_generation_tokens": "counter",
    "ridgeline_late_outputs": "counter",
    "ridgeline_sequences_finished": "counter",
    "ridgeline_requests_refused": "counter",
    "ridgeline_request_queue_seconds": "histogram",
    "ridgeline_time_to_first_token_seconds": "histogram",
    "ridgeline_inter_token_latency_seconds": "histogram",
    "ridgeline_request_e2e_seconds": "histogram",
    "ridgeline_engine_up": "gauge",
    "ridgeline_requests_running": "gauge",
    "ridgeline_requests_waiting": "gauge",
    "ridgeline_kv_blocks": "gauge",
    "ridgeline_kv_blocks_used": "gauge",
    "ridgeline_kv_cache_usage_ratio": "gauge",
    "ridgeline_engine_steps": "counter",
    "ridgeline_engine_failed_steps": "counter",
    "ridgeline_engine_busy_seconds": "counter",
    "ridgeline_engine_scheduled_tokens": "counter",
    "ridgeline_preemptions": "counter",
    "ridgeline_prefix_cache_queried_tokens": "counter",
    "ridgeline_prefix_cache_hit_tokens": "counter",
    "ridgeline_engine_restarts": "counter",
    "ridgeline_price_info": "gauge",
    "ridgeline_step_measured_seconds": "counter",
    "ridgeline_step_expected_seconds": "counter",
    "ridgeline_step_ideal_seconds": "counter",
    "ridgeline_host_gap_seconds": "counter",
    "ridgeline_step_flops": "counter",
    "ridgeline_step_bytes": "counter",
    "ridgeline_batch_rows": "counter",
    "ridgeline_graph_padded_rows": "counter",
    "ridgeline_limit_bandwidth_per_second": "gauge",
    "ridgeline_limit_flops_per_second": "gauge",
    "ridgeline_achieved_bandwidth_ratio": "gauge",
    "ridgeline_achieved_flops_ratio": "gauge",
    "ridgeline_regime_steps": "counter",
    "ridgeline_regime_measured_seconds": "counter",
    "ridgeline_regime_expected_seconds": "counter",
    "ridgeline_guess_steps": "counter",
    "ridgeline_guess_rows": "counter",
    "ridgeline_guess_row_tokens": "counter",
    "ridgeline_guesses": "counter",
    "ridgeline_guesses_accepted": "counter",
    "ridgeline_guess_drafting_seconds": "counter",
    "ridgeline_guess_checking_seconds": "counter",
    "ridgeline_guess_plain_seconds": "counter",
    "ridgeline_guesses_reached": "counter",
    "ridgeline_guesses_right": "counter",
    "ridgeline_engine_overdue_steps": "counter",
    "ridgeline_memory_contract_bytes": "gauge",
    "ridgeline_start_seconds": "gauge",
    "ridgeline_device_memory_bytes": "gauge",
    "ridgeline_device_memory_used_bytes": "gauge",
    "ridgeline_http_connections": "gauge",
    "ridgeline_http_requests_open": "gauge",
    "ridgeline_http_body_bytes_held": "gauge",
    "ridgeline_http_tasks": "gauge",
}


def page(server: Running) -> str:
    with server.http as http:
        reply = http.get("/metrics")
    assert reply.headers["content-type"].startswith("text/plain; version=")
    return reply.text


def test_names_and_types_are_stable(server: Running) -> None:
    families = {f.name: f.type for f in text_string_to_metric_families(page(server))}
    assert families == NAMES


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
    assert 'ridgeline_sequences_finished_total{finish_reason="length"} 4.0' in text
    assert 'ridgeline_sequences_finished_total{finish_reason="stop"} 1.0' in text
    assert 'ridgeline_requests_refused_total{code="context_length_exceeded"} 1.0' in text
    assert 'ridgeline_requests_refused_total{code="not_found"} 1.0' in text
    assert server.metric("ridgeline_engine_busy_seconds_total") > 0
    assert server.metric("ridgeline_device_memory_used_bytes") == 1 << 29
