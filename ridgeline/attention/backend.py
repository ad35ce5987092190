"""What must an attention backend be able to do?

Letters: T packed tokens of the step, H query heads, D head size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from ridgeline.architectures.spec import AttentionSpec
from ridgeline.attention.layout import AttentionLayout, DecodeLayout, MixedLayout
from ridgeline.errors import InternalError
from ridgeline.kvcache import LayerKV
from ridgeline.kvcache.formats import reads_in_place

if TYPE_CHECKING:
    from ridgeline.kernels.paged_decode_cuda import Prologue


@dataclass(frozen=True, slots=True)
class Supports:
    """What a backend can serve, as data. `max_head_dim` None: any."""

    device_types: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    max_head_dim: int | None = None
    windows: bool = True
    scores_caps: bool = False  # AttentionSpec.scores_cap
    head_dims: tuple[int, ...] | None = None  # None: any up to the largest
    kv_formats: tuple[str, ...] | None = None  # None: any, through `gather`
    latent: bool = False  # it serves latent attention, and no other
    sinks: bool = False

    def why_not(
        self, spec: AttentionSpec, dtype: torch.dtype, device: torch.device, kv_format: str = "auto"
    ) -> str | None:
        """The first reason against it, None when it can."""
        if self.latent != (spec.latent is not None):
            return (
                "serves latent attention alone"
                if self.latent
                else ("does not serve latent attention")
            )
        if self.kv_formats is not None and kv_format not in self.kv_formats:
            return f"does not read KV format {kv_format}"
        in_place = self.kv_formats is not None and kv_format == "int4"
        if in_place and not reads_in_place(device, spec.head_dim):
            return f"does not read heads of {spec.head_dim} in KV format int4"
        if device.type not in self.device_types:
            return f"runs on {', '.join(self.device_types)}, not on {device.type}"
        if dtype not in self.dtypes:
            return f"does not serve {dtype}"
        if self.max_head_dim is not None and spec.head_dim > self.max_head_dim:
            return f"serves head sizes up to {self.max_head_dim}, not {spec.head_dim}"
        if self.head_dims is not None and spec.head_dim not in self.head_dims:
            sizes = ", ".join(map(str, self.head_dims))
            return f"serves head sizes {sizes}, not {spec.head_dim}"
        if spec.window is not None and not self.windows:
            return "does not serve sliding windows"
        if spec.scores_cap is not None and not self.scores_caps:
            return "does not serve soft caps of scores"
        if spec.sinks and not self.sinks:
            return "does not serve attention sinks"
        return self.lacks(device)

    def lacks(self, device: torch.device) -> str | None:
        """What it needs beside that, a package for one, and does not find on this machine."""
        return None


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """What the kernels are compiled for; `spec` has this rank's numbers of heads."""

    spec: AttentionSpec
    dtype: torch.dtype
    device: torch.device

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.spec.num_heads // self.spec.num_kv_heads


@dataclass(frozen=True, slots=True)
class Pieces:
    """Requests with several new tokens: the row of the tables, the first packed token, the new
    tokens, and with all before them, of each."""

    rows: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    num_new: npt.NDArray[np.int64]
    seq_lens: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class LatentUp:
    """What makes keys and values of a latent vector of C numbers, for each of H heads: the rows of
    `weight_HOC` are the P of its key that are not rotated, then those of its value."""

    weight_HOC: torch.Tensor
    num_plain: int

    @property
    def keys_HPC(self) -> torch.Tensor:
        return self.weight_HOC[:, : self.num_plain]

    @property
    def values_HVC(self) -> torch.Tensor:
        return self.weight_HOC[:, self.num_plain :]


class AttentionBackend(ABC):
    """`plan` is the host's work, once a step for each KV group; `attend` runs once a layer and
    reads only the plan. What the layers wrote for this step is already in the cache: where some
    request has several new tokens, what another one has cached may be written by this very step, so
    nothing of the cache may be read before that write has ended.

    A backend must have `plan`, and `attend` or `attend_latent`; what else it can do it says by the
    methods below."""

    name: str
    supports: Supports
    # Its launches for a `DecodeLayout`, or also for a `MixedLayout`, depend on their shapes alone;
    # nothing in its methods, `attend` included, may then wait for the device.
    captures_decodes = False
    captures_mixed = False

    @abstractmethod
    def plan(self, layout: AttentionLayout, group: int, window: int | None) -> Any:
        """What `attend` needs to know about the layers of KV group `group`."""

    def attend(
        self, q_THD: torch.Tensor, layer_kv: LayerKV, plan: Any, spec: AttentionSpec
    ) -> torch.Tensor:
        """Causal attention of every packed token over its request, [T, H, D] in the dtype of q.

        q may have any strides but contiguous rows of D. `spec` has this rank's numbers of heads.
        """
        raise InternalError(f"attention backend {self.name} serves latent attention alone")

    def attend_latent(
        self, q_THD: torch.Tensor, up: LatentUp, layer_kv: LayerKV, plan: Any, spec: AttentionSpec
    ) -> torch.Tensor:
        """`attend` over cached latent vectors, of which `up` makes keys and values: [T, H, V]."""
        raise InternalError(f"attention backend {self.name} does not serve latent attention")

    def attend_with_sinks(
        self,
        q_THD: torch.Tensor,
        sinks_H: torch.Tensor,
        layer_kv: LayerKV,
        plan: Any,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """`attend`, where each softmax has one more score, that of the head in `sinks_H` (float32),
        whose value is zero."""
        raise InternalError(f"attention backend {self.name} does not serve attention sinks")

    # -------------------------------------------------------------------- captured steps

    def plan_decodes(self, layout: DecodeLayout, group: int, window: int | None) -> Any:
        """`plan`, where it `captures_decodes`."""
        raise InternalError(f"attention backend {self.name} cannot be captured")

    def plan_mixed(self, layout: MixedLayout, group: int, window: int | None) -> Any:
        """`plan`, where it `captures_mixed`; so the two below."""
        raise InternalError(f"attention backend {self.name} cannot be captured")

    def work_width(self, case: AttentionCase, num_tokens: int) -> int:
        """How many records the work of a captured step of so many tokens has room for."""
        raise InternalError(f"attention backend {self.name} cannot be captured")

    def prefill_work(
        self, pieces: Pieces, num_tokens: int, window: int | None, case: AttentionCase
    ) -> npt.NDArray[np.int32]:
        """[W, RECORD]: what answers these requests in a captured step of `num_tokens`; W may be
        more than there is room for."""
        raise InternalError(f"attention backend {self.name} cannot be captured")

    def takes_whole(self, case: AttentionCase, num_tokens: int, window: int | None) -> bool:
        """It has a kernel, the faster one, for a captured step of one prompt of so many tokens with
        nothing before it, whose `MixedLayout` says `is_whole` and has no work."""
        return False

    # -------------------------------------------------------------------- more than attention

    def takes_product(
        self, layer_kv: LayerKV, plan: Any, spec: AttentionSpec, dtype: torch.dtype
    ) -> bool:
        """It has one kernel for all that follows the product of q, k and v, of this dtype, for this
        plan: `attend_product`."""
        return False

    def attend_product(
        self,
        qkv_TX: torch.Tensor,
        prologue: Prologue,
        layer_kv: LayerKV,
        plan: Any,
        spec: AttentionSpec,
    ) -> torch.Tensor:
        """What `prologue` names, the write to the cache, and `attend`: [T, H, D]."""
        raise InternalError("takes_product has not been asked")

    def attend_last(
        self, q_1HD: torch.Tensor, layer_kv: LayerKV, plan: Any, spec: AttentionSpec
    ) -> torch.Tensor | None:
        """Of the last token of a step of one request, where nobody asks for the others, [1, H, D].
        None: not with this plan."""
        return None


def softmax_scale(spec: AttentionSpec) -> float:
    """What scores are multiplied by."""
    return spec.head_dim**-0.5 if spec.scale is None else spec.scale
