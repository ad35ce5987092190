"""Does the HTTP side keep its books straight, whatever the engine says and when?"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from ridgeline.answer import Answer
from ridgeline.clock import VirtualClock
from ridgeline.config import EngineConfig
from ridgeline.errors import RequestFault
from ridgeline.observe.watchdog import StepInFlight
from ridgeline.request import FinishReason, RequestOutput, SamplingParams
from ridgeline.server import engine_client
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.config import ServeConfig
from ridgeline.server.engine_client import EngineClient
from ridgeline.server.errors import ApiError
from ridgeline.server.wire import Admitted, Gauges, Prices, Ready, Refused, Step
from tests.server.running import PATIENCE_S

PRICES = Prices("a", "b", 1.0, 1.0)
READY = Ready(1, "/nowhere", "m", 264, 512, 16, 64, 8, (257,), (), (), 0, 512)


class Nobody:
    async def on_ready(self, ready: Ready) -> None:
        """Not called here."""


def output(request_id: str, *token_ids: int, finish: str | None = None) -> RequestOutput:
    return RequestOutput(request_id, token_ids, None if finish is None else FinishReason(finish))


def step(*outputs: RequestOutput, replies: tuple[Admitted | Refused, ...] = ()) -> Step:
    return Step(replies, (), outputs, Gauges())


def with_client(test: Callable[[EngineClient, ActiveRequest], Awaitable[None]], n: int = 2) -> None:
    """Run `test` with a client whose engine is up (but mute) and a live request of n samples."""

    async def go() -> None:
        config = ServeConfig(engine=EngineConfig(model="m"))
        client = EngineClient(config, VirtualClock(), Nobody().on_ready)
        client.ready = READY
        sampling = SamplingParams(max_tokens=9, n=n, seed=1)
        answer = Answer(
            "q", (1, 2), sampling, tokenizer=None, end_token_ids=frozenset(), arrival_time=0.0
        )
        await test(client, ActiveRequest([answer], streams=True, max_bytes=10_000, arrival=0.0))
        assert client.lives == {}
        assert client.progress.num_pending == 0

    asyncio.run(go())


async def submitted(client: EngineClient, active: ActiveRequest) -> asyncio.Task[None]:
    task = asyncio.create_task(client.submit(active))
    await asyncio.sleep(0)
    assert len(client.lives) == client.progress.num_pending == len(active.times)
    return task


def test_a_request_that_runs_to_its_end_leaves_nothing() -> None:
    async def test(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        client.on_step(step(replies=(Admitted(0),)))
        await task
        client.on_step(step(output("q-0", 5), output("q-1", 6)))
        client.on_step(step(output("q-0", 7, finish="length")))
        assert list(client.lives) == ["q-1"]
        client.on_step(step(output("q-1", 8, finish="length")))
        assert active.is_finished
        assert client.traffic.finished == {"length": 2}
        assert client.traffic.num_output_tokens == 4

    with_client(test)


def test_a_refusal_reaches_its_request_and_leaves_nothing() -> None:
    async def test(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        client.on_step(step(replies=(Refused(0, "no", "n", "limit_exceeded"),)))
        with pytest.raises(RequestFault) as caught:
            await task
        assert (caught.value.param, caught.value.code) == ("n", "limit_exceeded")

    with_client(test)


def test_a_cancelled_submission_leaves_nothing_and_late_words_harm_nobody() -> None:
    async def test(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        client.on_step(step(replies=(Admitted(0),)))
        client.on_step(step(output("q-0", 5, finish="length"), output("unknown", 5)))
        assert client.traffic.num_late_outputs == 2
        assert client.traffic.finished == {"abort": 2}

    with_client(test)


def test_an_error_on_one_sample_ends_the_whole_request() -> None:
    async def test(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        client.on_step(step(replies=(Admitted(0),)))
        await task
        broken = RequestOutput("q-1", (), FinishReason.ERROR, error="the logits are not numbers")
        client.on_step(step(broken))
        assert active.error is not None
        assert active.error.code == "internal_error"
        assert "logits" not in active.error.message

    with_client(test)


def test_an_output_that_cannot_be_assembled_harms_only_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def explode(*_: Any) -> None:
        raise ValueError("the tokenizer has a bug")

    async def test(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        client.on_step(step(replies=(Admitted(0),)))
        await task
        monkeypatch.setattr(active, "push", explode)
        client.on_step(step(output("q-0", 5)))
        assert active.error is not None
        assert active.error.code == "internal_error"

    with_client(test)


def test_a_lost_engine_fails_everything_in_flight() -> None:
    async def test(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        client.on_engine_lost()
        with pytest.raises(ApiError) as caught:
            await task
        assert caught.value.code == "engine_unavailable"
        assert not client.is_up
        assert client.traffic.finished == {"error": 2}
        with pytest.raises(ApiError):
            await client.submit(active)

    with_client(test)


def test_no_engine_is_started_after_the_order_to_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came while one had died and the next was not there yet."""
    monkeypatch.setattr(engine_client, "RESTART_PAUSE_S", 2 * PATIENCE_S)
    num_lives = 0

    async def one_life() -> bool:
        nonlocal num_lives
        num_lives += 1
        return False

    async def go() -> None:
        client = EngineClient(
            ServeConfig(engine=EngineConfig(model="m")), VirtualClock(), Nobody().on_ready
        )
        monkeypatch.setattr(client, "_one_life", one_life)
        task = asyncio.create_task(client.run())
        while not client.num_restarts:
            await asyncio.sleep(0)
        await client.stop()
        await asyncio.wait_for(task, PATIENCE_S)
        assert num_lives == 1

    asyncio.run(go())


def test_an_engine_that_comes_after_the_order_to_stop_is_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def go() -> None:
        client = EngineClient(
            ServeConfig(engine=EngineConfig(model="m")), VirtualClock(), Nobody().on_ready
        )
        ours, theirs = socket.socketpair()

        async def spawn() -> Any:
            await client.stop()
            reader, writer = await asyncio.open_unix_connection(sock=ours)
            heartbeat = SimpleNamespace(close=lambda: None)
            return SimpleNamespace(
                process=SimpleNamespace(returncode=0), reader=reader, writer=writer,
                heartbeat=heartbeat, ready_at=None,
            )  # fmt: skip

        async def reap(life: Any) -> int:
            return 0

        monkeypatch.setattr(client, "_spawn", spawn)
        monkeypatch.setattr(client, "_reap", reap)
        with theirs:
            await asyncio.wait_for(client.run(), PATIENCE_S)

    asyncio.run(go())


@pytest.mark.parametrize(
    ("is_priced", "is_first", "expected_s", "killed_after_s"),
    [
        (True, False, 0.01, 30),  # a step like any before
        (True, False, None, 30),  # stuck between two steps
        (True, False, 10.0, 200),  # 20 times its price
        (True, True, 0.01, 300),  # it may compile kernels
        (True, True, 100.0, 2000),
        (False, False, None, 300),  # nobody knows what its steps take
    ],
)
def test_when_an_engine_is_killed(
    is_priced: bool, is_first: bool, expected_s: float | None, killed_after_s: float
) -> None:
    client = EngineClient(
        ServeConfig(engine=EngineConfig(model="m")), VirtualClock(), Nobody().on_ready
    )
    step = None if expected_s is None else StepInFlight(1, 100.0, expected_s)
    page = SimpleNamespace(read=lambda: step, is_first_time=lambda: is_first)
    client._life = SimpleNamespace(heartbeat=page)  # type: ignore[assignment]
    client.progress.work_began(100.0)
    assert not client.should_kill(1e6)  # while it is loading
    client.ready = msgspec.structs.replace(READY, prices=PRICES if is_priced else None)
    assert not client.should_kill(100.0 + killed_after_s)
    assert client.should_kill(100.1 + killed_after_s)
    client.progress.work_ended()
    assert not client.should_kill(1e6)
