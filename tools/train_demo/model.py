"""What is trained: Llama and Mixtral decoders in plain PyTorch, as Transformers defines them.

Letters: B sequences, T tokens, E hidden, H heads, K KV heads, D head size, X experts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

HEAD_DIM = 64


@dataclass(frozen=True)
class Shape:
    """Sizes of one model. `num_experts` 0 is a dense feed-forward."""

    hidden: int
    layers: int
    kv_heads: int
    feed_forward: int
    num_experts: int = 0
    num_active: int = 2
    vocab: int = 4096
    context: int = 2048
    theta: float = 10000.0
    eps: float = 1e-5

    @property
    def heads(self) -> int:
        return self.hidden // HEAD_DIM


SHAPES = {
    "chat": Shape(hidden=384, layers=6, kv_heads=2, feed_forward=1152),
    "draft": Shape(hidden=192, layers=2, kv_heads=1, feed_forward=384),
    "moe": Shape(hidden=192, layers=3, kv_heads=1, feed_forward=256, num_experts=4),
}


def rotary(shape: Shape, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [T, D], in the half-split order of Llama."""
    powers = torch.arange(0, HEAD_DIM, 2, dtype=torch.float64, device=device) / HEAD_DIM
    places = torch.arange(shape.context, dtype=torch.float64, device=device)
    angles = torch.outer(places, shape.theta**-powers)
    angles = torch.cat([angles, angles], -1)
    return angles.cos().float(), angles.sin().float()


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(shape.hidden, shape.heads * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(shape.hidden, shape.kv_heads * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(shape.heads * HEAD_DIM, shape.hidden, bias=False)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape

        def split(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, length, -1, HEAD_DIM).transpose(1, 2)

        share = self.shape.heads // self.shape.kv_heads
        q = rotate(split(self.q_proj(x)), cos, sin).to(x.dtype)
        k = rotate(split(self.k_proj(x)), cos, sin).to(x.dtype)
        v = split(self.v_proj(x))
        k, v = (t.repeat_interleave(share, 1) for t in (k, v))
        q, k, v = (t.to(torch.bfloat16) if x.is_cuda else t for t in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))  # type: ignore[no-any-return]


class FeedForward(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[B, T, E] -> [B, T, E]"""
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))  # type: ignore[no-any-return]


class Experts(nn.Module):
    """Every expert computes every token, and the router's choice weighs them: wasteful, simple,
    and the same function as a routed one. Also returns how unevenly the experts were used, 1 at
    best."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_active = shape.num_active
        self.gate = nn.Linear(shape.hidden, shape.num_experts, bias=False)
        self.experts = nn.ModuleList(
            FeedForward(shape.hidden, shape.feed_forward) for _ in range(shape.num_experts)
        )

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        odds = self.gate(x).float().softmax(-1)
        best, chosen = odds.topk(self.num_active, -1)
        weights = torch.zeros_like(odds).scatter(-1, chosen, best / best.sum(-1, keepdim=True))
        used = (weights > 0).float().flatten(0, -2).mean(0)
        uneven = len(self.experts) / self.num_active * (used * odds.flatten(0, -2).mean(0)).sum()
        made = torch.stack([expert(x) for expert in self.experts], -1)
        return (made * weights.to(made.dtype).unsqueeze(-2)).sum(-1), uneven


class Layer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, shape.eps)
        self.mlp = (
            Experts(shape) if shape.num_experts else FeedForward(shape.hidden, shape.feed_forward)
        )

    def forward(
        self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        made = self.mlp(self.post_attention_layernorm(x))
        added, uneven = made if isinstance(made, tuple) else (made, x.new_zeros(()))
        return x + added, uneven


class Decoder(nn.Module):
    """Token ids [B, T] -> logits [B, T, V] and the experts' unevenness summed over layers (0 for
    a dense model); the output matrix is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, shape.eps)
        for name, parameter in self.named_parameters():
            if "norm" in name:
                continue
            std = 0.02 / (2 * shape.layers) ** 0.5 if _writes_back(name) else 0.02
            nn.init.normal_(parameter, std=std)

    def forward(
        self, ids: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos[: ids.shape[1]], sin[: ids.shape[1]]
        x = self.embed_tokens(ids)
        total = torch.zeros((), device=ids.device)
        for layer in self.layers:
            x, uneven = layer(x, cos, sin)
            total = total + uneven
        return functional.linear(self.norm(x), self.embed_tokens.weight), total

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters under the names that Transformers gives them."""
        for name, parameter in self.named_parameters():
            yield "model." + _public(name), parameter.detach()

    @torch.no_grad()
    def begin_with(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Take the parameters by the names of `tensors()`. Raises KeyError for one that is
        missing."""
        for name, parameter in self.tensors():
            parameter.copy_(tensors[name])


def _writes_back(name: str) -> bool:
    return name.endswith(("o_proj.weight", "down_proj.weight"))


def _public(name: str) -> str:
    if ".experts." in name or ".mlp.gate.weight" in name:
        name = name.replace(".mlp.", ".block_sparse_moe.")
        for ours, theirs in (("gate_proj", "w1"), ("down_proj", "w2"), ("up_proj", "w3")):
            name = name.replace(ours, theirs)
    return name


def config(name: str) -> dict[str, object]:
    """The config.json of a trained model."""
    shape = SHAPES[name]
    common: dict[str, object] = {
        "architectures": ["MixtralForCausalLM" if shape.num_experts else "LlamaForCausalLM"],
        "model_type": "mixtral" if shape.num_experts else "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": shape.context,
        "hidden_act": "silu",
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "tie_word_embeddings": True,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "torch_dtype": "bfloat16",
    }
    if not shape.num_experts:
        return common | {"attention_bias": False, "mlp_bias": False}
    return common | {
        "num_local_experts": shape.num_experts,
        "num_experts_per_tok": shape.num_active,
        "sliding_window": None,
    }
