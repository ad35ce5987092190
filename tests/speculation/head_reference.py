"""One decoder layer in plain torch, over whole sequences, as the heads' papers define it."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch.nn import functional

Tensors = Mapping[str, torch.Tensor]


def rms(x_TE: torch.Tensor, weight_E: torch.Tensor, eps: float = 1e-5) -> torch.Tensor:
    return x_TE * torch.rsqrt(x_TE.pow(2).mean(-1, keepdim=True) + eps) * weight_E


def turned(x_THD: torch.Tensor, theta: float = 10000.0) -> torch.Tensor:
    """Positions 0 .. T - 1."""
    num, size = x_THD.shape[0], x_THD.shape[-1]
    frequencies = theta ** (-torch.arange(0, size, 2).double() / size)
    angles = torch.arange(num).double()[:, None] * frequencies
    cos, sin = angles.cos().float()[:, None], angles.sin().float()[:, None]
    first, second = x_THD.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attended(x_TI: torch.Tensor, w: Tensors, stem: str, head_dim: int) -> torch.Tensor:
    """Causal, with grouped heads, of x as it is."""

    def heads(role: str) -> torch.Tensor:
        y = x_TI @ w[f"{stem}self_attn.{role}_proj.weight"].T
        bias = w.get(f"{stem}self_attn.{role}_proj.bias")
        return (y if bias is None else y + bias).view(len(y), -1, head_dim)

    q, k, v = turned(heads("q")), turned(heads("k")), heads("v")
    share = q.shape[1] // k.shape[1]
    k, v = (one.repeat_interleave(share, 1) for one in (k, v))
    scores = torch.einsum("thd,shd->hts", q, k) / head_dim**0.5
    num = len(x_TI)
    mask = torch.ones(num, num, dtype=torch.bool).tril()
    odds = scores.masked_fill(~mask, -torch.inf).softmax(-1)
    out = torch.einsum("hts,shd->thd", odds, v).flatten(1)
    return out @ w[f"{stem}self_attn.o_proj.weight"].T


def fed_forward(x_TE: torch.Tensor, w: Tensors, stem: str) -> torch.Tensor:
    gate, up, down = (w[f"{stem}mlp.{role}_proj.weight"] for role in ("gate", "up", "down"))
    return (functional.silu(x_TE @ gate.T) * (x_TE @ up.T)) @ down.T


def layer(x_TE: torch.Tensor, w: Tensors, stem: str, head_dim: int) -> torch.Tensor:
    x_TE = x_TE + attended(rms(x_TE, w[f"{stem}input_layernorm.weight"]), w, stem, head_dim)
    return x_TE + fed_forward(rms(x_TE, w[f"{stem}post_attention_layernorm.weight"]), w, stem)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int) -> dict[str, torch.Tensor]:
    noise = torch.Generator().manual_seed(seed)
    return {
        name: 0.2 * torch.randn(shape, generator=noise) + ("norm" in name)
        for name, shape in shapes.items()
    }
