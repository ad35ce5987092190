"""Embedding and output matrix in fewer bits: one copy for both, and as many bytes as counted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from ridgeline.architectures import read_spec
from ridgeline.architectures.counts import weight_bytes
from ridgeline.cost.memory_items import weight_items
from ridgeline.cost.setup import Layout, Precision
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError
from ridgeline.formats import WEIGHT_FORMATS, WeightFormatLine, served
from ridgeline.kernels.cpu import native
from ridgeline.layers.decoder import Decoder
from ridgeline.quantization import open_vocabulary_format, weight_layouts
from tests.distributed.alone import Alone
from tests.layers.driving import build_decoder
from tests.tiny_model import tiny_config

FORMATS = tuple(served(WEIGHT_FORMATS))
SIZES = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest) -> Iterator[str]:
    if native.library() is None and request.param == "native":
        pytest.skip("no native CPU kernels here")
    is_torch = request.param == "torch" and native.library() is not None
    with native.at_level("none") if is_torch else nullcontext():
        yield request.param


def decoder_of(
    weight_format: str,
    *,
    dtype: torch.dtype = torch.bfloat16,
    placement: Placement | None = None,
    **changes: Any,
) -> Decoder:
    decoder = build_decoder(
        read_spec(tiny_config(**SIZES | changes)),
        max_model_len=64,
        device="cpu",
        dtype=dtype,
        weight_format=weight_format,
        placement=placement,
    )
    decoder.randomize(3)
    return decoder


@pytest.mark.every_pair
@pytest.mark.parametrize("is_tied", [True, False])
@pytest.mark.parametrize("vocab_size", [256, 261])
@pytest.mark.parametrize("weight_format", FORMATS)
def test_bytes_are_those_of_the_contract(
    kernels: str, weight_format: str, vocab_size: int, is_tied: bool
) -> None:
    changes: dict[str, Any] = {"vocab_size": vocab_size, "tie_word_embeddings": is_tied}
    whole = decoder_of(weight_format, **changes)
    assert whole.num_bytes == weight_bytes(whole.spec, 2, weight_format)
    short = decoder_of(weight_format, **changes, hidden_size=288, intermediate_size=200)
    assert short.num_bytes == weight_bytes(short.spec, 2, weight_format)  # groups of 32 and of 72
    share = decoder_of(weight_format, placement=Placement(1, 2, Alone()), **changes)
    items = weight_items(share.spec, Layout(2), Precision(weights=weight_format))
    assert share.num_bytes == sum(item.bytes for item in items)


@pytest.mark.parametrize("vocab_size", [256, 261])
@pytest.mark.parametrize("weight_format", ["plain", "int8", "int4"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_look_ups_and_logits_are_of_one_matrix(
    kernels: str, weight_format: str, vocab_size: int, dtype: torch.dtype
) -> None:
    decoder = decoder_of(
        weight_format, dtype=dtype, vocab_size=vocab_size, tie_word_embeddings=True
    )
    matrix = decoder.embedding
    rows = matrix.format.dequantize(matrix.parameters)
    assert decoder.lm_head is matrix
    assert not rows[vocab_size:].any()
    token_ids = torch.tensor([0, vocab_size - 1, 7, 7])
    assert torch.equal(matrix.embed(token_ids), rows[token_ids].to(dtype))
    hidden = torch.randn(5, 256, generator=torch.Generator().manual_seed(4)).to(dtype)
    logits = matrix.logits(hidden)
    assert (logits.shape, logits.dtype) == ((5, vocab_size), torch.float32)
    exact = hidden.double() @ rows[:vocab_size].double().T
    error = (logits.double() - exact).square().mean() / exact.square().mean()
    assert error < 0.012**2
    into = torch.empty(5, vocab_size)
    normed = decoder.norm(hidden)
    assert matrix.logits_into(decoder.norm(hidden), into) is into
    assert torch.equal(into, matrix.logits(normed))


@pytest.mark.parametrize("weight_format", ["int8", "int4"])
def test_a_rank_gives_its_part_of_the_logits(kernels: str, weight_format: str) -> None:
    """Of 261 tokens the first rank has 131, and 13 rows of zeros that nobody sees."""
    share = decoder_of(weight_format, placement=Placement(0, 2, Alone()), vocab_size=261)
    whole = decoder_of(weight_format, vocab_size=261)
    hidden = torch.randn(3, 256, generator=torch.Generator().manual_seed(4)).bfloat16()
    logits = share.lm_head.logits(hidden)
    assert logits.shape == (3, 261)
    torch.testing.assert_close(logits[:, :131], whole.lm_head.logits(hidden)[:, :131])
    assert not logits[:, 131:].any()
    found = share.embedding.embed(torch.tensor([130, 131, 260]))
    assert torch.equal(found[0], whole.embedding.embed(torch.tensor([130]))[0])
    assert not found[1:].any()


def test_without_panels_few_numbers_are_unpacked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = open_vocabulary_format("int4")
    with native.at_level("none") if native.library() is not None else nullcontext():
        weight = torch.randn(50, 16, generator=torch.Generator().manual_seed(5))
        kept = vocabulary.finish({"weight": weight})
        x = torch.randn(3, 16, generator=torch.Generator().manual_seed(6))
        whole, parts = torch.empty(3, 47), torch.empty(3, 47)
        vocabulary.linear_into(x, kept, whole)
        monkeypatch.setattr(weight_layouts, "UNPACKED_NUMBERS", 7 * 16)
        vocabulary.linear_into(x, kept, parts)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(whole, (x @ vocabulary.dequantize(kept).T)[:, :47])


@pytest.mark.parametrize("weight_format", FORMATS)
def test_every_format_has_a_vocabulary_to_look_into(weight_format: str) -> None:
    line = WEIGHT_FORMATS[weight_format]
    for is_deterministic in (False, True):
        found = open_vocabulary_format(weight_format, deterministic=is_deterministic)
        assert found.serves_vocabulary
        assert found.name == line.vocabulary


def test_a_vocabulary_without_look_ups_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    line = WeightFormatLine("ridgeline.quantization.integers:int8", bits=8, vocabulary="fp8")
    monkeypatch.setitem(WEIGHT_FORMATS, "odd", line)
    with pytest.raises(ConfigError, match="weight format odd: its vocabulary is to be fp8"):
        open_vocabulary_format("odd")
