"""Does the log hold every decision, exactly, and nothing that it must not hold?"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.formats import POLICIES
from ridgeline.observe.engine_header import header_of
from ridgeline.observe.event_log import (
    Added,
    Collected,
    EventLog,
    LogFile,
    Planned,
    Recorder,
    plan_digest,
    read_event_log,
    read_event_logs,
)
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.base import Policy
from ridgeline.scheduler.policies.fair import Fair
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.policies.priority import Priority
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.step import NewRequest, ScheduledRequest, StepPlan
from tests.fake_device import FakeDevice
from tests.observe.recorded import ends, play, recorded
from tests.simulated_world import Moody
from tests.thinning import slow

POLICY: dict[str, Callable[[int], Policy]] = {
    "fair": lambda seed: Fair(),
    "fcfs": lambda seed: FCFS(),
    "priority": lambda seed: Priority(10.0),
    "moody": lambda seed: Moody(seed),
}


@pytest.mark.parametrize("seed", [*range(10), *slow(*range(10, 24))])
def test_the_log_makes_every_decision_again(seed: int, tmp_path: Path) -> None:
    """Forks, beams, drafts, preemptions, aborts, faults: whatever the seed draws."""
    print("seed", seed)
    world, log = recorded(seed, tmp_path / "log.jsonl", 250)
    logged, again, outputs = play(log, POLICY[world.case.policy](seed))
    assert logged == again
    assert len(logged) >= 250
    assert ends(outputs) == ends(world.outputs)


def small_engine() -> Engine:
    device = FakeDevice(64, 4, (None,), 0, 0)
    scheduler = Scheduler(BlockManager(64, 4), FCFS(), 16, 4)
    return Engine(scheduler, device, VirtualClock(), 1)


def log_of(tmp_path: Path, *requests: Request) -> tuple[str, EventLog]:
    """The text of the log of an engine that serves `requests`, and what it reads as."""
    path = tmp_path / "log.jsonl"
    engine = small_engine()
    header = header_of(engine.scheduler, policy="fcfs", max_in_flight=1, model="m")
    file = LogFile(str(path))
    engine.listeners.append(Recorder(file.write, header, b"key"))
    device = engine.executor
    assert isinstance(device, FakeDevice)
    for request in requests:
        device.salts[request.request_id] = request.cache_salt
        device.truths[request.request_id] = None  # type: ignore[assignment]
        try:
            engine.add(request)
        except RequestFault:
            continue
    while not engine.is_idle:
        engine.step()
    file.close()
    return path.read_text(), read_event_log(path)


def test_a_users_words_and_salt_are_not_in_it(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=3, stop=("my secret end",), seed=1, temperature=0.0)
    request = Request("a", (1, 2, 3), sampling, 0.5, priority=2, cache_salt=b"tenant")
    text, log = log_of(tmp_path, request)
    for word in ("secret", "tenant", b"tenant".hex()):
        assert word not in text
    added = log.events[0]
    assert isinstance(added, Added)
    back = added.request()
    assert (back.prompt_token_ids, back.arrival_time, back.priority) == ((1, 2, 3), 0.5, 2)
    assert back.sampling == SamplingParams(max_tokens=3, seed=1, temperature=0.0)
    assert len(back.cache_salt) == 16


def test_equal_salts_stay_equal_and_others_differ(tmp_path: Path) -> None:
    sampling = SamplingParams(max_tokens=1)
    requests = [
        Request(f"r{i}", (1,), sampling, 0.0, cache_salt=salt)
        for i, salt in enumerate((b"x", b"y", b"x", b""))
    ]
    _, log = log_of(tmp_path, *requests)
    salts = [event.salt for event in log.events if isinstance(event, Added)]
    assert salts[0] == salts[2] != salts[1]
    assert salts[3] == b""


def test_every_field_of_sampling_comes_back(tmp_path: Path) -> None:
    sampling = SamplingParams(
        max_tokens=2, logit_bias={5: 1.5, 7: -2}, stop_token_ids=(9, 4), top_p=0.3,
        presence_penalty=-0.5, logprobs=2, prompt_logprobs=1, ignore_eos=True,
    )  # fmt: skip
    _, log = log_of(tmp_path, Request("a", (1, 2), sampling, 0.0))
    assert isinstance(log.events[0], Added)
    assert log.events[0].sampling == sampling


def test_a_refused_request_is_in_it(tmp_path: Path) -> None:
    too_long = Request("a", (1,) * 999, SamplingParams(max_tokens=1), 0.0)
    _, log = log_of(tmp_path, too_long, Request("b", (1,), SamplingParams(max_tokens=1), 0.0))
    refused = [e.refused for e in log.events if isinstance(e, Added)]
    assert refused == ["context_length_exceeded", None]


def test_outputs_say_how_many_tokens_and_how_it_ended(tmp_path: Path) -> None:
    _, log = log_of(tmp_path, Request("a", (1,) * 20, SamplingParams(max_tokens=3), 0.0))
    rows = [
        (o.request_id, len(o.new_token_ids), o.finish_reason and o.finish_reason.value)
        for event in log.events
        if isinstance(event, Collected)
        for o in event.outputs
    ]
    assert rows == [("a", 1, None), ("a", 1, None), ("a", 1, "length")]


def test_a_line_cut_off_by_death_is_left_out_and_a_new_life_follows(tmp_path: Path) -> None:
    request = Request("a", (1,), SamplingParams(max_tokens=2), 0.0)
    text, log = log_of(tmp_path, request)
    path = tmp_path / "log.jsonl"
    path.write_text(text[:-30])
    assert read_event_log(path).events == log.events[:-1]
    log_of(tmp_path, Request("b", (2,), SamplingParams(max_tokens=2), 0.0))
    first, second = read_event_logs(path)
    assert first.events == log.events[:-1]
    added = second.events[0]
    assert isinstance(added, Added)
    assert added.request_id == "b"
    assert read_event_log(path) == second


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no event log"),
        ("{}\n", 'line 1 is no event: it has no "event" that is known'),
        ('\n{"event": ["add"]}\n', 'line 2 is no event: it has no "event" that is known'),
        ("[1]\n{}\n", "line 1 is no event: it is no JSON object"),
        ("hello\nworld\n", "line 1 is no event: it is no JSON"),
        ('{"event":"engine","version":99,"windows":[]}\n', "version 99"),
        ('{"event":"engine"}\n', "its 'engine' does not read: it has no version"),
        ('{"event":"add"}\n', "line 1 is no event: the engine is not named before it"),
    ],
)
def test_another_file_is_refused_by_name_and_line(text: str, why: str, tmp_path: Path) -> None:
    path = tmp_path / "other.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=why) as caught:
        read_event_log(path)
    said = str(caught.value)
    assert said.startswith(str(path))
    assert said.endswith("An event log is what --event-log of serve, generate or bench has written")
    assert not any(word in said for word in ("Error", "\n"))


def test_an_event_that_does_not_read_is_named(tmp_path: Path) -> None:
    text, _ = log_of(tmp_path, Request("a", (1,), SamplingParams(max_tokens=2), 0.0))
    path = tmp_path / "other.jsonl"
    lines = text.count("\n") + 1
    for event, why in (
        ({"event": "submit", "now": 1.0}, "its 'submit' does not read: .*`step`"),
        ({"event": "plan", "now": 1.0, "step": 9, "rows": 5}, "its 'plan' does not read"),
        ({"event": "submit", "now": 1.0, "step": 99}, ".* no step 99 is under way"),
        ({"event": "collect", "now": 1.0, "step": 1, "outputs": []}, ".* no step 1 is under way"),
        ({"event": "abort", "now": float("nan"), "id": "a"}, "its 'abort' does not read: .*now"),
        ({"event": "abort", "now": 1e300, "id": "a"}, "its 'abort' does not read: .*now"),
    ):
        path.write_text(f"{text}{json.dumps(event)}\n")
        with pytest.raises(ConfigError, match=f"line {lines} is no event: {why}"):
            read_event_log(path)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        read_event_log(tmp_path / "none")
    with pytest.raises(ConfigError, match="cannot be written"):
        LogFile(str(tmp_path / "none" / "log"))


def test_a_full_disk_ends_the_log_and_not_the_engine() -> None:
    lines: list[str] = []

    def write(line: str) -> None:
        if len(lines) == 5:
            raise OSError(28, "No space left on device")
        lines.append(line)

    engine = small_engine()
    header = header_of(engine.scheduler, policy="fcfs", max_in_flight=1)
    engine.listeners.append(Recorder(write, header, b"key"))
    assert isinstance(engine.executor, FakeDevice)
    engine.executor.salts["a"], engine.executor.truths["a"] = b"", None  # type: ignore[assignment]
    engine.add(Request("a", (1,), SamplingParams(max_tokens=5), 0.0))
    outputs = []
    while not engine.is_idle:
        outputs += engine.step()
    assert sum(len(output.new_token_ids) for output in outputs) == 5
    assert len(lines) == 5
    assert all(json.loads(line) for line in lines)


def test_the_digest_sees_every_part_of_a_decision() -> None:
    entry = ScheduledRequest("a", 0, 3, ((1,),), True)
    new = NewRequest("a", (1, 2, 3), 3, SamplingParams(), ((),))
    plan = StepPlan(1, (entry,), (new,), (), ("b",), ("c",))
    others = [
        StepPlan(2, (entry,), (new,), (), ("b",), ("c",)),
        StepPlan(1, (ScheduledRequest("a", 0, 3, ((2,),), True),), (new,), (), ("b",), ("c",)),
        StepPlan(1, (ScheduledRequest("a", 0, 2, ((1,),), False),), (new,), (), ("b",), ("c",)),
        StepPlan(1, (entry,), (NewRequest("a", (1, 2, 4), 3, SamplingParams(), ((),)),)),
        StepPlan(1, (entry,), (new,), (), (), ("c",)),
        StepPlan(1, (entry,), (new,), (), ("b",), ()),
    ]
    assert len({plan_digest(each) for each in (plan, *others)}) == 1 + len(others)


def test_feeding_a_journal_tells_the_same_story(tmp_path: Path) -> None:
    """What a recorder writes of a log that is fed to it is that log."""
    _, log = recorded(3, tmp_path / "log.jsonl", 120)
    lines: list[str] = []
    log.feed(Recorder(lines.append, log.header, b"k"))
    planned = [event for event in log.events if isinstance(event, Planned)]
    assert len(lines) == 1 + len(log.events)
    assert sum('"event":"plan"' in line for line in lines) == len(planned) > 100


def test_the_policies_of_headers_are_names_of_policies() -> None:
    assert {"fcfs", "priority"} <= set(POLICIES)
