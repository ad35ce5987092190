"""How are matrices of bitsandbytes read? Bit by bit as its own functions unpack them in float32.

Source: bitsandbytes.functional, dequantize_4bit and int8_vectorwise_dequant. Letters: O outputs,
I inputs, N weights of the matrix, B blocks of them.
"""

from __future__ import annotations

import json

import torch

from ridgeline.architectures.stored import Stored
from ridgeline.architectures.stored_bitsandbytes import BLOCK, NESTED, STATE
from ridgeline.errors import ConfigError
from ridgeline.quantization.layouts.forms import Numbers

Tensors = dict[str, torch.Tensor]
OF_127 = 7.874015718698502e-3  # 1 / 127, as that package writes it


def four_bits(stored: Stored, tensors: Tensors, outputs: int, inputs: int) -> Numbers:
    """The first weight of a byte is in its upper half."""
    state = _state(tensors[STATE + stored.layout])
    if state.get("blocksize") != BLOCK or state.get("shape") != [outputs, inputs]:
        raise ConfigError(
            f"its quant_state says blocks of {state.get('blocksize')} and shape"
            f" {state.get('shape')}; read are blocks of {BLOCK}, and the shape of config.json"
        )
    both_N = tensors["weight"].flatten()
    places_N = torch.stack((both_N >> 4, both_N & 15), -1).flatten()
    values_N = tensors["weight.quant_map"][places_N.int()]
    factors_B = tensors["weight.absmax"]
    if stored.is_nested:
        offset = state.get("nested_offset")
        if not isinstance(offset, float) or state.get("nested_blocksize") != NESTED:
            raise ConfigError(f"its quant_state has no offset of factors in blocks of {NESTED}")
        wide = tensors["weight.nested_absmax"].repeat_interleave(NESTED)[: len(factors_B)]
        factors_B = tensors["weight.nested_quant_map"][factors_B.int()] * wide + offset
    return Numbers((values_N.view(-1, BLOCK) * factors_B[:, None]).view(outputs, inputs))


def _state(raw: torch.Tensor) -> dict[str, object]:
    try:
        found = json.loads(bytes(raw.tolist()))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise ConfigError("its quant_state is no JSON object; the file is damaged")
    return found


def eight_bits(stored: Stored, tensors: Tensors, outputs: int, inputs: int) -> Numbers:
    return Numbers(tensors["weight"].float().mul_(tensors["SCB"][:, None]).mul_(OF_127))
