"""Is the queue time on /metrics the time to first scheduling, and the one in the event log?"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ridgeline.observe.event_log import Added, EventLog, Planned, read_event_log
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.engine_client import EngineClient
from ridgeline.server.wire import Admitted, Gauges, Scheduled, Step
from tests.server.running import Running, fake_config, running
from tests.server.test_engine_client import output, step, submitted, with_client

QUEUE, FIRST = "ridgeline_request_queue_seconds", "ridgeline_time_to_first_token_seconds"


def logged_queue_s(log: EventLog) -> float:
    """Of all requests but forks, from their arrival at the engine to the first plan that opens
    them."""
    arrivals = {
        event.request_id: event.arrival
        for event in log.events
        if isinstance(event, Added) and event.fork_of is None
    }
    total = 0.0
    for event in log.events:
        if isinstance(event, Planned):
            for row in event.opened:
                if (arrival := arrivals.pop(row.request_id, None)) is not None:
                    total += event.now - arrival
    assert not arrivals  # all were scheduled
    return total


def ask(server: Running, number: int, n: int = 1) -> None:
    body = {"model": "fake", "prompt": f"!slow {number}", "max_tokens": 2}
    with server.http as http:
        reply = http.post("/v1/completions", json=body | {"n": n, "temperature": float(n > 1)})
    assert reply.status_code == 200


def test_it_is_that_of_the_event_log(fake_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    config = fake_config(fake_model, engine={"max_num_seqs": 2, "event_log": str(log)})
    with running(config, tmp_path) as server:
        for number in range(3):
            ask(server, number)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(lambda number: ask(server, number), range(8)))
        ask(server, 9, n=2)
        server.wait_until_idle()
        queue, first = server.metric(f"{QUEUE}_sum"), server.metric(f"{FIRST}_sum")
        counts = server.metric(f"{QUEUE}_count"), server.metric(f"{FIRST}_count")
    assert counts == (12, 13)  # a fork waits for its prompt, not for room
    assert queue == pytest.approx(logged_queue_s(read_event_log(log)), rel=1e-9)
    assert queue < first


def test_it_ends_when_the_plan_is_made_and_not_when_its_step_is_over() -> None:
    async def test(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        client.on_step(step(replies=(Admitted(0),)))
        await task
        client.clock.advance_to(5.0)  # type: ignore[attr-defined]
        client.on_step(Step((), (Scheduled("q-0", 2.0),), (output("q-0", 5),), Gauges()))
        assert (client.latency.queue.count, client.latency.queue.sum) == (1, 2.0)
        assert (client.latency.first_token.count, client.latency.first_token.sum) == (1, 5.0)
        client.on_step(Step((), (Scheduled("q-0", 4.0),), (), Gauges()))  # after a preemption
        assert client.latency.queue.count == 1
        client.on_step(step(output("q-0", 5, finish="length")))

    with_client(test, n=1)
