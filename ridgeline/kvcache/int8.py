"""Keys and values as whole numbers of 8 bits, about half the bytes of 16: a scale for each head of
each token.

A number is off by at most half a step, and 127 steps are the largest of its head and token: by
1/250 of that, or by 1e-5 where that is more. Layout: codes [N, S, 2, K, D], scales (float16)
[N, S, 2, K]. A head with a number that is not finite has no scale either: all of it is NaN.
"""

from __future__ import annotations

import torch

from ridgeline.formats import KV_FORMATS
from ridgeline.kernels.qk_norm_rope_write import PagedKV, plain_views
from ridgeline.kvcache.contract import Store
from ridgeline.kvcache.memory import zeros

LARGEST = 127


class Int8KV:
    name = "int8"

    def __init__(self) -> None:
        self.dtype = torch.float32

    def bytes_per_token(self, num_kv_heads: int, head_dim: int, dtype_bytes: int) -> int:
        return KV_FORMATS["int8"].bytes_per_token(num_kv_heads, head_dim, dtype_bytes)

    def allocate(
        self,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> Store:
        """All stores of one object have the same serving `dtype`, which `gather` answers in."""
        self.dtype = dtype
        heads = 2 * num_kv_heads
        codes_NSC = zeros((num_blocks, block_size, heads * head_dim), torch.int8, device)
        return codes_NSC, zeros((num_blocks, block_size, heads), torch.float16, device)

    def write(self, store: Store, slots_T: torch.Tensor, kv_TC: torch.Tensor) -> None:
        codes_NSC, scales_NSH = store
        heads = scales_NSH.shape[2]
        codes_THD, scales_TH = encode(kv_TC.view(len(kv_TC), heads, -1))
        codes_NSC.view(-1, kv_TC.shape[1]).index_copy_(0, slots_T, codes_THD.flatten(1))
        scales_NSH.view(-1, heads).index_copy_(0, slots_T, scales_TH)

    def gather(
        self, store: Store, slots_n: torch.Tensor, num_kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        codes_NSC, scales_NSH = store
        codes_nC = codes_NSC.view(-1, codes_NSC.shape[2]).index_select(0, slots_n)
        scales_nH = scales_NSH.view(-1, scales_NSH.shape[2]).index_select(0, slots_n)
        codes_n2KD = codes_nC.view(-1, 2, num_kv_heads, head_dim)
        found = codes_n2KD.float() * scales_nH.float().view(-1, 2, num_kv_heads, 1)
        return found.to(self.dtype)

    def views(self, store: Store, num_kv_heads: int, head_dim: int) -> PagedKV | None:
        """Codes and scales on a CPU, whose kernels know them; none on other devices."""
        codes_NSC, scales_NSH = store
        if codes_NSC.device.type != "cpu":
            return None
        plain = plain_views(codes_NSC, num_kv_heads)
        scales_NS2K = scales_NSH.view(*scales_NSH.shape[:2], 2, num_kv_heads)
        return PagedKV(plain.k_NSKD, plain.v_NSKD, scales_NS2K[:, :, 0], scales_NS2K[:, :, 1])


def encode(x_THD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes (int8) of the shape of x, and scales (float16) [T, H]."""
    x_THD = x_THD.float()
    scales_TH = (x_THD.abs().amax(-1) / LARGEST).half()
    scales_TH = scales_TH.where(scales_TH.isfinite(), torch.nan)
    steps_THD = scales_TH.float().unsqueeze(-1)
    codes_THD = (x_THD / steps_THD).where(steps_THD > 0, 0.0).round().clamp(-LARGEST, LARGEST)
    return codes_THD.to(torch.int8), scales_TH
