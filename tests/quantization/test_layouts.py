"""What is packed by the public definition of a layout is read as the same numbers, bit for bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from ridgeline.architectures.quantization_scheme import (
    CHECKPOINT_FORMATS,
    Scheme,
    format_of,
    tensors_of,
)
from ridgeline.errors import ConfigError
from ridgeline.kernels.quantized_matrix import QuantizedMatrix
from ridgeline.quantization.checkpoint_weights import DTYPES
from ridgeline.quantization.readers import Ordered, read_matrix
from ridgeline.registry import opened
from tests.quantization.stored_cases import (
    Case,
    awq,
    gptq,
    int_quantized,
    make_case,
    pack_quantized,
)

DTYPE_WORDS = {dtype: name for name, dtype in DTYPES.items()}


def read(scheme: Scheme, tensors: dict[str, torch.Tensor], case: Case) -> torch.Tensor:
    """The numbers, after a comparison of the tensors with what the description says of them."""
    outputs, inputs = case.codes.shape
    for raw in tensors_of(scheme):
        if raw.is_optional and raw.suffix not in tensors:
            continue
        assert tuple(tensors[raw.suffix].shape) == raw.shape(outputs, inputs), raw.suffix
        assert DTYPE_WORDS[tensors[raw.suffix].dtype] in raw.dtypes, raw.suffix
    found = read_matrix(scheme, tensors, outputs, inputs)
    matrix = found.matrix if isinstance(found, Ordered) else found
    if isinstance(matrix, QuantizedMatrix):
        assert matrix.bits == scheme.kept_bits
        order = inputs * 4 if scheme.act_order else 0
        assert matrix.nbytes - matrix.codes.nbytes + order == scheme.beside_bytes(outputs, inputs)
    return found.dequantize()


def test_every_line_names_functions_and_every_layout_has_one_line() -> None:
    for line in CHECKPOINT_FORMATS.values():
        for where in (line.config, line.tensors, line.matrix):
            assert callable(opened(where)), where
        for layout in line.layouts:
            assert format_of(Scheme(layout, 4)) is line


@pytest.mark.parametrize("group", [16, 0])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("bits", range(2, 9))
def test_pack_quantized(bits: int, symmetric: bool, group: int) -> None:
    case = make_case(bits, group=group, symmetric=symmetric, dtype=torch.bfloat16)
    scheme = Scheme("pack-quantized", bits, group, not symmetric)
    tensors = pack_quantized(case, symmetric=symmetric)
    assert torch.equal(read(scheme, tensors, case), case.weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_int_quantized(symmetric: bool) -> None:
    case = make_case(8, group=0, symmetric=symmetric, dtype=torch.float32)
    scheme = Scheme("int-quantized", 8, 0, not symmetric, "float32")
    tensors = int_quantized(case, symmetric=symmetric)
    assert torch.equal(read(scheme, tensors, case), case.weight)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("group", [16, 0])
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq(bits: int, group: int, shuffled: bool, version: int) -> None:
    case = make_case(bits, group=group, shuffled=shuffled and group > 0)
    if version == 1:  # a zero of 0 has no place in it
        case = replace(case, zero=case.zero.clamp(min=1))
    name = "gptq" if version == 1 else "gptq_v2"
    scheme = Scheme(name, bits, group, True, "float16", act_order=shuffled and group > 0)
    assert torch.equal(read(scheme, gptq(case, version=version), case), case.weight)


def test_a_zero_of_0_that_was_made_version_1_by_words_comes_back() -> None:
    """gptqmodel takes 1 from each code of whole words: a 0 borrows from its neighbour."""
    case = make_case(4)
    tensors = gptq(case, version=2)
    assert bool((case.zero == 0).any())
    tensors["qzeros"] = tensors["qzeros"] - 0x11111111
    scheme = Scheme("gptq", 4, 16, True, "float16")
    assert torch.equal(read(scheme, tensors, case), case.weight)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_symmetric_gptq_keeps_no_zeros(bits: int) -> None:
    case = make_case(bits, symmetric=True)
    scheme = Scheme("gptq", bits, 16, False, "float16")
    tensors = gptq(case, version=1)
    assert torch.equal(read(scheme, tensors, case), case.weight)
    with pytest.raises(ConfigError, match="set sym to false"):
        read(replace(scheme, layout="gptq_v2"), tensors, case)


def test_an_order_with_groups_of_other_sizes_is_refused() -> None:
    case = make_case(4, shuffled=True)
    tensors = gptq(case, version=2)
    scheme = Scheme("gptq_v2", 4, 16, True, "float16", act_order=True)
    tensors["g_idx"][0] = (tensors["g_idx"][0] + 1) % 4
    with pytest.raises(ConfigError, match="does not give 16 columns to each group"):
        read(scheme, tensors, case)


@pytest.mark.parametrize("group", [16, 0])
def test_awq(group: int) -> None:
    case = make_case(4, group=group)
    scheme = Scheme("awq", 4, group, True, "float16")
    assert torch.equal(read(scheme, awq(case), case), case.weight)


@pytest.mark.parametrize("is_whole", [True, False])
def test_rows_of_e4m3(is_whole: bool) -> None:
    noise = torch.Generator().manual_seed(3)
    codes = torch.randn(32, 64, generator=noise).to(torch.float8_e4m3fn)
    scale = torch.rand(1 if is_whole else 32, generator=noise).to(torch.bfloat16)
    scheme = Scheme("float-quantized", 8, is_whole=is_whole, keeps="e4m3")
    tensors = {"weight": codes, "weight_scale": scale if is_whole else scale[:, None]}
    found = read(scheme, tensors, make_case(8))
    assert torch.equal(found, codes.float() * scale.float()[:, None])


def test_one_scale_without_dimensions() -> None:
    """As AutoFP8 writes it."""
    noise = torch.Generator().manual_seed(7)
    codes = torch.randn(32, 64, generator=noise).to(torch.float8_e4m3fn)
    scheme = Scheme("fp8-whole", 8, scale_dtype="float32", is_whole=True, keeps="e4m3")
    found = read(scheme, {"weight": codes, "weight_scale": torch.tensor(0.37)}, make_case(8))
    assert torch.equal(found, codes.float() * torch.tensor(0.37))


@pytest.mark.parametrize("layout", ["fp8", "float-quantized"])
def test_blocks_of_e4m3_end_where_the_matrix_does(layout: str) -> None:
    noise = torch.Generator().manual_seed(4)
    codes = torch.randn(32, 64, generator=noise).to(torch.float8_e4m3fn)
    scale = torch.rand(2, 3, generator=noise)
    scheme = Scheme(layout, 8, 24, scale_dtype="float32", block_rows=20, keeps="")
    name = "weight_scale_inv" if layout == "fp8" else "weight_scale"
    found = read(scheme, {"weight": codes, name: scale}, make_case(8))
    for row in (0, 19, 20, 31):
        for column in (0, 23, 24, 47, 48, 63):
            wanted = codes[row, column].float() * scale[row // 20, column // 24]
            assert found[row, column] == wanted


def test_groups_of_e4m3() -> None:
    noise = torch.Generator().manual_seed(6)
    codes = torch.randn(32, 64, generator=noise).to(torch.float8_e4m3fn)
    scale = torch.rand(32, 4, generator=noise).to(torch.bfloat16)
    scheme = Scheme("float-quantized", 8, 16, keeps="")
    found = read(scheme, {"weight": codes, "weight_scale": scale}, make_case(8))
    assert torch.equal(found, codes.float() * scale.float().repeat_interleave(16, 1))


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (b'{"blocksize": 32, "shape": [32, 64]}', "says blocks of 32"),
        (b'{"blocksize": 64, "shape": [64, 32]}', r"shape \[64, 32\]"),
        (b'{"blocksize": 64, "shape": [32, 64]}', "no offset of factors"),
        (b"[1]", "no JSON object"),
        (b"\xff\x00", "no JSON object"),
    ],
)
def test_what_bitsandbytes_says_of_itself_is_compared(state: bytes, message: str) -> None:
    scheme = Scheme("nf4", 4, 64, scale_dtype="float32", is_nested=True, keeps="")
    tensors = {
        raw.suffix: torch.zeros(raw.shape(32, 64), dtype=DTYPES[raw.dtypes[0]])
        for raw in tensors_of(scheme)
        if not raw.is_any
    }
    tensors["weight.quant_state.bitsandbytes__nf4"] = torch.tensor(list(state), dtype=torch.uint8)
    with pytest.raises(ConfigError, match=message):
        read_matrix(scheme, tensors, 32, 64)
