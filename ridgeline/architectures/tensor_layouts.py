"""Where in the tensors of a checkpoint are the parameters of a model? Several in one tensor, rows
that are columns there, heads whose numbers are rotated in other pairs: all of it follows from the
spec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from ridgeline.architectures.parts import HEAD, expected_tensors, layer_name, layer_tensors, parts
from ridgeline.architectures.spec import AttentionSpec, ExpertsSpec, ModelSpec, TensorLayout

MXFP4_BLOCK = 32  # numbers of a row that share a scale, in 16 bytes
REORDERED = ("q", "k", "q_bias", "k_bias", "q_norm", "k_norm")


@dataclass(frozen=True, slots=True)
class Cut:
    """A parameter is rows of tensor `name`: `length` from `start` on of each of its `num_strides`
    of `stride` rows. Row i of a head is then row `order[i]` of these (`in_columns`: column i of
    each row); empty: as they are. `transposed`: what is called a row is a column of the tensor.
    `expert`: all of this within its part of a tensor of `num_experts`. `mxfp4`: it is stored as
    `blocks` and `scales`."""

    name: str
    start: int
    length: int
    stride: int
    order: tuple[int, ...] = ()
    transposed: bool = False
    in_columns: bool = False
    expert: int | None = None
    num_experts: int = 0
    mxfp4: bool = False
    num_strides: int = 1

    @property
    def blocks(self) -> str:
        return f"{self.name}_blocks"

    @property
    def scales(self) -> str:
        return f"{self.name}_scales"

    @property
    def is_all(self) -> bool:
        """The tensor holds nothing else."""
        return self.length == self.stride

    def wholes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The tensors that a parameter of this shape is cut from, and their shapes."""
        found = shape[0] // self.length * self.stride, *shape[1:]
        found = found[::-1] if self.transposed else found
        if self.expert is not None:
            found = self.num_experts, *found
        if not self.mxfp4:
            return {self.name: found}
        scales = *found[:-1], -(-found[-1] // MXFP4_BLOCK)
        return {self.blocks: (*scales, MXFP4_BLOCK // 2), self.scales: scales}

    def part(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the parameter that is cut from a tensor of this shape."""
        own = shape if self.expert is None else shape[1:]
        rows, *columns = own[::-1] if self.transposed else own
        return rows // self.stride * self.length, *columns


def cuts(spec: ModelSpec) -> dict[str, Cut]:
    """By the name of the parameter: of those that are not a tensor as they are."""
    found: dict[str, Cut] = {}
    for index in range(spec.num_layers):
        found |= layer_cuts(spec, index)
    return found


def layer_cuts(spec: ModelSpec, index: int) -> Iterator[tuple[str, Cut]]:
    """By the name of the parameter."""
    layer = spec.layers[index]
    rows = {part.role: part.shape[0] for part in parts(layer, spec.hidden_size)}
    orders = dict.fromkeys(REORDERED, head_order(layer.attention))
    done = set()
    for one in spec.tensor_layouts:
        own = {role: rows[role] // one.blocks for role in one.roles if role in rows}
        start, stride = 0, sum(own.values())
        is_transposed = one.transposed and layer.scheme_of(one.roles[0]) is None
        for role, length in own.items():
            name = one.name.format(layer=spec.first_layer + index)
            order = orders.get(role, ())
            cut = Cut(name, start, length, stride, order, is_transposed, num_strides=one.blocks)
            if len(one.roles) > 1 or is_transposed or one.experts:
                yield from _of_experts(spec, index, role, one, cut)
                done.add(role)
            start += length
    for role, order in orders.items():
        if order and role in rows and role not in done:
            name = layer_name(spec, role, index)
            by_head = layer.attention.qk_norm_kind != "rms" and role.endswith("_norm")
            if HEAD in name:
                size = layer.attention.head_dim
                for row in (name.format(head=head) for head in range(rows[role])):
                    yield row, Cut(row, 0, size, size, order)
                continue
            yield name, Cut(name, 0, rows[role], rows[role], order, in_columns=by_head)


def _of_experts(
    spec: ModelSpec, index: int, role: str, layout: TensorLayout, cut: Cut
) -> Iterator[tuple[str, Cut]]:
    """The cut of a layer's parameter, or those of all its experts."""
    inner = spec.layers[index].feed_forward
    if not layout.experts:
        yield layer_name(spec, role, index), cut
    elif isinstance(inner, ExpertsSpec):
        count = inner.num_experts
        for expert in range(count):
            own = replace(cut, expert=expert, num_experts=count, mxfp4=layout.mxfp4)
            yield layer_name(spec, role, index, expert), own


def head_order(attention: AttentionSpec) -> tuple[int, ...]:
    """The numbers of a head as kernels rotate them, number i with number i + half of the head: by
    their places in the checkpoint. Numbers that are not rotated go to the ends of both halves,
    where the angle is 0; queries and keys alike, so that scores are the same."""
    rope, size = attention.rope, attention.head_dim
    rotated = size if rope.rotary_dim is None else rope.rotary_dim
    if attention.latent is not None or (rotated == size and not rope.interleaved):
        return ()
    half, middle = rotated // 2, (rotated + size) // 2
    places = range(rotated)
    first, second = (
        (places[::2], places[1::2]) if rope.interleaved else (places[:half], places[half:])
    )
    return (*first, *range(rotated, middle), *second, *range(middle, size))


def checkpoint_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """Checkpoint tensor name -> shape, of every tensor that holds what the model needs."""
    found, own = cuts(spec), dict[str, tuple[int, ...]]()
    for name, shape in expected_tensors(spec).items():
        cut = found.get(name)
        own |= {name: shape} if cut is None else cut.wholes(shape)
    return own


def checkpoint_layer(spec: ModelSpec, index: int) -> dict[str, tuple[tuple[str, Cut | None], ...]]:
    """By the name of each tensor of a layer: the parameters that it holds, in order."""
    named = dict(layer_cuts(spec, index))
    found: dict[str, tuple[tuple[str, Cut | None], ...]] = {}
    for name in layer_tensors(spec, index):
        cut = named.get(name)
        stored = name if cut is None else cut.name
        found[stored] = (*found.get(stored, ()), (name, cut))
    return found


def checkpoint_pattern(spec: ModelSpec, role: str) -> str:
    """The name of the tensor that holds this role, with {layer} to fill in; "": there is none."""
    fused = next((one.name for one in spec.tensor_layouts if role in one.roles), None)
    return fused or spec.tensor_names.get(role, "")


def unstacked(spec: ModelSpec) -> ModelSpec:
    """The same with a tensor for each matrix of each expert, as quantized checkpoints have them."""
    kept = tuple(one for one in spec.tensor_layouts if not one.experts)
    return replace(spec, tensor_layouts=kept)


def untransposed(spec: ModelSpec) -> ModelSpec:
    """The same with every tensor as a quantized matrix is stored."""
    return replace(
        spec, tensor_layouts=tuple(replace(one, transposed=False) for one in spec.tensor_layouts)
    )
