"""Recorded traces: what is read, what is refused, and the real files where they are."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from ridgeline.clock import VirtualClock
from ridgeline.engine import Engine
from ridgeline.errors import ConfigError, RequestFault
from ridgeline.observe.engine_header import header_of
from ridgeline.observe.event_log import Recorder
from ridgeline.request import Request, SamplingParams
from ridgeline.scheduler.block_manager import BlockManager
from ridgeline.scheduler.policies.fcfs import FCFS
from ridgeline.scheduler.scheduler import Scheduler
from ridgeline.simulator.traces import read_trace
from ridgeline.simulator.workload import mean_rate
from tests.fake_device import FakeDevice

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,109
"""


def written(folder: Path, text: str, name: str = "trace") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def mooncake(**changes: object) -> str:
    first = {"timestamp": 1000, "input_length": 1030, "output_length": 5, "hash_ids": [4, 5, 6]}
    return json.dumps(first | changes) + "\n"


def test_azure_columns(tmp_path: Path) -> None:
    first, second = read_trace(written(tmp_path, AZURE))
    assert (first.time_s, first.num_input, first.num_output) == (0.0, 374, 44)
    assert second.time_s == pytest.approx(4.314579, abs=1e-5)
    assert second.id == "1"


def test_columns_are_found_by_name_and_the_order_is_by_time(tmp_path: Path) -> None:
    text = "output_tokens,arrival_time_ns,input_tokens,more\n7,2000000000,70,x\n8,1000000000,80,y\n"
    first, second = read_trace(written(tmp_path, text))
    assert (first.num_input, first.num_output) == (80, 8)
    assert second.time_s == pytest.approx(1.0)


def test_a_packed_trace_is_read(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode()))
    assert len(read_trace(path)) == 2


def test_a_limit_takes_the_beginning(tmp_path: Path) -> None:
    assert [a.num_input for a in read_trace(written(tmp_path, AZURE), limit=1)] == [374]


def test_mooncake_fields(tmp_path: Path) -> None:
    text = mooncake() + "\n" + mooncake(timestamp=4000, hash_ids=[4])
    first, second = read_trace(written(tmp_path, text))
    assert first.prefix_hashes == (4, 5, 6)
    assert second.time_s == 3.0
    assert first.tokens(0)[:512] == second.tokens(1)[:512]
    assert first.tokens(0)[512] != second.tokens(1)[512]


def test_an_answer_of_no_tokens_is_one(tmp_path: Path) -> None:
    (only,) = read_trace(written(tmp_path, mooncake(output_length=0)))
    assert only.num_output == 1


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "empty"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "empty"),
        ("TIMESTAMP,ContextTokens,Answered\n1,2,3\n", "no column GeneratedTokens"),
        ("hello\n", "no column"),
        (AZURE + "2023-11-16 18:15:51,17\n", "line 4: 2 fields"),
        (AZURE + "yesterday,1,2\n", "line 4: 'yesterday' is no time"),
        (AZURE + "-3,1,2\n", "line 4: the time is -3"),
        (AZURE + "2023-11-16 18:15:51,many,2\n", "line 4: ContextTokens is 'many'"),
        (AZURE + "2023-11-16 18:15:51,1,-2\n", "line 4: GeneratedTokens is '-2'"),
        ('{"timestamp": 0, "input_length": 3}\n', "line 1: there is no field output_length"),
        (mooncake() + "{broken\n", "line 2: not JSON"),
        (mooncake() + "[1]\n", "line 2: not a JSON object"),
        (mooncake(timestamp="now"), "timestamp is 'now'"),
        (mooncake(input_length=1.5), "input_length is 1.5"),
        (mooncake(hash_ids=["a"]), "hash_ids must be"),
        (mooncake(hash_ids=[-1]), "hash_ids must be"),
        (mooncake(hash_ids=[1, 2, 3, 4]), "4 hash_ids, but 1030 tokens have 3"),
    ],
)
def test_what_is_wrong_is_said_with_its_line(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_trace(written(tmp_path, text))
    assert "trace" in str(caught.value)


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file"):
        read_trace(tmp_path / "nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path)
    (tmp_path / "cut.gz").write_bytes(gzip.compress(AZURE.encode())[:40])
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "cut.gz")
    (tmp_path / "binary").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_trace(tmp_path / "binary")


def test_the_published_traces(shared: Path) -> None:
    data = shared / "data"
    chats = read_trace(data / "azure-llm-2023" / "AzureLLMInferenceTrace_conv.csv.gz")
    assert len(chats) == 19_366
    assert 5.0 < mean_rate(chats) < 6.0
    code = read_trace(data / "azure-llm-2023" / "AzureLLMInferenceTrace_code.csv")
    assert len(code) == 8_819
    turns = read_trace(data / "mooncake-fast25" / "conversation_trace.jsonl.gz")
    assert len(turns) == 12_031
    assert sum(a.num_input for a in turns) / len(turns) == pytest.approx(12_035, abs=1)
    assert sum(a.num_output for a in turns) / len(turns) == pytest.approx(343, abs=1)
    sharegpt = data / "sharegpt-lengths" / "sharegpt-llama-3.1-8b-300-sps10.lengths.csv"
    assert len(read_trace(sharegpt)) == 300


def test_a_log_of_our_own_engine(tmp_path: Path) -> None:
    """The prompts as they were, the answers as long as they became, and no refused request."""
    path = tmp_path / "events.jsonl"
    scheduler = Scheduler(BlockManager(64, 4), FCFS(), 16, 4)
    clock = VirtualClock()
    device = FakeDevice(64, 4, (None,), 0, 0)
    engine = Engine(scheduler, device, clock)
    with path.open("w") as file:
        header = header_of(scheduler, policy="fcfs", max_in_flight=1)
        engine.listeners.append(Recorder(file.write, header, b"key"))
        for index, length in enumerate((3, 9)):
            clock.advance_to(10.0 + index)
            prompt = tuple(range(5, 5 + length))
            sampling = SamplingParams(max_tokens=4 + index, ignore_eos=True)
            device.salts[f"r{index}"] = b""
            device.truths[f"r{index}"] = None  # type: ignore[assignment]
            engine.add(Request(f"r{index}", prompt, sampling, clock.now()))
        with pytest.raises(RequestFault):
            engine.add(Request("r9", (), SamplingParams(), clock.now()))
        while not engine.is_idle:
            engine.step()
    first, second = read_trace(path)
    assert (first.id, first.prompt, first.num_output) == ("r0", (5, 6, 7), 4)
    assert (second.time_s, second.num_input, second.num_output) == (1.0, 9, 5)
