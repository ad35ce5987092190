"""A GGUF file is the same model as its safetensors twin, and no damaged one is anything else."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from ridgeline import LLM, SamplingParams
from ridgeline.architectures import expected_tensors, read_spec
from ridgeline.errors import ConfigError, InternalError
from ridgeline.layers.piece import Piece
from ridgeline.loader import (
    check_tensors,
    open_checkpoint,
    read_config,
    read_generation_config,
    resolve_model,
)
from ridgeline.loader.gguf_checkpoint import GGUFCheckpoint, stored_rows
from ridgeline.text.chat import load_chat_template
from ridgeline.text.tokenizer import load_tokenizer
from tests.conftest import TEST_DEVICE
from tests.loader.gguf_write import gguf_file, interleaved, llama_tensors, metadata_of
from tests.loader.write import text
from tests.tiny_model import make_tiny_model, tiny_config

FILES = Path(__file__).parent / "gguf_files"
MODELS = ("llama", "llama3", "qwen2", "qwen3")


@cache
def told() -> dict[str, dict[str, list[int]]]:
    found: dict[str, dict[str, list[int]]] = json.loads((FILES / "models.json").read_text())
    return found


# ---------------------------------------------------------------------- agreement


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_tokens_are_those_of_transformers(name: str) -> None:
    """Of Transformers for the numbers that the `gguf` package reads from the same file."""
    options: dict[str, Any] = {"dtype": "float32", "device": TEST_DEVICE, "num_blocks": 64}
    llm = LLM(str(FILES / f"{name}.gguf"), weight_format="plain", **options)
    prompt = told()[name]["prompt"]
    want = load_file(FILES / "models.safetensors")[name]
    got = llm.logits(prompt)[-len(want) :].cpu()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    greedy = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    [result] = llm.generate([prompt], greedy, progress=False)
    assert list(result.token_ids) == told()[name]["greedy"]
    assert llm.tokenizer is not None
    assert llm.tokenizer.encode("he") == [1, 261]
    assert llm.encode_chat([{"role": "user", "content": "he"}]) == [1, 3, 261, 4]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_it_is_the_safetensors_checkpoint_bit_for_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    folder, path, tensors = twins(tmp_path, dtype)
    words = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
    mine = read_spec(read_config(path))
    assert mine == read_spec(read_config(folder) | {"torch_dtype": words[dtype]})
    checkpoint = open_checkpoint(path)
    check_tensors(checkpoint, expected_tensors(mine), path)
    assert sorted(checkpoint.names()) == sorted(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(checkpoint.tensor(name), tensor), name
        for dim, size in enumerate(tensor.shape):
            start, length = size // 3, size - size // 2
            want = tensor.narrow(dim, start, length)
            assert torch.equal(checkpoint.slice(name, dim, start, length), want), name
    checkpoint.close()


def twins(folder: Path, dtype: torch.dtype) -> tuple[Path, Path, dict[str, torch.Tensor]]:
    """A tiny Llama as a folder and as a file, and its tensors."""
    make_tiny_model(folder / "hf")
    loaded = load_file(folder / "hf" / "model.safetensors")
    tensors = {name: tensor.to(dtype) for name, tensor in loaded.items()}
    path = folder / "m.gguf"
    path.write_bytes(gguf_file(metadata_of(tiny_config()), llama_tensors(tensors, 4, 2)))
    return folder / "hf", path, tensors


@pytest.mark.parametrize("device", sorted({"cpu", TEST_DEVICE}))
def test_pieces_are_filled_a_few_rows_at_a_time(
    monkeypatch: pytest.MonkeyPatch, device: str
) -> None:
    """The file's bytes are counted once; rows, columns and whole tensors come as asked for."""
    checkpoint = open_checkpoint(FILES / "llama.gguf")
    assert isinstance(checkpoint, GGUFCheckpoint)
    whole = {name: checkpoint.tensor(name).float() for name in checkpoint.names()}
    monkeypatch.setattr("ridgeline.loader.gguf_checkpoint.CHUNK_VALUES", {device: 100})
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    pieces, wanted = [], []
    for name, values in whole.items():
        for dim in (None, *range(values.dim())):
            shape, start = list(values.shape), 0
            if dim is not None:
                start = rng.randrange(shape[dim])
                shape[dim] = rng.randint(0, shape[dim] - start)
                wanted.append(values.narrow(dim, start, shape[dim]))
            else:
                wanted.append(values)
            pieces.append(Piece(name, torch.full(shape, -7.0, device=device), dim, start))
    with checkpoint.bring(pieces) as sizes:
        read = list(sizes)
    for piece, want, size in zip(pieces, wanted, read, strict=True):
        assert torch.equal(piece.target.cpu(), want), piece.name
        if piece.dim is None:
            assert size == checkpoint.num_bytes(piece.name)
    with pytest.raises(InternalError, match="a piece fits"):
        checkpoint.fill(Piece("model.norm.weight", torch.empty(31)))
    with pytest.raises(InternalError, match="slice outside"):
        checkpoint.slice("model.norm.weight", 0, 30, 3)


def test_interleaved_rows_are_found() -> None:
    rows = torch.arange(24)
    assert torch.equal(interleaved(rows, 3)[stored_rows(0, 24, 8)], rows)
    assert torch.equal(interleaved(rows, 3)[stored_rows(5, 7, 8)], rows[5:12])


def test_what_the_file_holds_is_said() -> None:
    checkpoint = open_checkpoint(FILES / "llama.gguf")
    assert isinstance(checkpoint, GGUFCheckpoint)
    assert sum(checkpoint.stored_types().values()) == len(checkpoint.names())
    assert checkpoint.stored_types()["Q4_0"] >= 1
    assert "Q5_1" in checkpoint.became("bfloat16", "plain")
    assert checkpoint.became("bfloat16", "plain").endswith("became bfloat16")
    assert checkpoint.became("bfloat16", "int4").endswith("bfloat16, matrices rounded to int4")


def test_a_file_is_a_model_by_its_name_or_its_first_bytes(tmp_path: Path) -> None:
    data = (FILES / "llama.gguf").read_bytes()
    for name in ("tiny.gguf", "tiny-without-suffix", "tiny.GGUF"):
        path = tmp_path / name
        path.write_bytes(data)
        found = resolve_model(str(path))
        assert (found.path, found.name, found.revision) == (path, path.stem, None)
        assert read_config(path)["model_type"] == "llama"
    assert read_generation_config(tmp_path / "tiny.gguf") == {}


def test_the_serving_dtype_follows_the_matrices(tmp_path: Path) -> None:
    assert read_config(FILES / "llama.gguf")["torch_dtype"] == "bfloat16"
    _, path, tensors = twins(tmp_path, torch.float16)
    mixed = {n: t.float() if t.dim() == 1 else t for n, t in tensors.items()}
    path.write_bytes(gguf_file(metadata_of(tiny_config()), llama_tensors(mixed, 4, 2)))
    assert read_config(path)["torch_dtype"] == "float16"


# ---------------------------------------------------------------------- refusals


def whole_file(
    metadata: dict[str, tuple[int, object] | None] | None = None,
    tensors: dict[str, torch.Tensor | None] | None = None,
) -> bytes:
    """A tiny Llama with changes; None takes something out."""
    config = tiny_config()
    made = {name: torch.ones(shape) for name, shape in expected_tensors(read_spec(config)).items()}
    changed = {**llama_tensors(made, 4, 2), **(tensors or {})}
    kept = {name: tensor for name, tensor in changed.items() if tensor is not None}
    return gguf_file(metadata_of(config, **(metadata or {})), kept)


def read_all(path: Path) -> None:
    """What a start reads of a model."""
    read_spec(read_config(path))
    checkpoint = open_checkpoint(path)
    for name in checkpoint.names():
        checkpoint.tensor(name)
    load_chat_template(path, load_tokenizer(path))


@pytest.mark.parametrize(
    ("metadata", "match"),
    [
        ({"general.architecture": (8, "gemma4")}, r"general\.architecture is 'gemma4'; GGUF files"),
        ({"general.architecture": None}, r"general\.architecture is missing"),
        ({"general.architecture": (4, 3)}, r"general\.architecture must be a string"),
        ({"general.type": (8, "adapter")}, "general.type is 'adapter'"),
        ({"split.count": (2, 3)}, "split.count"),
        ({"llama.block_count": None}, r"llama\.block_count is missing"),
        ({"llama.block_count": (4, 1 << 31)}, r"llama\.block_count is 2147483648"),
        ({"llama.block_count": (4, 3)}, r"lacks tensor 'blk\.2\.attn_norm\.weight'"),
        ({"llama.block_count": (4, 1)}, r"holds 'blk\.1\.attn_k\.weight', .* and 6 more"),
        ({"llama.embedding_length": (4, 64)}, r"token_embd.* has shape \[261, 32\]"),
        ({"llama.embedding_length": (10, 1 << 63)}, "llama.embedding_length"),
        ({"llama.attention.head_count": (9, (4, [4, 2]))}, "head_count must be an integer"),
        ({"llama.attention.head_count": (4, 0)}, "head_count is 0"),
        ({"llama.attention.head_count_kv": (4, 3)}, "head_count_kv is 3; it must divide"),
        ({"llama.attention.key_length": (4, 9)}, r"m\.gguf: .*head_dim is 9"),
        ({"llama.attention.value_length": (4, 16)}, "value_length is not the size of a head"),
        ({"llama.rope.dimension_count": (4, 4)}, "rope.dimension_count is not the size"),
        ({"llama.rope.freq_base": (6, float("nan"))}, "rope.freq_base is nan"),
        ({"llama.rope.scaling.type": (8, "longrope")}, "rope.scaling.type is 'longrope'"),
        ({"llama.rope.scaling.type": (8, "yarn")}, "rope.scaling.original_context_length"),
        ({"llama.rope.scaling.attn_factor": (6, 2.0)}, "rope.scaling.attn_factor is 2.0"),
        ({"llama.attention.layer_norm_rms_epsilon": (6, float("inf"))}, "rms_epsilon is inf"),
        ({"llama.attention.sliding_window": (4, 64)}, "sliding_window is 64"),
        ({"llama.expert_count": (4, 8)}, "expert_used_count is missing"),
        ({"llama.vocab_size": (4, 7)}, "vocab_size is not the 261 rows"),
        ({"llama.context_length": (4, 0)}, "context_length is 0"),
        ({"tokenizer.ggml.eos_token_id": (4, 999)}, r"eos_token_id has 999, outside 0 \.\. 260"),
        ({"tokenizer.ggml.tokens": (9, (8, ["a"] * 262))}, "tokens has 262 entries"),
        ({"general.alignment": (4, 12)}, "general.alignment is 12"),
        ({"general.alignment": (10, 1 << 62)}, "cut off"),
        ({"tokenizer.chat_template": (4, 1)}, r"tokenizer\.chat_template is no text"),
        ({"tokenizer.chat_template": (8, "{% for %}")}, "not valid Jinja"),
    ],
)
def test_metadata_that_cannot_be_are_named(
    tmp_path: Path, metadata: dict[str, tuple[int, object] | None], match: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole_file())
    read_all(path)
    path.write_bytes(whole_file(metadata))
    with pytest.raises(ConfigError, match=match) as caught:
        read_all(path)
    assert str(path) in str(caught.value)


NAN = torch.full((261, 32), float("nan"))


@pytest.mark.parametrize(
    ("tensors", "match"),
    [
        ({"token_embd.weight": None}, "'token_embd.weight' is missing"),
        ({"token_embd.weight": torch.ones(5)}, "'token_embd.weight' is missing, or no matrix"),
        ({"output_norm.weight": None}, "lacks tensor 'output_norm.weight'"),
        ({"blk.1.ffn_up.weight": torch.ones(64, 31)}, r"ffn_up.weight' has shape \[64, 31\]"),
        ({"blk.0.attn_q_norm.weight": torch.ones(8)}, "holds 'blk.0.attn_q_norm.weight'"),
        ({"blk.0.attn_q.bias": torch.ones(32)}, "lacks tensor 'blk.0.attn_k.bias'"),
        ({"output.weight": NAN}, "tensor 'output.weight' holds NaN"),
        ({"rope_freqs.weight": torch.tensor([1.0, 2.0, 4.0, 3.0])}, "not the scaling of Llama 3"),
        ({"rope_freqs.weight": torch.ones(5)}, "not the scaling of Llama 3"),
        ({"rope_freqs.weight": torch.ones(2, 2)}, "no short list"),
    ],
)
def test_tensors_that_cannot_be_are_named(
    tmp_path: Path, tensors: dict[str, torch.Tensor | None], match: str
) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(whole_file(tensors=tensors))
    with pytest.raises(ConfigError, match=match) as caught:
        read_all(path)
    assert str(path) in str(caught.value)


def info(name: str) -> Callable[[bytes, int], int]:
    """Where a field of a tensor's info is in the file, counted from behind its name."""
    return lambda data, at: data.index(text(name)) + len(text(name)) + at


TYPE, OFFSET = 4 + 2 * 8, 4 + 2 * 8 + 4  # of a matrix: dimensions, sizes, type, offset


@pytest.mark.parametrize(
    ("at", "patch", "match"),
    [
        (TYPE, b"\x10\0\0\0", "has type IQ2_XXS; readable are F32"),
        (TYPE, b"\x63\0\0\0", "has type number 99"),
        (TYPE, b"\x0c\0\0\0", "rows of 32, no multiple of the 256 of a block"),
        (OFFSET, b"\0\0\0\0\0\0\0\x80", "is cut off: tensor 'blk.0.ffn_up.weight' of type F32"),
        (OFFSET, b"\x01\0\0\0\0\0\0\0", "offset 1, no multiple of 32"),
        (OFFSET, bytes(8), "overlaps the one before it"),
        (4, b"\xff" * 8, "sizes are from 1"),
        (4, bytes(8), "sizes are from 1"),
        (4, (1 << 39).to_bytes(8, "little"), "is cut off"),
        (0, b"\x09\0\0\0", "9 dimensions"),
    ],
)
def test_tensor_infos_that_cannot_be_are_named(
    tmp_path: Path, at: int, patch: bytes, match: str
) -> None:
    data = bytearray(whole_file())
    here = info("blk.0.ffn_up.weight")(bytes(data), at)
    data[here : here + len(patch)] = patch
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match=match) as caught:
        read_all(path)
    assert str(path) in str(caught.value)


def test_a_tensor_twice_is_refused(tmp_path: Path) -> None:
    data = whole_file().replace(b"blk.1.ffn_up.weight", b"blk.0.ffn_up.weight")
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(ConfigError, match=r"tensor 'blk\.0\.ffn_up\.weight' occurs twice"):
        read_all(path)


def test_a_packed_vector_is_refused(tmp_path: Path) -> None:
    data = bytearray(whole_file())
    here = info("output_norm.weight")(bytes(data), 4 + 8)
    data[here : here + 4] = b"\x08\0\0\0"
    path = tmp_path / "m.gguf"
    path.write_bytes(bytes(data))
    with pytest.raises(ConfigError, match="packed as Q8_0, but is no matrix"):
        read_all(path)


def test_a_file_that_shrinks_after_its_header_was_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    whole = whole_file()
    path.write_bytes(whole)
    checkpoint = open_checkpoint(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match="changed while the model was loaded"):
        checkpoint.tensor(checkpoint.names()[-1])


def test_random_damage_never_escapes_as_another_error(tmp_path: Path) -> None:
    """Cut anywhere, bits turned, words of ones and zeros: served as it is, or a ConfigError."""
    seed = random.randrange(1 << 30)
    print("seed", seed)
    rng = random.Random(seed)
    path = tmp_path / "m.gguf"
    small = whole_file()
    files = [small, small, (FILES / "llama3.gguf").read_bytes()]
    refused, nameless = 0, list[str]()
    for _ in range(250):
        data = damaged(rng, bytearray(rng.choice(files)))
        path.write_bytes(data)
        try:
            read_all(path)
        except ConfigError as error:
            refused += 1
            nameless += [str(error)] * (str(path) not in str(error))
    assert not nameless
    assert 50 < refused < 250


def damaged(rng: random.Random, data: bytearray) -> bytes:
    if rng.random() < 0.3:
        return bytes(data[: rng.randrange(len(data))])
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(min(len(data), 4096))
        word = rng.choice((b"\xff" * 8, bytes(8), bytes(7) + b"\x80", bytes([rng.randrange(256)])))
        if rng.random() < 0.5:
            data[at] ^= 1 << rng.randrange(8)
        else:
            data[at : at + len(word)] = word[: len(data) - at]
    return bytes(data)
