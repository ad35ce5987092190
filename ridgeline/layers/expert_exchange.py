"""How does all that some layers keep become one row of bytes, and layers again on another rank?

What moves is what a later start would adopt, so every weight format can be moved.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

import torch

from ridgeline.layers.linear import Linear

LENGTH_BYTES = 8  # before the description


def to_bytes(linears: Sequence[Linear]) -> torch.Tensor:
    """uint8 [B]: names, dtypes, shapes and strides, then the numbers."""
    kept = [linear.kept() for linear in linears]
    told = json.dumps([{name: _describe(t) for name, t in one.items()} for one in kept]).encode()
    head = bytearray(len(told).to_bytes(LENGTH_BYTES, "little") + told)
    tensors = [tensor for one in kept for tensor in one.values()]
    start = torch.frombuffer(head, dtype=torch.uint8).to(tensors[0].device)
    return torch.cat([start, *(_flat(tensor.contiguous()) for tensor in tensors)])


def adopt_bytes(linears: Sequence[Linear], given_B: torch.Tensor) -> None:
    """Be as the layers of which these bytes are."""
    size = int.from_bytes(bytes(given_B[:LENGTH_BYTES].tolist()), "little")
    at = LENGTH_BYTES + size
    told = json.loads(bytes(given_B[LENGTH_BYTES:at].tolist()))
    for linear, one in zip(linears, told, strict=True):
        kept: dict[str, torch.Tensor] = {}
        for name, (dtype, shape, stride) in one.items():
            kind = getattr(torch, dtype)
            tensor = torch.empty(shape, dtype=kind, device=given_B.device)
            flat_B = _flat(tensor)
            flat_B.copy_(given_B[at : at + len(flat_B)])
            at += len(flat_B)
            if stride is not None:
                ordered = torch.empty_strided(shape, stride, dtype=kind, device=given_B.device)
                tensor = ordered.copy_(tensor)
            kept[name] = tensor
        linear.adopt(kept)


def form(linears: Sequence[Linear]) -> str:
    """Layers of one form can take each other's place."""
    return repr(list(_forms(linears)))


def _forms(linears: Sequence[Linear]) -> Iterator[object]:
    for linear in linears:
        packed = linear.format.packed(linear.parameters)
        names = [(name, str(tensor.dtype)) for name, tensor in linear.kept().items()]
        layout = None if packed is None else (packed.kind, packed.group)
        yield type(linear.format).__name__, linear.format.name, names, layout


def _describe(tensor: torch.Tensor) -> tuple[str, list[int], list[int] | None]:
    stride = None if tensor.is_contiguous() else list(tensor.stride())
    return str(tensor.dtype).removeprefix("torch."), list(tensor.shape), stride


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)
