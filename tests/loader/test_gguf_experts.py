"""Experts in a GGUF file: every way to store them is the same numbers, and what a file says of
other experts than its family has is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM
from ridgeline.errors import ConfigError
from ridgeline.formats import CHECKPOINT
from ridgeline.layers.piece import Piece
from ridgeline.loader import open_checkpoint, read_config
from ridgeline.loader.gguf_checkpoint import decode
from ridgeline.loader.gguf_layout import BY_NAME, TYPES
from tests.conftest import TEST_DEVICE
from tests.layers.test_agreement import prompts
from tests.loader.gguf_converter import Changes, write
from tests.loader.gguf_write import Raw
from tests.portable import only_portable

NUMBERS = {kind.name: number for number, kind in TYPES.items()}
HALVES = {"Q8_0": (0,), "Q4_0": (0,), "Q4_K": (0, 2), "Q6_K": (208,)}  # where a block has float16


def blocks(kind: str, shape: tuple[int, ...], noise: torch.Generator) -> torch.Tensor:
    """Random ones, by rows, of numbers that are not large."""
    block = BY_NAME[kind]
    rows = torch.Size(shape[:-1]).numel()
    size = rows, shape[-1] // block.block, block.num_bytes
    found = torch.randint(0, 256, size, dtype=torch.uint8, generator=noise)
    for at in HALVES.get(kind, ()):
        halves = torch.randn(size[:2], generator=noise).mul_(0.002).half()
        found[..., at : at + 2] = halves.view(torch.uint8).view(*size[:2], 2)
    if kind == "MXFP4":
        found[..., 0] = torch.randint(122, 125, size[:2], dtype=torch.uint8, generator=noise)
    return found.view(rows, -1)


def logits(path: Path) -> tuple[torch.Tensor, str]:
    options: dict[str, Any] = {"device": TEST_DEVICE, "dtype": "float32", "num_blocks": 160}
    with LLM(str(path), block_size=4, warm_up="off", **options) as llm:
        for row in llm.memory:
            assert row.measured in (None, row.predicted), row
        return llm.logits(prompts(7, (24,))["r0"]).cpu(), llm.resolved.weight_format


@pytest.mark.parametrize(
    ("name", "kind", "is_kept"),
    [
        ("qwen3_moe wide", "F16", False),
        ("qwen3_moe wide", "Q8_0", True),
        ("qwen3_moe wide", "Q4_0", True),
        ("qwen3_moe wide", "Q4_K", False),
        ("qwen3_moe wide", "Q6_K", True),
        ("deepseek wide", "Q8_0", True),
        ("gpt_oss wide", "MXFP4", False),
    ],
)
def test_packed_experts_are_the_same_numbers(
    name: str, kind: str, is_kept: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    only_portable(monkeypatch)
    noise, numbers = torch.Generator().manual_seed(11), dict[str, torch.Tensor]()

    def packed(stored: str, tensor: torch.Tensor) -> Raw | torch.Tensor:
        # Of the layers all but what is never packed, and in the first one some of another type.
        is_left = tensor.dim() == 1 or "gate_inp" in stored or not stored.startswith("blk.")
        is_left |= bool(tensor.shape[-1] % BY_NAME[kind].block)
        if is_left or stored.endswith(".bias") or stored == "blk.0.ffn_down_exps.weight":
            numbers[stored] = tensor
            return tensor
        if kind == "F16":
            numbers[stored] = tensor.half().float()
            return tensor.half()
        shape = tuple(tensor.shape)
        raw = blocks(kind, shape, noise)
        numbers[stored] = decode(kind, raw).view(shape)
        return Raw(shape, NUMBERS[kind], raw.numpy().tobytes())

    write(tmp_path / "packed.gguf", name, raw=packed)
    write(tmp_path / "plain.gguf", name, raw=lambda stored, tensor: numbers[stored])
    got, form = logits(tmp_path / "packed.gguf")
    want, _ = logits(tmp_path / "plain.gguf")
    assert (form == CHECKPOINT) is is_kept
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_parts_of_what_makes_keys_and_values(tmp_path: Path) -> None:
    """Rows and columns from anywhere, as ranks ask for them, of the two tensors of newer files."""
    for is_older in (False, True):
        write(tmp_path / f"{is_older}.gguf", "deepseek_v3 of a file", is_older=is_older)
    newer, older = open_checkpoint(tmp_path / "False.gguf"), open_checkpoint(tmp_path / "True.gguf")
    name = "model.layers.2.self_attn.kv_b_proj.weight"
    assert newer.num_bytes(name) == older.num_bytes(name)
    whole = older.tensor(name)
    assert torch.equal(newer.tensor(name), whole)
    for dim, start, length in ((0, 22, 44), (0, 5, 30), (1, 3, 11)):
        target = torch.empty_like(whole.narrow(dim, start, length))
        newer.fill(Piece(name, target, dim, start))
        assert torch.equal(target, whole.narrow(dim, start, length))


def test_gate_and_up_of_all_experts_as_one_tensor(tmp_path: Path) -> None:
    write(tmp_path / "two.gguf", "mixtral")
    seen: dict[str, torch.Tensor] = {}
    write(tmp_path / "x.gguf", "mixtral", raw=lambda name, tensor: seen.setdefault(name, tensor))
    together = {
        f"blk.{layer}.ffn_gate_up_exps.weight": torch.cat(
            [seen[f"blk.{layer}.ffn_{part}_exps.weight"] for part in ("gate", "up")], 1
        )
        for layer in range(3)
    }
    gone = [f"blk.{layer}.ffn_{part}_exps.weight" for layer in range(3) for part in ("gate", "up")]
    write(tmp_path / "one.gguf", "mixtral", more=together, without=gone)
    assert torch.equal(logits(tmp_path / "one.gguf")[0], logits(tmp_path / "two.gguf")[0])


def test_layers_for_drafting_alone_are_left_out(tmp_path: Path) -> None:
    more = {f"blk.3.{name}": torch.ones(3, 5) for name in ("attn_q.weight", "nextn.eh_proj.weight")}
    keys = {"block_count": (4, 4), "nextn_predict_layers": (4, 1)}
    case = "glm4_moe of a file"
    write(tmp_path / "a.gguf", case)
    write(tmp_path / "b.gguf", case, more=more, keys=keys)
    assert torch.equal(logits(tmp_path / "a.gguf")[0], logits(tmp_path / "b.gguf")[0])


def test_files_that_name_no_widths(tmp_path: Path) -> None:
    keys = ("expert_feed_forward_length", "expert_shared_feed_forward_length")
    path = tmp_path / "model.gguf"
    write(path, "qwen2_moe")
    told = read_config(path)

    def squeezed(name: str, tensor: torch.Tensor) -> torch.Tensor:
        return tensor[0] if name.endswith("inp_shexp.weight") else tensor

    write(path, "qwen2_moe", raw=squeezed, keys=dict.fromkeys(keys))
    assert read_config(path) == told


@pytest.mark.parametrize(
    ("name", "changes", "match"),
    [
        ("mixtral", {"expert_gating_func": (4, 2)}, "expert_gating_func is 2"),
        ("mixtral", {"expert_used_count": (4, 5)}, "expert_used_count is 5"),
        ("mixtral", {"expert_count": (4, 5)}, r"ffn_gate_inp.* has shape \[4, 64\]"),
        ("granitemoe", {"expert_shared_feed_forward_length": (4, 32)}, "ffn_gate_shexp"),
        ("mixtral", {"expert_shared_feed_forward_length": (4, 32)}, "shared_feed_forward"),
        ("qwen3_moe of a file", {"expert_weights_norm": (7, False)}, "weights_norm is False"),
        ("glm4_moe of a file", {"expert_gating_func": (4, 1)}, "gating_func is 1"),
        ("glm4_moe of a file", {"nextn_predict_layers": (4, 3)}, "nextn_predict_layers"),
        ("deepseek_v3 of a file", {"rope.dimension_count": (4, 20)}, "rope.dimension_count is 20"),
        ("deepseek_v3 of a file", {"attention.value_length_mla": (4, 12)}, "attn_v_b"),
        ("deepseek_v3 of a file", {"attention.key_length_mla": (4, 22)}, "attn_"),
        ("deepseek_v3 of a file", {"attention.kv_lora_rank": None}, "kv_lora_rank is missing"),
        ("deepseek_v3 of a file", {"attention.temperature_scale": (6, 0.1)}, "temperature_scale"),
        ("gpt_oss", {"attention.sliding_window": None}, "sliding_window is missing"),
    ],
)
def test_what_cannot_be_is_named(name: str, changes: Changes, match: str, tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    write(path, name, keys=changes)
    with pytest.raises(ConfigError, match=match) as caught:
        read_config(path)
    assert str(path) in str(caught.value)


def test_each_expert_as_tensors_of_its_own(tmp_path: Path) -> None:
    """As the first files of Mixtral have them."""
    seen: dict[str, torch.Tensor] = {}
    write(tmp_path / "new.gguf", "mixtral", raw=lambda name, tensor: seen.setdefault(name, tensor))
    stacks = {name: tensor for name, tensor in seen.items() if "_exps" in name}
    alone = {
        name.replace("_exps", f".{at}"): tensor
        for name, stack in stacks.items()
        for at, tensor in enumerate(stack)
    }
    assert "blk.2.ffn_down.3.weight" in alone
    write(tmp_path / "old.gguf", "mixtral", more=alone, without=list(stacks))
    assert torch.equal(logits(tmp_path / "old.gguf")[0], logits(tmp_path / "new.gguf")[0])
    write(tmp_path / "x.gguf", "mixtral", more=alone, without=[*stacks, "blk.1.ffn_up.2.weight"])
    with pytest.raises(ConfigError, match=r"lacks tensor 'blk\.1\.ffn_up\.2\.weight'"):
        logits(tmp_path / "x.gguf")
