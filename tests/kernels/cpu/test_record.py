"""A recorded step does again what it did, on what lies in the same tensors by then."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.devices.cpu import CpuDevice
from ridgeline.errors import InternalError
from ridgeline.kernels.cpu import elementwise, native
from ridgeline.kernels.cpu.recorder import Arena, CannotRecord, Replay, is_recording, record
from ridgeline.kernels.rms_norm import rms_norm_reference
from tests.kernels.references import silu_mul_reference
from tests.layers.reference_models import tiny_config

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
# Rows of the router fill panels; the second has one of the shared expert's gate.
MIXTRAL = tiny_config("mixtral", num_local_experts=16, vocab_size=96)
QWEN2_MOE = tiny_config("qwen2_moe", num_experts=15, moe_intermediate_size=32, vocab_size=96)
PROMPTS = ["Tom went to the park", "Once upon a time there was", "The"]


def test_a_replay_reads_what_is_there_now() -> None:
    x, weight = torch.randn(3, 32), torch.rand(32)
    outs: list[torch.Tensor] = []

    def step() -> None:
        assert is_recording()
        normed = elementwise.add_norm(None, x, weight, 1e-5)
        outs.append(elementwise.silu_mul(normed[:, :].view(3, 32)))

    recording = record(step, Arena())
    assert not is_recording()
    assert len(recording) == 2
    replay = Replay(recording)
    x.copy_(torch.randn(3, 32))
    replay()
    wanted = silu_mul_reference(rms_norm_reference(x, weight, 1e-5))
    torch.testing.assert_close(outs[0], wanted, rtol=1e-5, atol=1e-6)


def test_steps_share_their_memory_but_not_within_one() -> None:
    arena, places = Arena(), []

    def step() -> None:
        places.append([torch.empty(5, 3).data_ptr() for _ in range(3)])

    record(step, arena)
    taken = arena.num_bytes
    record(step, arena)
    assert places[0] == places[1]
    assert len(set(places[0])) == 3
    assert arena.num_bytes == taken
    assert all(place % 64 == 0 for place in places[0])


@pytest.mark.parametrize("name", ["neg", "relu_", "clone"])
def test_what_torch_computes_is_refused(name: str) -> None:
    x = torch.ones(3)

    def step() -> None:
        getattr(x, name)()

    with pytest.raises(CannotRecord, match="aten"):
        record(step, Arena())
    assert not is_recording()


def test_a_device_runs_what_cannot_be_recorded_as_it_is(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.zeros(3)

    def step() -> None:
        x.add_(1)

    with caplog.at_level(logging.INFO):
        replay = CpuDevice().capture(step, "a test")
    assert "a test is not recorded" in caplog.text
    replay()
    assert x.tolist() == [1.0] * 3


def test_recordings_do_not_nest() -> None:
    def step() -> None:
        record(lambda: None, Arena())

    with pytest.raises(InternalError, match="already"):
        record(step, Arena())
    assert not is_recording()


def answers(**options: Any) -> list[tuple[int, ...]]:
    llm = LLM("demo:chat", device="cpu", max_model_len=128, speculate="off", **options)
    greedy = SamplingParams(temperature=0.0, max_tokens=24)
    return [result.outputs[0].token_ids for result in llm.generate(PROMPTS, greedy)]


def test_in_float32_the_demo_model_says_what_it_says_by_sdpa() -> None:
    assert answers(dtype="float32") == answers(dtype="float32", attention_backend="sdpa")


def test_decode_steps_are_recorded_and_say_the_same() -> None:
    assert answers(dtype="bfloat16") == answers(dtype="bfloat16", enforce_eager=True)


def test_every_decode_step_is_one_call(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = LLM("demo:chat", device="cpu", max_model_len=128, dtype="bfloat16", speculate="off")
        for sampling in (
            SamplingParams(temperature=0.0, max_tokens=5),
            SamplingParams(temperature=0.8, seed=1, max_tokens=5),
            SamplingParams(temperature=0.8, seed=1, top_k=5, repetition_penalty=1.1, max_tokens=5),
        ):
            before = llm.built.engine.executor.num_captured_steps  # type: ignore[attr-defined]
            llm.generate(PROMPTS[:2], sampling)
            after = llm.built.engine.executor.num_captured_steps  # type: ignore[attr-defined]
            assert after - before == 4
    assert "not recorded" not in caplog.text
    assert "not captured" not in caplog.text


@pytest.mark.parametrize("speculate", ["draft:demo:draft:3", "ngram:3", "early:2:3"])
def test_so_is_every_step_with_drafts(speculate: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        llm = LLM("demo:chat", device="cpu", max_model_len=128, dtype="bfloat16",
                  speculate=speculate)  # fmt: skip
        executor: Any = llm.built.engine.executor
        for sampling in (
            SamplingParams(temperature=0.0, max_tokens=9),
            SamplingParams(temperature=0.8, max_tokens=9),
        ):
            before = executor.num_captured_steps
            llm.generate(PROMPTS[:2], sampling)
            assert 2 <= executor.num_captured_steps - before <= 8
    assert "not recorded" not in caplog.text
    assert "not captured" not in caplog.text


@pytest.mark.parametrize("config", [MIXTRAL, QWEN2_MOE], ids=["mixtral", "qwen2_moe"])
@pytest.mark.parametrize("weight_format", ["plain", "int4-g32"])
def test_so_are_steps_with_experts(
    config: dict[str, Any], weight_format: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [list(range(3, 20)), [9, 8, 7]]

    def said(*, eager: bool = False, speculate: str = "off") -> list[list[int]]:
        with LLM(
            str(tmp_path), device="cpu", dtype="bfloat16", load_format="random", max_model_len=64,
            weight_format=weight_format, enforce_eager=eager, speculate=speculate,
        ) as llm:  # fmt: skip
            assert (llm.resolved.max_captured_rows > 0) is not eager
            return [llm.generate([one], greedy, progress=False)[0].token_ids for one in prompts]

    with caplog.at_level(logging.INFO, logger="ridgeline"):
        recorded, drafted = said(), said(speculate="ngram:2")
    assert "not recorded" not in caplog.text
    assert "not captured" not in caplog.text
    assert recorded == drafted == said(eager=True)
