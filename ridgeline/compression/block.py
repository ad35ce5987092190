"""What does one layer of a decoder compute, in float32, and what goes into each of its products?

The plain form of what `layers` serve: whole windows, no cache, so that single matrices can be
watched and changed. Letters: B windows, S tokens of a window, T = B * S, I inputs, O outputs, E
hidden, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch.nn import functional

from ridgeline.architectures.spec import AttentionSpec, DenseSpec, ExpertsSpec, LayerSpec
from ridgeline.kernels.qk_norm_rope_write import rotate_
from ridgeline.kernels.rms_norm import rms_norm_reference
from ridgeline.kernels.silu_mul import ACTIVATIONS
from ridgeline.layers.rope import Rotation

Watch = Callable[[str, torch.Tensor], None]  # name of an input, and its rows [T, I]
ROUTER = "router"


def no_watch(name: str, x_TI: torch.Tensor) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, slots=True)
class Input:
    """What several matrices multiply alike: `roles` are their names in a block."""

    name: str
    roles: tuple[str, ...]


def attention_inputs() -> tuple[tuple[Input, ...], ...]:
    """In the order in which they arise: of a stage, those whose values do not depend on each
    other's matrices."""
    return (Input("qkv", ("q", "k", "v")),), (Input("o", ("o",)),)


def feed_forward_inputs(spec: DenseSpec | ExpertsSpec) -> tuple[tuple[Input, ...], ...]:
    endings = [""]
    if isinstance(spec, ExpertsSpec):
        endings = [f".{expert}" for expert in range(spec.num_experts)]
    return (
        tuple(Input(f"gate_up{e}", (f"gate{e}", f"up{e}")) for e in endings),
        tuple(Input(f"down{e}", (f"down{e}",)) for e in endings),
    )


class Block:
    """One layer. `weights` are float32 by role: q, q_bias, ..., gate, or gate.3 of an expert."""

    def __init__(
        self, spec: LayerSpec, eps: float, rotation: Rotation, weights: Mapping[str, torch.Tensor]
    ) -> None:
        self.spec = spec
        self.eps = eps
        self.rotation = rotation
        self.weights = dict(weights)

    def __call__(self, hidden_BSE: torch.Tensor) -> torch.Tensor:
        """[B, S, E] -> [B, S, E]"""
        return self.feed(self.attend(hidden_BSE))

    def linear(self, role: str, x_TI: torch.Tensor) -> torch.Tensor:
        name, dot, expert = role.partition(".")
        bias_O = self.weights.get(f"{name}_bias{dot}{expert}")
        return functional.linear(x_TI, self.weights[role], bias_O)

    def attend(self, hidden_BSE: torch.Tensor, watch: Watch = no_watch) -> torch.Tensor:
        """The states with attention added."""
        windows, tokens, width = hidden_BSE.shape
        x_TE = self._norm("input_norm", hidden_BSE.reshape(-1, width))
        watch("qkv", x_TE)
        q_BHSD, k_BKSD, v_BKSD = (self._heads(role, x_TE, windows) for role in "qkv")
        spec = self.spec.attention
        mixed_BHSD = functional.scaled_dot_product_attention(
            q_BHSD,
            k_BKSD,
            v_BKSD,
            attn_mask=_mask(spec, tokens, hidden_BSE.device),
            is_causal=spec.window is None,
            scale=spec.scale,
            enable_gqa=spec.num_heads != spec.num_kv_heads,
        )
        mixed_TI = mixed_BHSD.transpose(1, 2).reshape(windows * tokens, -1)
        watch("o", mixed_TI)
        return hidden_BSE + self.linear("o", mixed_TI).view_as(hidden_BSE)

    def _heads(self, role: str, x_TE: torch.Tensor, windows: int) -> torch.Tensor:
        spec = self.spec.attention
        heads = spec.num_heads if role == "q" else spec.num_kv_heads
        y_BSHD = self.linear(role, x_TE).view(windows, -1, heads, spec.head_dim)
        if role != "v":
            if spec.qk_norm:
                y_BSHD = self._norm(f"{role}_norm", y_BSHD)
            positions = torch.arange(y_BSHD.shape[1], device=y_BSHD.device)
            rotate_(y_BSHD, *self.rotation.at(positions))
        return y_BSHD.transpose(1, 2)

    def _norm(self, role: str, x: torch.Tensor) -> torch.Tensor:
        return rms_norm_reference(x, self.weights[role], self.eps)

    def feed(self, hidden_BSE: torch.Tensor, watch: Watch = no_watch) -> torch.Tensor:
        """The states with the feed-forward added."""
        x_TE = self._norm("post_norm", hidden_BSE.reshape(-1, hidden_BSE.shape[-1]))
        spec = self.spec.feed_forward
        if isinstance(spec, DenseSpec):
            y_TE = self._gated("", spec.activation, x_TE, watch)
        else:
            y_TE = self._experts(spec, x_TE, watch)
        return hidden_BSE + y_TE.view_as(hidden_BSE)

    def _gated(
        self, ending: str, activation: str, x_TE: torch.Tensor, watch: Watch
    ) -> torch.Tensor:
        watch(f"gate_up{ending}", x_TE)
        gate_TF = ACTIVATIONS[activation](self.linear(f"gate{ending}", x_TE))
        inner_TF = gate_TF * self.linear(f"up{ending}", x_TE)
        watch(f"down{ending}", inner_TF)
        return self.linear(f"down{ending}", inner_TF)

    def _experts(self, spec: ExpertsSpec, x_TE: torch.Tensor, watch: Watch) -> torch.Tensor:
        shares_TX = torch.softmax(self.linear(ROUTER, x_TE), -1)
        shares_TA, experts_TA = shares_TX.topk(spec.num_active, -1)
        if spec.renormalize:
            shares_TA = shares_TA / shares_TA.sum(-1, keepdim=True)
        out_TE = torch.zeros_like(x_TE)
        for expert in range(spec.num_experts):
            tokens, places = torch.nonzero(experts_TA == expert, as_tuple=True)
            if len(tokens):
                y_NE = self._gated(f".{expert}", spec.activation, x_TE[tokens], watch)
                out_TE.index_add_(0, tokens, y_NE * shares_TA[tokens, places, None])
        return out_TE


def _mask(spec: AttentionSpec, tokens: int, device: torch.device) -> torch.Tensor | None:
    """[S, S], true where a query sees a key; None: all before it."""
    if spec.window is None:
        return None
    at = torch.arange(tokens, device=device)
    back_SS = at[:, None] - at
    return (back_SS >= 0) & (back_SS < spec.window)
