"""In what shapes do keys and values lie in a paged cache, and which numbers do they stand for?

As they are (the serving dtype), as e4m3, or as whole numbers with a scale for each head of each
token: 8 bits from -127 to 127, or 4 bits from 0 to 15 that a smallest number is added to. Keys of 4
bits are turned by `hadamard` first: what is large in one place of a head is spread over all of it,
and a query that is turned too has the same products. This file is the meaning; kernels that know
the formats are tested against it. Letters: N blocks, S block size, K KV heads, D head size, n
tokens, T tokens, H heads of any kind.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import torch

LARGEST = 127  # code of 8 bits
MOST = 15  # code of 4 bits

Places = tuple[torch.Tensor, torch.Tensor]  # block and offset of each token


@dataclass(frozen=True, slots=True)
class PagedKV:
    """Keys and values of one layer as two views of any block, slot and head stride. With scales
    (float16) the numbers are codes; with lows too, two of 4 bits to a byte: number d of a head and
    number D / 2 + d in the high half. Scales and lows of a cache have the same strides."""

    k_NSKD: torch.Tensor
    v_NSKD: torch.Tensor
    k_scales_NSK: torch.Tensor | None = None
    v_scales_NSK: torch.Tensor | None = None
    k_lows_NSK: torch.Tensor | None = None
    v_lows_NSK: torch.Tensor | None = None

    @property
    def head_dim(self) -> int:
        return self.k_NSKD.shape[3] * (1 if self.k_lows_NSK is None else 2)

    @property
    def code_bits(self) -> int:
        """Of codes with scales; 0: numbers as they are."""
        if self.k_scales_NSK is None:
            return 0
        return 8 if self.k_lows_NSK is None else 4


def plain_views(store_NSC: torch.Tensor, num_kv_heads: int) -> PagedKV:
    """The views of `kvcache.formats`, where a slot is the K heads and then the V heads."""
    blocks, size, width = store_NSC.shape
    split = store_NSC.view(blocks, size, 2, num_kv_heads, width // (2 * num_kv_heads))
    return PagedKV(split[:, :, 0], split[:, :, 1])


def read_tokens(kv: PagedKV, places: Places) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [n, K, D] in float32; keys of 4 bits turned back."""
    found = []
    for codes, scales, lows in (
        (kv.k_NSKD, kv.k_scales_NSK, kv.k_lows_NSK),
        (kv.v_NSKD, kv.v_scales_NSK, kv.v_lows_NSK),
    ):
        x_nKD = indexable(codes)[places].view(codes.dtype)
        if lows is not None and scales is not None:
            found.append(decode_4(x_nKD, scales[places], lows[places]))
        elif scales is not None:
            found.append(decode_8(x_nKD, scales[places]))
        else:
            found.append(x_nKD.float())
    return (found[0] if kv.k_lows_NSK is None else hadamard(found[0])), found[1]


def write_tokens(kv: PagedKV, places: Places, k_nKD: torch.Tensor, v_nKD: torch.Tensor) -> None:
    """Float32, rounded once."""
    if kv.k_lows_NSK is not None:
        k_nKD = hadamard(k_nKD)
    for x_nKD, codes, scales, lows in (
        (k_nKD, kv.k_NSKD, kv.k_scales_NSK, kv.k_lows_NSK),
        (v_nKD, kv.v_NSKD, kv.v_scales_NSK, kv.v_lows_NSK),
    ):
        if lows is not None and scales is not None:
            codes[places], scales[places], lows[places] = encode_4(x_nKD)
        elif scales is not None:
            codes[places], scales[places] = encode_8(x_nKD)
        else:
            indexable(codes)[places] = indexable(_stored(x_nKD, codes.dtype))


def _stored(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What is too large for e4m3 becomes its largest number, not NaN."""
    largest = torch.finfo(dtype).max
    return (x.clamp(-largest, largest) if dtype.itemsize == 1 else x).to(dtype)


def indexable(codes: torch.Tensor) -> torch.Tensor:
    """Numbers of one byte as bytes: not every device has indexing for e4m3."""
    return codes.view(torch.uint8) if codes.element_size() == 1 else codes


def encode_8(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) of the shape of x, and scales (float16) [T, H]. A head with a number that is
    not finite has no scale either: all of it is NaN."""
    x_THD = x_THD.float()
    scales_TH = _finite((x_THD.abs().amax(-1) / LARGEST).half())
    steps_TH1 = scales_TH.float().unsqueeze(-1)
    codes_THD = (x_THD / steps_TH1).where(steps_TH1 > 0, 0.0).round().clamp(-LARGEST, LARGEST)
    return codes_THD.to(torch.int8), scales_TH


def decode_8(codes_THD: torch.Tensor, scales_TH: torch.Tensor) -> torch.Tensor:
    return codes_THD.float() * scales_TH.float().unsqueeze(-1)


def encode_4(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Codes (uint8) [T, H, D / 2], scales and smallest numbers (float16) [T, H]; as of 8 bits where
    a number is not finite. D is even."""
    x_THD = x_THD.float()
    low_TH, high_TH = x_THD.amin(-1), x_THD.amax(-1)
    scales_TH, lows_TH = _finite(((high_TH - low_TH) / MOST).half()), _finite(low_TH.half())
    steps_TH1, lows_TH1 = (part.float().unsqueeze(-1) for part in (scales_TH, lows_TH))
    codes_THD = ((x_THD - lows_TH1) / steps_TH1).where(steps_TH1 > 0, 0.0).round().clamp(0, MOST)
    low_THd, high_THd = codes_THD.to(torch.uint8).chunk(2, -1)
    return low_THd | high_THd << 4, scales_TH, lows_TH


def decode_4(
    codes_THd: torch.Tensor, scales_TH: torch.Tensor, lows_TH: torch.Tensor
) -> torch.Tensor:
    codes_THD = torch.cat((codes_THd & 15, codes_THd >> 4), -1).float()
    return codes_THD * scales_TH.float().unsqueeze(-1) + lows_TH.float().unsqueeze(-1)


def _finite(x: torch.Tensor) -> torch.Tensor:
    return x.where(x.isfinite(), torch.nan)


def hadamard(x: torch.Tensor) -> torch.Tensor:
    """The last dimension times Sylvester's matrix with orthonormal rows, in float32: twice is
    nothing. Of a size that is no power of two, each run of the largest one that divides it."""
    rotated: torch.Tensor = x.float() @ _sylvester(x.shape[-1], x.device)
    return rotated


@lru_cache(maxsize=8)
def _sylvester(size: int, device: torch.device) -> torch.Tensor:
    """1 where two places share an even number of bits, else -1, all over the root of a run."""
    run = size & -size
    place = torch.arange(size, device=device)
    shared = place[:, None] & place & (run - 1)
    for shift in (16, 8, 4, 2, 1):
        shared = shared ^ (shared >> shift)
    together = place[:, None] // run == place // run
    root: float = run**-0.5
    return ((1 - 2 * (shared & 1)) * together).float() * root
