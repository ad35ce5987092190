"""What do the tensors of a stored matrix say? One file for each layout: they become codes and
scales in the form of `quantization.matrix`, or numbers, exactly.

Which tensors there are is told by `architectures.stored`; a reader gets those of some rows or
columns of a matrix under their suffixes. Letters: O outputs, I inputs, G groups of a row.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from ridgeline.architectures.stored import Stored
from ridgeline.quantization.layouts.forms import Read
from ridgeline.registry import load

Tensors = Mapping[str, torch.Tensor]
Reader = Callable[[Stored, Tensors, int, int], Read]

READERS: dict[str, str] = {
    "pack-quantized": "ridgeline.quantization.layouts.compressed_tensors:packed",
    "int-quantized": "ridgeline.quantization.layouts.compressed_tensors:integers",
    "float-quantized": "ridgeline.quantization.layouts.fp8:compressed_tensors",
    "gptq": "ridgeline.quantization.layouts.gptq:read",
    "gptq_v2": "ridgeline.quantization.layouts.gptq:read",
    "awq": "ridgeline.quantization.layouts.awq:read",
    "fp8": "ridgeline.quantization.layouts.fp8:fine_grained",
    "fp8-whole": "ridgeline.quantization.layouts.fp8:compressed_tensors",
    "nf4": "ridgeline.quantization.layouts.bitsandbytes:four_bits",
    "fp4": "ridgeline.quantization.layouts.bitsandbytes:four_bits",
    "llm-int8": "ridgeline.quantization.layouts.bitsandbytes:eight_bits",
    "Q8_0": "ridgeline.quantization.layouts.gguf:read",
    "Q4_0": "ridgeline.quantization.layouts.gguf:read",
    "Q5_0": "ridgeline.quantization.layouts.gguf:read",
    "Q3_K": "ridgeline.quantization.layouts.gguf:read",
    "Q6_K": "ridgeline.quantization.layouts.gguf:read",
}


def read_matrix(stored: Stored, tensors: Tensors, outputs: int, inputs: int) -> Read:
    """The matrix, or its share that `tensors` hold. ConfigError if they contradict each other."""
    reader: Reader = load(READERS, stored.layout, "layout of stored matrices")
    return reader(stored, tensors, outputs, inputs)
