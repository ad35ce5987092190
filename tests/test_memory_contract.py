"""What the memory contract predicts is what is allocated, and what it suggests works."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.memory import EVERYTHING, TOKEN, Case, Run, measure
from ridgeline import LLM, SamplingParams
from ridgeline.architectures import read_spec
from ridgeline.attention import latent, sdpa
from ridgeline.build import Built
from ridgeline.cli import main
from ridgeline.cost import working_space
from ridgeline.devices.cpu import CpuDevice
from ridgeline.errors import DoesNotFit
from ridgeline.executor import prompt_logprobs
from ridgeline.request import Request
from ridgeline.sampling.batch import NUMBERS_AT_ONCE
from tests.tiny_model import make_tiny_model, tiny_config

TOLERANCE = 0.03
CASES = (
    # Many short requests, few long ones, small blocks, windows, experts; each is a second or two.
    Case("demo:chat", {"dtype": "float32", "max_model_len": 256, "max_num_seqs": 24}),
    Case("demo:chat", {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 4}),
    Case(
        "tiny-64",
        {
            "dtype": "float16",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 128,
            "block_size": 4,
        },
    ),
    Case("qk-norm-512", {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 96}),
    Case("window-256", {"dtype": "bfloat16", "max_model_len": 1024, "max_num_seqs": 6}),
    Case("demo:moe", {"dtype": "float32", "max_model_len": 512, "max_num_seqs": 4}),
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.model}-{case.options['dtype']}")
def test_predicted_is_allocated(case: Case) -> None:
    result = measure(case)
    weights, cache, working = result.lines
    assert weights.predicted == weights.allocated > 0
    assert cache.predicted == cache.allocated > 0
    assert working.allocated > 0
    assert abs(result.total.error) < TOLERANCE, result


def test_requests_stay_within_it() -> None:
    """Not made-up steps: an engine that is given more than fits, and answers all of it."""
    served: list[str] = []

    def serve(built: Built) -> None:
        for index in range(12):
            ids = (TOKEN + index,) * (60 + 10 * index)
            sampling = EVERYTHING.replace(max_tokens=12, ignore_eos=True, seed=index)
            built.engine.add(Request(f"r{index}", ids, sampling, arrival_time=0.0))
        while not built.engine.is_idle:
            served.extend(o.request_id for o in built.engine.step() if o.finish_reason)

    def drive(built: Built, run: Run) -> None:
        run("requests", lambda: serve(built))

    options = {"max_model_len": 256, "max_num_seqs": 6, "max_num_batched_tokens": 200}
    result = measure(
        Case("demo:chat", options | {"dtype": "float32", "num_blocks": 40}), drive=drive
    )
    assert len(set(served)) == 12
    assert 0.5 < result.lines[2].allocated / result.lines[2].predicted <= 1 + TOLERANCE


def test_penalties_and_filters_are_in_it() -> None:
    """The lines that grow with the vocabulary do, and each by its own formula."""

    def items(vocab_size: int, rows: int) -> dict[str, int]:
        spec = read_spec(tiny_config(vocab_size=vocab_size))
        made = working_space.working_items(
            spec, num_tokens=64, num_rows=rows, context=128, dtype_bytes=4, kind="gpu"
        )
        return {item.what: item.bytes for item in made}

    small, large = items(1000, 64), items(100_000, 64)
    assert (small["penalty counts"], large["penalty counts"]) == (64 * 1000 * 5, 64 * 100_000 * 5)
    assert items(1000, 5)["penalty counts"] == 8 * 1000 * 5  # there is room for 4, then for 8
    assert large["tables"] - small["tables"] == 99_000 * 8
    at_least = 64 * 100_000 * (4 + 4 + 48)  # logits, their copy, and the sort of all of them
    assert large["activations"] + large["sampling"] > at_least


def test_the_numbers_are_those_of_the_code() -> None:
    gathered = {"cpu": sdpa.MAX_GATHERED_CPU, "gpu": sdpa.MAX_GATHERED}
    assert gathered == working_space.GATHERED_TOKENS
    assert working_space.FEW_TOKENS == sdpa.FEW_TOKENS
    assert working_space.QUERY_TILE == sdpa.QUERY_TILE
    assert working_space.EXPANDED_BYTES == latent.EXPANDED_BYTES
    assert working_space.PROMPT_LOGITS_BYTES == prompt_logprobs.CHUNK_BYTES
    assert list(working_space.NUMBERS_AT_ONCE.values()) == list(NUMBERS_AT_ONCE.values())


# ------------------------------------------------------------------------ a shortage

MB = 10**6
WIDE = {"vocab_size": 40_000, "hidden_size": 512, "intermediate_size": 64}


@dataclass(frozen=True)
class Shortage:
    """Memory, what is asked for, and what comes of it: the largest item and the first suggestion.
    `shape` is what differs from the tiny model, whose weights are random."""

    memory_mb: int
    asked: dict[str, Any]
    largest: str
    first: str
    shape: dict[str, Any] = field(default_factory=dict)

    def folder(self, path: Path) -> str:
        return str(make_tiny_model(path / "m", weights=False, **self.shape))


SHORTAGES = (
    Shortage(150, {"kv_cache_memory_bytes": 400 * MB}, "KV cache", "kv_cache_memory_bytes"),
    Shortage(150, {"num_blocks": 100_000}, "KV cache", "num_blocks"),
    Shortage(
        400,
        {"max_num_batched_tokens": 1 << 18, "max_num_seqs": 1000},
        "activations",
        "max_num_batched_tokens",
    ),
    Shortage(
        250,
        {"max_num_batched_tokens": 512, "max_num_seqs": 100_000},
        "penalty counts",
        "max_num_seqs",
    ),
    Shortage(
        300,
        {"dtype": "float32", "max_num_seqs": 4, "max_num_batched_tokens": 64},
        "weights",
        "dtype",
        WIDE,
    ),
)


Limit = Callable[[int], None]


@pytest.fixture
def limited(monkeypatch: pytest.MonkeyPatch) -> Limit:
    """A machine with little memory."""

    def limit(size_mb: int) -> None:
        monkeypatch.setattr(CpuDevice, "memory_total", lambda self: size_mb * MB)
        monkeypatch.setattr(CpuDevice, "memory_free", lambda self: size_mb * MB)

    return limit


@pytest.mark.parametrize("case", SHORTAGES, ids=lambda case: case.first)
def test_the_first_suggestion_serves(case: Shortage, limited: Limit, tmp_path: Path) -> None:
    limited(case.memory_mb)
    options: dict[str, Any] = {"device": "cpu", "load_format": "random"} | case.asked
    with pytest.raises(DoesNotFit, match=f"largest item is {case.largest}") as caught:
        LLM(case.folder(tmp_path), **options)
    error = caught.value
    assert max(error.items, key=lambda item: item[1])[0] == case.largest
    assert len(error.changes) == len(error.settings) == 3
    assert list(error.settings[0]) == [case.first]
    with LLM(case.folder(tmp_path), **{**options, **error.settings[0]}) as llm:
        answer = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
        assert len(answer.token_ids) == 8
        assert sum(row.predicted for row in llm.memory) <= case.memory_mb * MB


@pytest.mark.parametrize("case", SHORTAGES, ids=lambda case: case.first)
def test_the_first_suggestion_serves_on_the_command_line(
    case: Shortage, limited: Limit, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    limited(case.memory_mb)
    flags = [f"--{name.replace('_', '-')}={value}" for name, value in case.asked.items()]
    command = ["generate", case.folder(tmp_path), "--device=cpu", "--load-format=random", *flags]
    command += ["--prompt=abc", "--max-tokens=8", "--json"]
    assert main.main(command) == main.EXIT_ERROR
    out, err = capsys.readouterr()
    assert out == ""
    assert f"largest item is {case.largest}" in err.splitlines()[0]
    ways = [line.partition("would help: ")[2] for line in err.splitlines() if "would help" in line]
    assert len(ways) == 3
    assert ways[0].startswith(f"--{case.first.replace('_', '-')} ")
    assert main.main([*command, *shlex.split(ways[0])]) == 0
    assert '"token_ids"' in capsys.readouterr().out
