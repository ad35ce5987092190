"""Does a refusal of the scheduling policy reach the client with the time to come back?"""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

import pytest

from ridgeline.build import Built, build
from ridgeline.clock import WallClock
from ridgeline.config import EngineConfig
from ridgeline.errors import RequestFault
from ridgeline.frames import HEADER, frame
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.policies.base import Admit, Policy, Rank, Refuse
from ridgeline.scheduler.policies.slo import SLO
from ridgeline.scheduler.policies.step_times import LearnedPricer
from ridgeline.server.active_request import ActiveRequest
from ridgeline.server.engine_client import EngineClient
from ridgeline.server.engine_loop import EngineLoop
from ridgeline.server.errors import from_fault
from ridgeline.server.wire import (
    Command,
    Event,
    Refused,
    Step,
    pack_add,
    read_event,
)
from tests.server.test_engine_client import step, submitted, with_client
from tests.tiny_model import tiny_config


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    return folder


def built(folder: Path, **asked: object) -> Built:
    config = EngineConfig(
        model=str(folder),
        device="cpu",
        load_format="random",
        num_blocks=64,
        max_num_seqs=4,
        **asked,  # type: ignore[arg-type]
    )
    return build(config)


class Closed(Policy):
    """Lets nobody in."""

    def rank(self, request: Request, now: float) -> Rank:
        return (0.0,)

    def admit(self, request: Request, now: float) -> Admit | Refuse:
        return Refuse(7.2, "closed for lunch")

    def token_budget(self, running: Collection[Request], now: float) -> int | None:
        return None


class Wire:
    """Gives one batch of commands and keeps what is said."""

    def __init__(self, *commands: Command) -> None:
        self.commands = list(commands)
        self.said: list[Event] = []

    def take(self, *, wait_s: float) -> list[Command]:
        taken, self.commands = self.commands, []
        return taken

    def send(self, event: Event) -> None:
        self.said.append(read_event(frame(event)[HEADER.size :]))


def test_seconds_become_a_header() -> None:
    for seconds, header in ((7.2, b"8"), (0.01, b"1"), (None, b"1"), (61.0, b"61")):
        error = from_fault(RequestFault("no", code="overloaded", retry_after_s=seconds))
        assert error.status == 503
        assert (b"retry-after", header) in error.headers
    never = from_fault(RequestFault("no", param="prompt", retry_after_s=3.0))
    assert never.headers == []  # asking again would not help


def test_from_the_policy_to_the_reply(folder: Path) -> None:
    served = built(folder)
    served.engine.scheduler.policy = Closed()
    request = Request("q-0", (1, 2, 3), SamplingParams(max_tokens=2), 0.0)
    wire = Wire(pack_add(0, [request], 0.0))
    EngineLoop(served, wire, WallClock()).turn()
    served.close()
    said = wire.said[0]
    assert isinstance(said, Step)
    (reply,) = said.replies
    assert isinstance(reply, Refused)
    assert reply.retry_after_s == 7.2

    async def hear(client: EngineClient, active: ActiveRequest) -> None:
        task = await submitted(client, active)
        client.on_step(step(replies=(reply,)))
        with pytest.raises(RequestFault, match="closed for lunch; try again in") as caught:
            await task
        assert caught.value.code == "overloaded"
        assert (b"retry-after", b"8") in from_fault(caught.value).headers

    with_client(hear)


def test_a_living_engine_keeps_a_promise_and_learns_its_step_times(folder: Path) -> None:
    served = built(folder, policy="slo", ttft_slo_ms=60_000.0, tpot_slo_ms=60_000.0)
    policy = served.engine.scheduler.policy
    assert isinstance(policy, SLO)
    assert (policy.ttft_s, policy.tpot_s, policy.max_num_seqs) == (60.0, 60.0, 4)
    for i in range(6):
        sampling = SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True)
        now = served.engine.clock.now()
        served.engine.add(Request(f"q-{i}", (1, 2, 3 + i), sampling, now))
    given = dict.fromkeys((f"q-{i}" for i in range(6)), 0)
    while not served.engine.is_idle:
        for output in served.engine.step():
            given[output.request_id] += len(output.new_token_ids)
    served.close()
    assert set(given.values()) == {8}
    learned = policy.pricer
    assert isinstance(learned, LearnedPricer)
    assert learned.num_steps >= 8
    shape = ((1, 5),)
    assert learned.seconds(shape) != learned.pricer.seconds(shape)
