"""How does one layer of the real decoder run over whole windows in float32, while what goes into
its products is watched and its matrices are changed? And where are the states between two layers?

Letters: N windows, B of a part, S tokens of a window, T = B * S, I inputs, O outputs, E hidden, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch.nn import functional

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.parts import Part, branches, layer_tensors, tensor_name
from ridgeline.architectures.spec import DenseSpec, ModelSpec
from ridgeline.attention import choose_backend
from ridgeline.attention.layout import AttentionLayout, ForwardBatch
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError
from ridgeline.kernels.small_linear import Unfused
from ridgeline.kvcache import KVCache, LayerKV
from ridgeline.layers.attention import AttentionStep
from ridgeline.layers.decoder import LayerMaker
from ridgeline.layers.hidden import Hidden
from ridgeline.layers.piece import TensorSource, fill
from ridgeline.layers.rope import Rotation
from ridgeline.layers.steps import attention_steps
from ridgeline.quantization import Parameters
from ridgeline.quantization.contract import MatrixShare
from ridgeline.quantization.plain import PlainWeights

BLOCK_SIZE = 16
PART_TOKENS = 4096  # computed at once
Names = tuple[str, ...]  # of the matrices of one product
InputHook = Callable[
    [Names, torch.Tensor], None
]  # the product, and the rows [T, I] that it multiplies
Move = Callable[[Hidden, AttentionStep, LayerKV], None]


class WatchedWeights(Unfused, PlainWeights):
    """Weights as numbers, whose products show `hook` what they multiply."""

    hook: InputHook | None = None

    def of(self, shares: Sequence[MatrixShare], dtype: torch.dtype) -> _WatchedProduct:
        return _WatchedProduct(self, tuple(share.name for share in shares))


class _WatchedProduct(Unfused, PlainWeights):
    cuts_columns = False

    def __init__(self, weights: WatchedWeights, names: Names) -> None:
        self._weights, self._names = weights, names

    def linear(
        self, x_TI: torch.Tensor, parameters: Parameters, bias_O: torch.Tensor | None
    ) -> torch.Tensor:
        if self._weights.hook is not None:
            self._weights.hook(self._names, x_TI)
        return functional.linear(x_TI, parameters["weight"], bias_O)

    def stacked(self, parameters: Parameters, bias_XN: torch.Tensor | None) -> None:
        """Each expert shows its own rows."""


@dataclass(frozen=True, slots=True)
class Input:
    """What the matrices `names` of a product multiply alike. `made_by`: the norm, or the matrix
    whose rows, a scale of this input can be divided from; None: there is no such parameter."""

    product: str
    names: Names
    made_by: str | None

    @property
    def is_of_attention(self) -> bool:
        return self.product in ("qkv", "attention_out")


class Layer:
    """Layer `index` of a model, alone in memory. `tensors` are its parameters by checkpoint name:
    what is written to them is what the layer computes with."""

    def __init__(
        self,
        source: TensorSource,
        spec: ModelSpec,
        index: int,
        *,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self.spec, self.index, self.device = spec, index, device
        self.parts: Mapping[str, Part] = layer_tensors(spec, index)
        self._alone = replace(spec, layers=(spec.layers[index],))
        attention = spec.layers[index].attention
        if attention.cache_layer is not None:
            raise ConfigError(
                f"layer {index} reads the keys and values of layer {attention.cache_layer}, and"
                " layers are quantized one by one; serve the model with a weight_format instead"
            )
        # Float32 on every device, and no step is captured here.
        backend = "reference" if attention.scores_cap is not None else "sdpa"
        backend = backend if attention.latent is None else "auto"
        self._backend = choose_backend(backend, self._alone, torch.float32, device)
        self._weights = WatchedWeights()
        maker = LayerMaker(spec, self._weights, self._backend, torch.float32, device, Placement())
        self._layer = maker.layer(index)
        self._rotation = Rotation(attention.rope, attention.rotated_dim, max_tokens, device)
        self._steps: dict[tuple[int, int], tuple[AttentionStep, LayerKV]] = {}
        self.tensors: dict[str, torch.Tensor] = {}
        for part in self._layer.parts():
            for piece in part.pieces():
                fill(piece, source)
                self.tensors[piece.name] = piece.target
            part.finish()

    def offset_of(self, name: str) -> float:
        """What the layer computes with is this more than what the checkpoint stores."""
        return self.spec.norm_offset if self.parts[name].role.endswith("_norm") else 0.0

    @property
    def matrices(self) -> list[str]:
        """The names of those that are quantized."""
        return [name for name, part in self.parts.items() if part.is_packed]

    @property
    def inputs(self) -> list[Input]:
        """In the order in which they arise."""
        found: list[Input] = []
        for linear in (*self._layer.attention.linears, *self._layer.feed_forward.linears):
            names = tuple(part.weight for part in linear.parts)
            if self.parts[names[0]].is_packed:
                product = self.parts[names[0]].product
                before = found[-1].names if found else ()
                found.append(Input(product, names, self._maker_of(product, before)))
        return found

    def _maker_of(self, product: str, before: Names) -> str | None:
        """`before`: the matrices of the product before this one."""
        if product in ("experts_gate_up", "shared_gate_up"):
            return None  # all experts and their router share one norm
        if product in ("qkv", "gate_up"):
            layer = self.spec.layers[self.index]
            if layer.parallel_norms == 1:
                return None  # both products share it
            around = branches(layer)
            norm = around[product == "gate_up"].norm_in
            return None if norm is None else self.name(norm)
        inner = self.spec.layers[self.index].feed_forward
        if product == "down" and isinstance(inner, DenseSpec) and not inner.gated:
            return None  # what the activation made
        if product == "experts_down" and inner.activation == "clamped":
            return None  # no scale passes it
        latent = self.spec.layers[self.index].attention.latent
        if latent is not None and product in ("latent_down", "q_up", "attention_out"):
            if latent.q_lora_rank is None or product == "attention_out":
                return None  # products share a norm, or values are made of unpacked weights
            return self.name("q_a_norm" if product == "q_up" else "input_norm")
        role = "v" if product == "attention_out" else "up"
        return next(name for name in before if self.parts[name].role in (role, f"shared_{role}"))

    @property
    def is_parallel(self) -> bool:
        return self.spec.layers[self.index].parallel_norms > 0

    def name(self, role: str) -> str:
        """The checkpoint's name of a parameter that is no expert's."""
        return tensor_name(self.spec.tensor_names, role, self.index)

    def bias_of(self, parameter: str) -> str | None:
        """The name of the bias of a matrix or norm."""
        role = f"{self.parts[parameter].role}_bias"
        return self.name(role) if any(part.role == role for part in self.parts.values()) else None

    # -- running it

    def __call__(self, hidden_BSE: torch.Tensor, hook: InputHook | None = None) -> torch.Tensor:
        """The states behind the layer, [B, S, E]."""
        return self._run(hidden_BSE, self._layer, hook)

    def attend(self, hidden_BSE: torch.Tensor, hook: InputHook | None = None) -> torch.Tensor:
        """The states with attention added."""
        return self._run(hidden_BSE, self._layer.attend, hook)

    def feed(self, hidden_BSE: torch.Tensor, hook: InputHook | None = None) -> torch.Tensor:
        """The states with the feed-forward added."""
        return self._run(hidden_BSE, lambda hidden, step, kv: self._layer.feed(hidden), hook)

    def _run(self, hidden_BSE: torch.Tensor, move: Move, hook: InputHook | None) -> torch.Tensor:
        windows, tokens, width = hidden_BSE.shape
        if (windows, tokens) not in self._steps:
            self._steps[windows, tokens] = self._step(windows, tokens)
        hidden = Hidden(hidden_BSE.reshape(-1, width).clone())
        self._weights.hook = hook
        move(hidden, *self._steps[windows, tokens])
        self._weights.hook = None
        return hidden.whole().view_as(hidden_BSE)

    def _step(self, windows: int, tokens: int) -> tuple[AttentionStep, LayerKV]:
        """A step in which each window is a prompt, and the cache that it fills."""
        each = -(-tokens // BLOCK_SIZE)
        num_blocks = windows * each
        at_BS = torch.arange(num_blocks * BLOCK_SIZE).view(windows, -1)[:, :tokens] + BLOCK_SIZE
        table_BM = torch.arange(1, num_blocks + 1, dtype=torch.int32).view(windows, each)
        layout = AttentionLayout(
            [tokens] * windows,
            [tokens] * windows,
            [tokens * window for window in range(windows + 1)],
            (table_BM.to(self.device),),
            (at_BS.flatten().to(self.device),),
            BLOCK_SIZE,
        )
        positions_T = torch.arange(tokens, device=self.device).repeat(windows)
        groups = kv_groups(self._alone)
        kv = KVCache(self._alone, groups, num_blocks, BLOCK_SIZE, torch.float32, self.device)
        batch = ForwardBatch(positions_T, positions_T, layout)  # tokens are looked up by nobody
        steps = attention_steps(batch, kv, self._backend, torch.float32, [self._rotation], [0])
        (step,) = steps.values()
        return step, kv.layers[0]


# ------------------------------------------------------------------------ states between layers


class States:
    """[N, S, E] float32, changed in place. `file`: kept there, which must not exist; whoever made
    it removes it."""

    def __init__(self, windows: int, tokens: int, width: int, file: Path | None = None) -> None:
        size = windows * tokens * width
        if file is None:
            flat = torch.empty(size)
        else:
            flat = torch.from_file(str(file), shared=True, size=size, dtype=torch.float32)
        self.all_NSE = flat.view(windows, tokens, width)

    @property
    def num_bytes(self) -> int:
        return self.all_NSE.numel() * 4

    def parts(self) -> Iterator[torch.Tensor]:
        """Views [B, S, E] that together are all."""
        step = max(1, PART_TOKENS // max(1, self.all_NSE.shape[1]))
        for begin in range(0, self.all_NSE.shape[0], step):
            yield self.all_NSE[begin : begin + step]

    def advance(self, change: Callable[[torch.Tensor], torch.Tensor], device: torch.device) -> None:
        """Each part becomes what `change` makes of it on the device."""
        for part_BSE in self.parts():
            part_BSE.copy_(change(part_BSE.to(device)))


def embed(
    states: States, windows_NS: torch.Tensor, embedding_VE: torch.Tensor, scale: float
) -> None:
    """Fill the states with rows of the embedding, of any float dtype, times `scale`."""
    done = 0
    for part_BSE in states.parts():
        ids_BS = windows_NS[done : done + len(part_BSE)]
        part_BSE.copy_(rows_of(embedding_VE, ids_BS).mul_(scale))
        done += len(part_BSE)


def rows_of(embedding_VE: torch.Tensor, ids_BS: torch.Tensor) -> torch.Tensor:
    """[B, S, E] float32, of which only those rows are read."""
    return embedding_VE.index_select(0, ids_BS.flatten()).float().view(*ids_BS.shape, -1)


def cut(token_ids: Sequence[int], *, length: int, first: int | None, most: int) -> torch.Tensor:
    """Windows of `length` tokens, [N, length], each after the token `first` if there is one; what
    is left over at the end is dropped, and so is all that exceeds `most` windows."""
    body = length - (first is not None)
    starts = range(0, len(token_ids) - body + 1, body)
    head = [] if first is None else [first]
    rows = [[*head, *token_ids[start : start + body]] for start in starts[:most]]
    return torch.tensor(rows, dtype=torch.int64).view(len(rows), length)
