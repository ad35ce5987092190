"""What is asked for becomes what is done, with reasons, or an error that says the way out."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import weight_bytes
from ridgeline.config import EngineConfig, ResolvedConfig
from ridgeline.devices.cpu import CpuDevice
from ridgeline.errors import ConfigError, DoesNotFit
from ridgeline.formats import KV_FORMATS, KVFormatLine
from ridgeline.kvcache import bytes_per_block
from ridgeline.resolve import MemoryRow, longest_context, resolve, with_mixed_tokens
from ridgeline.step import StepShape
from tests.tiny_model import tiny_config

GB = 10**9
LLAMA_8B = tiny_config(
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    max_position_embeddings=131072,
    torch_dtype="bfloat16",
)


class FakeDevice(CpuDevice):
    """A device with as much memory as a test wants."""

    bound = ""

    def __init__(self, name: str, total: int, free: int | None = None) -> None:
        super().__init__()
        self.name = name
        self.torch_device = torch.device("cpu")
        self.total, self.free = total, total if free is None else free

    def memory_total(self) -> int:
        return self.total

    def memory_free(self) -> int:
        return self.free

    def memory_bound(self) -> str:
        return self.bound


def done(
    config: dict[str, Any], device: FakeDevice, **asked: Any
) -> tuple[ResolvedConfig, tuple[MemoryRow, ...]]:
    return resolve(
        EngineConfig(model="m", device=device.name, **asked),
        read_spec(config),
        device,
        model_path="m",
        model_name="m",
        revision=None,
        has_weights=True,
    )


@pytest.mark.parametrize(("num_peers", "collective"), [(1, "peer"), (0, "nccl")])
def test_ranks_write_to_each_other_where_the_cards_can(num_peers: int, collective: str) -> None:
    card = FakeDevice("cuda", 80 * GB)
    card.num_peers = lambda: num_peers  # type: ignore[method-assign]
    resolved, _ = done(LLAMA_8B, card, tp=2)
    assert resolved.collective == collective


def test_an_80_gb_card_holds_the_8b_and_as_much_cache_as_is_left() -> None:
    card = FakeDevice("cuda:0", 80 * GB)
    resolved, memory = done(LLAMA_8B, card)
    rows = {row.what: row.predicted for row in memory}
    assert rows["weights"] == weight_bytes(read_spec(LLAMA_8B), 2)
    assert sum(rows.values()) <= 0.9 * card.total
    assert sum(rows.values()) > 0.9 * card.total - 2 * 16 * 131072
    assert resolved.max_model_len == 131072
    assert (resolved.dtype, resolved.block_size) == ("bfloat16", 16)
    assert rows["KV cache"] == (resolved.num_blocks + 1) * bytes_per_block(
        read_spec(LLAMA_8B), 16, 2
    )


def test_longer_steps_are_captured_of_a_small_model() -> None:
    """Where a host takes longer over the launches than the GPU over the work."""
    small = LLAMA_8B | {
        "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28,
        "num_attention_heads": 16,
    }  # fmt: skip
    card = FakeDevice("cuda:0", 80 * GB)
    for config, most in ((LLAMA_8B, 2048), (small, 8192)):
        resolved, memory = done(config, card)
        assert resolved.max_captured_tokens == most
        rows = {row.what: row.predicted for row in memory}
        _, shorter = done(config, card, max_num_batched_tokens=1024)
        assert rows["graphs"] > {row.what: row.predicted for row in shorter}["graphs"]
    resolved, _ = done(small, card, max_num_batched_tokens=1024)
    assert resolved.max_captured_tokens == 1024


def test_a_smaller_card_shortens_the_context_and_says_so() -> None:
    resolved, _ = done(LLAMA_8B, FakeDevice("cuda:0", 24 * GB), max_num_batched_tokens=512)
    assert resolved.max_model_len < 131072
    (decision,) = [d for d in resolved.decisions if d.field == "max_model_len"]
    assert str(resolved.max_model_len) == decision.got
    # The same length, asked for outright, is served; one more token is refused with the number.
    again = {"max_num_batched_tokens": 512, "num_blocks": resolved.num_blocks}
    assert done(LLAMA_8B, FakeDevice("cuda:0", 24 * GB), **again)[0].max_model_len == (
        resolved.max_model_len
    )
    with pytest.raises(DoesNotFit, match=str(resolved.max_model_len)):
        done(
            LLAMA_8B,
            FakeDevice("cuda:0", 24 * GB),
            max_model_len=resolved.max_model_len + 32,
            **again,
        )


def test_what_cannot_fit_names_the_largest_item_and_ways_out() -> None:
    with pytest.raises(DoesNotFit) as caught:
        done(LLAMA_8B, FakeDevice("cuda:0", 12 * GB))
    assert "weights" in str(caught.value)
    assert dict(caught.value.items)["weights"] > 16 * GB - GB
    assert len(caught.value.changes) == 3


def test_what_others_hold_is_left_to_them_and_told() -> None:
    alone, shared = FakeDevice("cuda:0", 80 * GB), FakeDevice("cuda:0", 80 * GB, 40 * GB)
    shared.bound = "others hold 40 GB of 80 GB"
    rows = [{row.what: row.predicted for row in done(LLAMA_8B, one)[1]} for one in (alone, shared)]
    assert sum(rows[0].values()) - sum(rows[1].values()) == pytest.approx(32 * GB, abs=3 << 20)
    (decision,) = (d for d in done(LLAMA_8B, shared)[0].decisions if d.field == "num_blocks")
    assert decision.because.endswith("the memory left; others hold 40 GB of 80 GB")
    shared.free = 12 * GB
    with pytest.raises(DoesNotFit, match=r"free 12\.00 GB .*\(others hold 40 GB of 80 GB\)"):
        done(LLAMA_8B, shared)


def test_a_cpu_leaves_memory_to_the_http_process(monkeypatch: pytest.MonkeyPatch) -> None:
    host = FakeDevice("cpu", 20 * GB)
    plain = done(LLAMA_8B, host, max_num_batched_tokens=256, max_num_seqs=4)[0]
    monkeypatch.setattr("ridgeline.devices.host_memory._kept_bytes", GB)
    resolved, memory = done(LLAMA_8B, host, max_num_batched_tokens=256, max_num_seqs=4)
    assert MemoryRow("HTTP process", GB) in memory
    assert memory[-1].what == "reserve"
    assert sum(row.predicted for row in memory) <= 0.9 * host.total
    assert resolved.num_blocks < plain.num_blocks
    with pytest.raises(DoesNotFit) as caught:
        done(LLAMA_8B, FakeDevice("cpu", 18 * GB), max_num_batched_tokens=256, max_num_seqs=4)
    assert dict(caught.value.items)["HTTP process"] == GB


@pytest.mark.parametrize(
    ("device", "size_gb", "asked", "first"),
    [
        ("cpu", 20, {"dtype": "float32"}, "dtype bfloat16"),
        ("cuda:0", 20, {"max_num_batched_tokens": 6144}, "memory_utilization 0.95"),
        ("cuda:0", 24, {"max_num_batched_tokens": 65536}, "max_num_batched_tokens 32768"),
        ("cuda:0", 24, {"max_model_len": 131072}, "max_model_len 21"),
        ("cuda:0", 80, {"num_blocks": 10**6}, "num_blocks 15625"),
        ("cpu", 80, {"max_model_len": 131072}, "kv_cache_memory_bytes 34359738368"),
        (
            "cuda:0",
            19,
            {"memory_utilization": 0.95},
            "max_num_batched_tokens 256, max_num_seqs 8, max_model_len 2048",
        ),
    ],
)
def test_each_change_of_a_setting_works(
    device: str, size_gb: int, asked: dict[str, Any], first: str
) -> None:
    card = FakeDevice(device, size_gb * GB)
    with pytest.raises(DoesNotFit) as caught:
        done(LLAMA_8B, card, **asked)
    changes = caught.value.changes
    assert len(changes) == len(set(changes)) == 3
    assert changes[0].startswith(first), changes
    for change, settings in zip(changes, caught.value.settings, strict=True):
        if change.startswith("a device with"):
            larger = FakeDevice(device, int(change.split()[3]) * GB)
            assert done(LLAMA_8B, larger, **asked)[0].num_blocks > 0
        elif not change.startswith(("a model", "what")):
            assert change == ", ".join(f"{name} {value}" for name, value in settings.items())
            assert done(LLAMA_8B, card, **{**asked, **settings})[0].num_blocks > 0


def test_formats_that_are_only_priced_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    card = FakeDevice("cpu", 8 * GB)
    monkeypatch.setitem(KV_FORMATS, "int2", KVFormatLine("", element_bits=2))
    with pytest.raises(
        ConfigError, match="kv_cache_dtype 'int2' can be planned for, cannot be ser"
    ):
        done(tiny_config(), card, kv_cache_dtype="int2")
    for field in ("weight_format", "kv_cache_dtype"):
        with pytest.raises(ConfigError, match=f"unknown {field} 'fp7'"):
            done(tiny_config(), card, **{field: "fp7"})


def test_memory_taken_by_others_counts() -> None:
    whole, _ = done(LLAMA_8B, FakeDevice("cuda:0", 80 * GB))
    shared, _ = done(LLAMA_8B, FakeDevice("cuda:0", 80 * GB, free=60 * GB))
    assert shared.num_blocks < whole.num_blocks


@pytest.mark.parametrize(
    ("stored", "device", "served"),
    [
        ("float16", "cpu", "float32"),
        ("bfloat16", "cpu", "bfloat16"),
        ("float16", "cuda:0", "float16"),
        ("float32", "cuda:0", "float32"),
    ],
)
def test_dtype_auto(stored: str, device: str, served: str) -> None:
    resolved, _ = done(tiny_config(torch_dtype=stored), FakeDevice(device, 8 * GB))
    assert resolved.dtype == served
    assert any(d.field == "dtype" for d in resolved.decisions)


def test_scaled_positions_reach_further_than_the_config_says() -> None:
    scaled = tiny_config(rope_scaling={"rope_type": "linear", "factor": 4.0})
    spec = read_spec(scaled)
    assert longest_context(spec) == 4 * 512
    resolved, _ = done(scaled, FakeDevice("cpu", 8 * GB), max_model_len=2048)
    assert resolved.max_model_len == 2048
    with pytest.raises(ConfigError, match="2048"):
        done(scaled, FakeDevice("cpu", 8 * GB), max_model_len=2049)


def test_nothing_is_decided_in_silence() -> None:
    resolved, _ = done(tiny_config(), FakeDevice("cpu", 8 * GB))
    assert {d.field for d in resolved.decisions} >= {"dtype", "num_blocks"}
    assert all(d.because for d in resolved.decisions)
    explicit, _ = done(
        tiny_config(),
        FakeDevice("cpu", 8 * GB),
        dtype="float32",
        num_blocks=64,
        max_model_len=512,
        speculate="off",
    )
    assert explicit.decisions == ()
    assert replace(explicit, decisions=()).num_blocks == 64


def test_small_models_take_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ridgeline.resolve.CORES", 8)
    small, _ = done(tiny_config(), FakeDevice("cpu", 8 * GB))
    large, _ = done(LLAMA_8B, FakeDevice("cpu", 80 * GB))
    assert (small.threads, large.threads) == (1, 8)
    assert any(d.field == "threads" for d in small.decisions)
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    assert done(tiny_config(), FakeDevice("cpu", 8 * GB), threads=4)[0].threads == 4
    with pytest.raises(ConfigError, match="threads is 5; this machine runs 4 at once"):
        done(tiny_config(), FakeDevice("cpu", 8 * GB), threads=5)


def test_deterministic_says_what_it_does_without() -> None:
    resolved, memory = done(LLAMA_8B, FakeDevice("cuda:0", 80 * GB), deterministic=True)
    plain, without = done(LLAMA_8B, FakeDevice("cuda:0", 80 * GB))
    assert (resolved.deterministic, plain.deterministic) == (True, False)
    (said,) = (d for d in resolved.decisions if d.field == "deterministic")
    assert "any batch" in said.because
    assert not any(d.field == "deterministic" for d in plain.decisions)
    assert memory == without


@pytest.mark.parametrize(
    ("device", "asked", "changes", "message"),
    [
        ("cpu", {}, {}, "deterministic needs a CUDA device, not cpu; leave out deterministic"),
        ("cuda:0", {"attention_backend": "sdpa"}, {}, "attention_backend triton, not sdpa"),
        ("cuda:0", {}, {"hidden_size": 32768}, "hidden sizes up to 16384, not 32768"),
    ],
)
def test_deterministic_says_what_it_needs(
    device: str, asked: dict[str, Any], changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        done(LLAMA_8B | changes, FakeDevice(device, 800 * GB), deterministic=True, **asked)


@dataclass(frozen=True, slots=True)
class Flat:
    """A step takes so many milliseconds, then 10 us a token."""

    fixed_ms: float

    def seconds(self, shape: StepShape) -> float:
        return self.fixed_ms * 1e-3 + 1e-5 * sum(new for new, _ in shape)


@pytest.mark.parametrize(
    ("device", "fixed_ms", "asked", "num"),
    [
        ("cuda:0", 0.4, {}, 320),  # 9 times what the fixed time is worth, nearly
        ("cuda:0", 0.4, {"max_num_mixed_tokens": 77}, 77),
        ("cuda:0", 0.4, {"policy": "slo", "ttft_slo_ms": 500.0, "tpot_slo_ms": 50.0}, None),
        ("cpu", 0.4, {}, None),
        ("cpu", 0.4, {"max_num_mixed_tokens": 77}, 77),
    ],
)
def test_steps_with_prompts_beside_decodes_are_as_long_as_is_worth_it(
    device: str, fixed_ms: float, asked: dict[str, Any], num: int | None
) -> None:
    where = FakeDevice(device, 80 * GB)
    resolved, _ = done(tiny_config(torch_dtype="float32"), where, **asked)
    got = with_mixed_tokens(resolved, asked.get("max_num_mixed_tokens"), Flat(fixed_ms))
    assert got.max_num_mixed_tokens == num
    said = [d for d in got.decisions if d.field == "max_num_mixed_tokens"]
    assert len(said) == (num is not None and not asked)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"max_num_mixed_tokens": 0}, "max_num_mixed_tokens is 0; it must be at least 1"),
        (
            {
                "max_num_mixed_tokens": 64,
                "policy": "slo",
                "ttft_slo_ms": 500.0,
                "tpot_slo_ms": 50.0,
            },
            "bounds steps by tpot_slo_ms; leave out max_num_mixed_tokens",
        ),
        ({"warm_up": "on"}, "unknown warm_up 'on'; choose auto or off"),
    ],
)
def test_what_does_not_go_together_is_refused(asked: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        done(tiny_config(), FakeDevice("cpu", 80 * GB), **asked)


def test_only_a_gpu_that_captures_steps_is_warmed_up() -> None:
    card = FakeDevice("cuda:0", 80 * GB)
    assert done(LLAMA_8B, card)[0].warm_up
    assert not done(LLAMA_8B, card, warm_up="off")[0].warm_up
    assert not done(LLAMA_8B, card, enforce_eager=True)[0].warm_up
    assert not done(tiny_config(), FakeDevice("cpu", 80 * GB))[0].warm_up
