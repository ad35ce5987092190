"""What do the tensors of a matrix in a quantized checkpoint say? Codes and scales in the form of
`kernels.quantized_matrix`, or numbers, exactly.

`architectures.quantization_scheme` has the table of formats and says which tensors there are; a
reader gets those of some rows or columns of a matrix under their suffixes. Blocks of GGUF files are
in `gguf_blocks`. Letters: O outputs, I inputs, G groups of a row, R and C rows and columns of
blocks, R also rows of W words.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from ridgeline.architectures.quantization_scheme import Scheme, format_of
from ridgeline.architectures.scheme_methods import (
    AWQ_ROWS_A_WORD,
    BNB_BLOCK,
    BNB_KINDS,
    BNB_NESTED,
    BNB_STATE,
)
from ridgeline.errors import ConfigError
from ridgeline.kernels.quantized_matrix import QuantizedMatrix, join_bytes, split_bytes
from ridgeline.quantization.compressed_tensors import unpack_bits
from ridgeline.registry import opened

Tensors = Mapping[str, torch.Tensor]


@dataclass(frozen=True, slots=True, eq=False)
class Ordered:
    """Column i of `matrix` is column `order_I[i]` (int32) of what is meant."""

    matrix: QuantizedMatrix
    order_I: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        found_OI = torch.empty(self.matrix.outputs, self.matrix.inputs, device=self.order_I.device)
        return found_OI.index_copy_(1, self.order_I.long(), self.matrix.dequantize())


@dataclass(frozen=True, slots=True, eq=False)
class Rows8:
    """Numbers in e4m3, `codes_OI`, times a float32 scale for each row."""

    codes_OI: torch.Tensor
    scale_O: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.codes_OI.float().mul_(self.scale_O[:, None])


@dataclass(frozen=True, slots=True, eq=False)
class Blocks8:
    """Numbers in e4m3 times a scale for each block of `rows` x `columns`, the last of which may be
    smaller."""

    codes_OI: torch.Tensor
    scale_RC: torch.Tensor
    rows: int
    columns: int

    def dequantize(self) -> torch.Tensor:
        outputs, inputs = self.codes_OI.shape
        scale_OC = self.scale_RC.float().repeat_interleave(self.rows, 0)[:outputs]
        scale_OI = scale_OC.repeat_interleave(self.columns, 1)[:, :inputs]
        return self.codes_OI.float().mul_(scale_OI)


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """What no format of ours keeps, [O, I] float32."""

    values_OI: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        return self.values_OI


Read = QuantizedMatrix | Ordered | Rows8 | Blocks8 | Numbers


def read_matrix(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> Read:
    """The matrix, or its share that `tensors` hold. ConfigError if they contradict each other."""
    found: Read = opened(format_of(scheme).matrix)(scheme, tensors, outputs, inputs)
    return found


def widened(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """Unsigned codes (or zeros) of `bits` as those of the same weights with 4 or 8 bits: the middle
    of the range stays its middle."""
    kept = 4 if bits <= 4 else 8
    shift = (1 << (kept - 1)) - (1 << (bits - 1))
    return codes + shift if shift else codes


def ordered(matrix: QuantizedMatrix, groups_I: torch.Tensor) -> Ordered:
    """`matrix` has its codes in the order of the model and scales by number of group, `groups_I`
    says whose each column is. ConfigError if groups are not of the size that they should be."""
    order_I = torch.argsort(groups_I, stable=True)
    wanted_I = torch.arange(matrix.inputs, device=groups_I.device) // matrix.group
    if not torch.equal(groups_I.index_select(0, order_I).long(), wanted_I):
        raise ConfigError(
            f"g_idx does not give {matrix.group} columns to each group of {matrix.inputs} columns;"
            " the file is damaged, or group_size in config.json is another model's"
        )
    codes_OI = split_bytes(matrix.codes, matrix.bits, matrix.inputs).index_select(1, order_I)
    codes = join_bytes(codes_OI, matrix.bits)
    ordered = QuantizedMatrix(
        codes, matrix.scale, matrix.zero, matrix.inputs, matrix.bits, matrix.group
    )
    return Ordered(ordered, order_I.to(torch.int32))


def split_words(words_RW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """Unsigned codes one behind the other, [R, count] uint8; they may cross words."""
    if bits == 8:
        return _bytes_of(words_RW)[:, :count]
    if bits in (2, 4):
        codes = _bytes_of(words_RW)
        places = [codes >> at & ((1 << bits) - 1) for at in range(0, 8, bits)]
        return torch.stack(places, -1).flatten(1)[:, :count]
    signed = unpack_bits(words_RW, bits, count).to(torch.int16)
    return (signed + (1 << (bits - 1))).to(torch.uint8)


def _bytes_of(words_RW: torch.Tensor) -> torch.Tensor:
    """A row of one word counts as contiguous whatever its stride is, and has no view as bytes."""
    words_RW = words_RW.contiguous()
    if words_RW.stride(-1) != 1:
        words_RW = words_RW.clone(memory_format=torch.contiguous_format)
    return words_RW.view(torch.uint8)


def codes_of(words_RW: torch.Tensor, bits: int, count: int) -> torch.Tensor:
    """The same as bytes of a QuantizedMatrix; those of 4 and 8 bits are such bytes already."""
    if bits in (4, 8):
        return _bytes_of(words_RW)[:, : -(-count * bits // 8)]
    wide = widened(split_words(words_RW, bits, count), bits)
    return join_bytes(wide, 4 if bits < 4 else 8)


# ------------------------------------------------------------------------ compressed-tensors

SIGN = 0x80  # signed bytes become unsigned ones around 128


def compressed_tensors(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> Read:
    """Of formats pack-quantized, int-quantized and float-quantized."""
    reader = {"pack-quantized": _packed, "int-quantized": _integers}.get(scheme.layout, fp8)
    return reader(scheme, tensors, outputs, inputs)


def _packed(
    scheme: Scheme, tensors: Tensors, outputs: int, inputs: int
) -> QuantizedMatrix | Ordered:
    """2^(bits-1) is added to the codes in the file, so that none is negative."""
    codes = codes_of(tensors["weight_packed"], scheme.bits, inputs)
    zero_OG = None
    if scheme.has_zero:
        words_GO = tensors["weight_zero_point"].T
        zero_OG = widened(split_words(words_GO, scheme.bits, outputs), scheme.bits).T.contiguous()
    return _integer_matrix(scheme, tensors, codes, zero_OG, inputs)


def _integers(
    scheme: Scheme, tensors: Tensors, outputs: int, inputs: int
) -> QuantizedMatrix | Ordered:
    """Signed bytes, whatever their bits: they are kept as 8."""
    zero_OG = tensors["weight_zero_point"].view(torch.uint8) ^ SIGN if scheme.has_zero else None
    return _integer_matrix(
        scheme, tensors, tensors["weight"].view(torch.uint8) ^ SIGN, zero_OG, inputs
    )


def _integer_matrix(
    scheme: Scheme, tensors: Tensors, codes: torch.Tensor, zero_OG: torch.Tensor | None, inputs: int
) -> QuantizedMatrix | Ordered:
    scale_OG = tensors["weight_scale"]
    if scheme.is_whole:
        scale_OG = scale_OG.view(1, 1).expand(len(codes), 1)
    bits = 4 if codes.shape[1] < inputs else 8
    matrix = QuantizedMatrix(codes, scale_OG, zero_OG, inputs, bits, scheme.group)
    return ordered(matrix, tensors["weight_g_idx"]) if scheme.act_order else matrix


def fp8(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> Rows8 | Blocks8:
    """Numbers in e4m3 with one scale for all, for each row, or for each block or group of a row:
    those of float-quantized, and as DeepSeek, Qwen and AutoFP8 publish them."""
    codes_OI = tensors["weight"]
    scale = tensors["weight_scale_inv" if scheme.layout == "fp8" else "weight_scale"]
    if scheme.group:
        return Blocks8(codes_OI, scale, scheme.block_rows or 1, scheme.group)
    return Rows8(codes_OI, scale.float().view(-1).expand(outputs).contiguous())


# ------------------------------------------------------------------------ GPTQ
# Source: AutoGPTQ's and gptqmodel's QuantLinear. `qweight` [I * bits / 32, O] has the codes of a
# column of words below each other, `qzeros` [G, O * bits / 32] side by side. Version 1 stores zeros
# less 1; as gptqmodel does, 1 is added to whole words, so that borrows come back as they went.

GPTQ_ONES = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # 1 in each code of a word


def gptq(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> QuantizedMatrix | Ordered:
    bits = scheme.bits
    codes = codes_of(tensors["qweight"].T, bits, inputs)
    zero_OG = _gptq_zeros(scheme, tensors["qzeros"], outputs)
    middle = 1 << (bits - 1)
    if not scheme.has_zero and not bool((zero_OG == middle).all()):
        raise ConfigError(
            f"config.json says sym, but qzeros are not all {middle}; set sym to false in its"
            " quantization_config"
        )
    zero = widened(zero_OG, bits).contiguous() if scheme.has_zero else None
    kept = 4 if bits <= 4 else 8
    matrix = QuantizedMatrix(codes, tensors["scales"].T, zero, inputs, kept, scheme.group)
    return ordered(matrix, tensors["g_idx"]) if scheme.act_order else matrix


def _gptq_zeros(scheme: Scheme, words: torch.Tensor, outputs: int) -> torch.Tensor:
    """[O, G] uint8, as many bits as the codes."""
    bits, is_less = scheme.bits, scheme.layout == "gptq"
    if is_less and bits in GPTQ_ONES:
        words = words + GPTQ_ONES[bits]
    zero_GO = split_words(words, bits, outputs)
    if is_less and bits not in GPTQ_ONES:
        zero_GO = zero_GO + 1 & ((1 << bits) - 1)
    return zero_GO.T


# ------------------------------------------------------------------------ AWQ
# Source: AutoAWQ's WQLinear_GEMM: a word of `qweight` [I, O / 8] holds the codes of eight rows,
# those of rows 0, 2, 4, 6, 1, 3, 5, 7 from its lowest bits on; `qzeros` [G, O / 8] likewise.

AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of rows 0 to 7 within their word


def awq(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> QuantizedMatrix:
    codes = join_bytes(_awq_rows(tensors["qweight"], outputs), 4)
    zero = _awq_rows(tensors["qzeros"], outputs).contiguous() if scheme.has_zero else None
    return QuantizedMatrix(codes, tensors["scales"].T, zero, inputs, 4, scheme.group)


def _awq_rows(words: torch.Tensor, outputs: int) -> torch.Tensor:
    """[N, O / 8] words -> [O, N] codes."""
    codes = split_words(words, 4, outputs).view(len(words), -1, AWQ_ROWS_A_WORD)
    places = torch.tensor(AWQ_PLACES, device=words.device)
    return codes.index_select(2, places).flatten(1).T


# ------------------------------------------------------------------------ bitsandbytes
# Bit by bit as its own functions unpack them in float32. Source: bitsandbytes.functional,
# dequantize_4bit and int8_vectorwise_dequant. Letters: N weights of the matrix, B blocks of them.

OF_127 = 7.874015718698502e-3  # 1 / 127, as that package writes it


def bitsandbytes(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> Numbers:
    if scheme.layout in BNB_KINDS:
        return _bnb_four_bits(scheme, tensors, outputs, inputs)
    return Numbers(tensors["weight"].float().mul_(tensors["SCB"][:, None]).mul_(OF_127))


def _bnb_four_bits(scheme: Scheme, tensors: Tensors, outputs: int, inputs: int) -> Numbers:
    """The first weight of a byte is in its upper half."""
    state = _bnb_state(tensors[BNB_STATE + scheme.layout])
    if state.get("blocksize") != BNB_BLOCK or state.get("shape") != [outputs, inputs]:
        raise ConfigError(
            f"its quant_state says blocks of {state.get('blocksize')} and shape"
            f" {state.get('shape')}; read are blocks of {BNB_BLOCK}, and the shape of config.json"
        )
    both_N = tensors["weight"].flatten()
    places_N = torch.stack((both_N >> 4, both_N & 15), -1).flatten()
    values_N = tensors["weight.quant_map"][places_N.int()]
    factors_B = tensors["weight.absmax"]
    if scheme.is_nested:
        offset = state.get("nested_offset")
        if not isinstance(offset, float) or state.get("nested_blocksize") != BNB_NESTED:
            raise ConfigError(f"its quant_state has no offset of factors in blocks of {BNB_NESTED}")
        wide = tensors["weight.nested_absmax"].repeat_interleave(BNB_NESTED)[: len(factors_B)]
        factors_B = tensors["weight.nested_quant_map"][factors_B.int()] * wide + offset
    return Numbers((values_N.view(-1, BNB_BLOCK) * factors_B[:, None]).view(outputs, inputs))


def _bnb_state(raw: torch.Tensor) -> dict[str, object]:
    try:
        found = json.loads(bytes(raw.tolist()))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("its quant_state is no JSON object; the file is damaged")
    return found
