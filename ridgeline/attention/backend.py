"""What must an attention backend be able to do?

Letters: T packed tokens of the step, H query heads, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.layout import AttentionLayout
from ridgeline.kvcache import LayerKV


@dataclass(frozen=True, slots=True)
class Supports:
    """What a backend can serve, as data. `max_head_dim` None: any."""

    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    windows: bool = True

    def why_not(self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device) -> str | None:
        """The first reason against it, None when it can."""
        if device.type not in self.device_types:
            return f"runs on {', '.join(self.device_types)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"does not serve {dtype}"
        if self.max_head_dim is not None and spec.head_dim > self.max_head_dim:
            return f"serves head sizes up to {self.max_head_dim}, not {spec.head_dim}"
        if spec.window is not None and not self.windows:
            return "does not serve sliding windows"
        return None


class AttentionBackend(Protocol):
    """`plan` is the host's work, once a step for each KV group; `attend` runs once a layer and
    reads only the plan. What the layers wrote for this step is already in the cache."""

    name: str
    supports: Supports

    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> Any:
        """What `attend` needs to know about the layers of KV group `group`."""
        ...

    def attend(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: Any, spec: AttentionSpec
    ) -> torch.Tensor:
        """Causal attention of every packed token over its request, [T, H, D] in the dtype of q.

        q may have any strides but contiguous rows of D. `spec` has this rank's numbers of heads.
        """
        ...


def softmax_scale(spec: AttentionSpec) -> float:
    """What scores are multiplied by."""
    return spec.head_dim**-0.5 if spec.scale is None else spec.scale
