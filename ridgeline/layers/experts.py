"""A few of many feed-forwards per token, weighted by a router, beside one that every token passes.

On a GPU the matrices of all experts are stacked and multiplied as
`kernels.grouped_experts` says, without asking which experts have tokens. On a CPU one native call
sorts the tokens by expert and multiplies (`kernels.cpu.experts`). In weight formats that have no
such products the host asks, and experts that have tokens are computed one after the other.
Letters: T tokens, E hidden, X experts, A active experts of a token, N rows of a product, L
layers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property, partial
from itertools import accumulate
from zlib import crc32

import torch

from ridgeline.architectures.spec import DenseSpec, ExpertsSpec
from ridgeline.cost.expert_placement import group_loads
from ridgeline.distributed.placement import Placement, Shard
from ridgeline.errors import InternalError
from ridgeline.kernels.cpu.experts import PackedExperts, packed_experts
from ridgeline.kernels.cpu.packed_linear import PackedMatrix
from ridgeline.kernels.grouped_experts import StackedMatrix, grouped_experts
from ridgeline.kernels.quantized_matrix import Parameters
from ridgeline.layers.expert_exchange import adopt_bytes, form, to_bytes
from ridgeline.layers.feed_forward import FeedForward
from ridgeline.layers.hidden import Hidden, RMSNorm
from ridgeline.layers.linear import Linear
from ridgeline.layers.piece import Vector
from ridgeline.layers.routing import Router, Routes

STACKED_ON = frozenset({"cuda"})  # kinds of devices


class Stack:
    """One matrix of all experts in one piece of memory: what their own layers keep are views of it.
    On devices without grouped products the layers are left alone."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._linears: list[Linear] = []
        self._kept: Parameters = {}
        self._bias_XN: torch.Tensor | None = None

    def take(self, expert: int, linear: Linear) -> None:
        """This is the next expert's, with nothing loaded."""
        if not all(t.device.type in STACKED_ON for t in linear.parameters.values()):
            return
        self._linears.append(linear)
        linear.parameters = self._views(expert, linear.parameters)
        linear.keep = partial(self._keep, expert)
        if linear.bias_O is not None:
            if self._bias_XN is None:
                self._bias_XN = linear.bias_O.new_zeros(self._num_experts, linear.outputs)
            linear.rebias(self._bias_XN[expert])

    def matrix(self) -> StackedMatrix | None:
        """What grouped products take, if the weight format has such."""
        if not self._linears:
            return None
        first = self._linears[0]
        bias_XN = None if first.added_bias_O is None else self._bias_XN
        return first.format.stacked(self._kept, bias_XN)

    def _keep(self, expert: int, parameters: Parameters) -> Parameters:
        views = self._views(expert, parameters)
        for name, tensor in parameters.items():
            if tensor.data_ptr() != views[name].data_ptr():
                views[name].copy_(tensor)
        return views

    def _views(self, expert: int, parameters: Parameters) -> Parameters:
        """This expert's part of the memory, for parameters such as these; those without numbers
        say something by their names or shapes, which is the same for all experts."""
        if parameters.keys() != self._kept.keys():
            self._kept = {
                name: tensor.new_empty(self._num_experts, *tensor.shape)
                if tensor.numel()
                else tensor
                for name, tensor in parameters.items()
            }
        kept = self._kept
        return {n: kept[n][expert] if t.numel() else t for n, t in parameters.items()}


class Experts:
    """`name(role, expert)` is the checkpoint name of a tensor of this layer. Each expert is divided
    among the ranks like a dense feed-forward, or lies whole on one of them, see `Placement.ep`:
    every rank has all tokens, and the sums of all experts meet once. In a wave each group of ranks
    has tokens of its own: those of all groups are gathered first. Shared experts that are some
    times as wide as the others are so many more of them in grouped products. `units`: what experts
    and shared ones are divided by.

    `deterministic`: what a token gets does not depend on the others. Its experts are added in the
    order of their numbers in any case; here no sum is left to a kernel that may cut it otherwise.
    """

    def __init__(
        self,
        spec: ExpertsSpec,
        hidden_size: int,
        name: Callable[..., str],
        linear: Callable[..., Linear],
        router_linear: Callable[..., Linear],
        placement: Placement,
        *,
        units: tuple[int, int] = (1, 1),
        deterministic: bool = False,
    ) -> None:
        self.spec = spec
        self.deterministic = deterministic
        dense = DenseSpec(spec.intermediate_size, spec.activation, spec.bias)
        self.placement = placement
        self.experts: list[FeedForward] = []
        self.slices = 0  # behind the others, of the shared experts
        own = placement.shard_experts(spec.num_experts)
        self.numbers = list(range(own.start, own.start + own.length))  # of those here, in order
        shares = (placement.shard_experts(spec.num_experts, g) for g in range(placement.ep))
        self.groups = [group for group, one in enumerate(shares) for _ in range(one.length)]
        divided = placement.of_experts
        linear_of = partial(linear, placement=divided)
        for expert in range(own.start, own.start + own.length):
            called = partial(name, expert=expert)
            one = FeedForward(dense, hidden_size, called, linear_of, divided, unit=units[0])
            if not self.experts:
                self.slices = _num_slices(spec, one, placement)
                number = own.length + self.slices
                self.gate_up, self.down = Stack(number), Stack(number)
            self._take(one)
        self.load_X: torch.Tensor | None = None  # int64: tokens of each expert, if they are counted
        self.shared: FeedForward | None = None
        shared = DenseSpec(spec.shared_size, spec.activation)

        def shared_name(role: str) -> str:
            return name(f"shared_{role}")

        for number in range(self.slices):
            inner = Shard(number * spec.intermediate_size, spec.intermediate_size)
            made = hidden_size, shared_name, linear, placement
            self._take(FeedForward(shared, *made, inner=inner))
        if spec.shared_size and not self.slices:  # in a wave each group sums up its own
            partial_or_own = placement.partial if placement.wave is None else placement
            partly = partial(linear, placement=partial_or_own)
            made = hidden_size, shared_name, partly, partial_or_own
            self.shared = FeedForward(shared, *made, unit=units[1])
        self.router = Router(
            spec, hidden_size, name, router_linear, deterministic=deterministic, slices=self.slices
        )

    def _take(self, one: FeedForward) -> None:
        self.gate_up.take(len(self.experts), one.gate_up)
        self.down.take(len(self.experts), one.down)
        self.experts.append(one)

    @cached_property
    def matrices(self) -> tuple[StackedMatrix, StackedMatrix] | None:
        """Of the grouped products, once all is loaded; None: there are none, or some experts are
        elsewhere."""
        if self.placement.ep > 1:
            return None
        gate_up, down = self.gate_up.matrix(), self.down.matrix()
        return None if gate_up is None or down is None else (gate_up, down)

    @cached_property
    def packed(self) -> PackedExperts | None:
        """For the native products of a CPU, once all is loaded; None: there are none, or they are
        not known to give a token the same bits in any batch."""
        if self.deterministic:
            return None
        gate_up, down = [one.gate_up for one in self.experts], [one.down for one in self.experts]
        wide, narrow = _packed(gate_up), _packed(down)
        activation, num_experts = self.spec.activation, self.spec.num_experts
        if not (wide and narrow and PackedExperts.takes(wide[0], narrow[0], activation)):
            return None
        made = wide, narrow, activation, _biases(gate_up), _biases(down)
        return PackedExperts(*made, numbers=self.numbers, num_experts=num_experts)

    @property
    def asks_host(self) -> bool:
        """Which experts have tokens, in each step."""
        return self.matrices is None and self.packed is None

    def __call__(
        self, hidden: Hidden, norm: RMSNorm | None, norm_out: RMSNorm | None = None
    ) -> None:
        """Adds what the experts make of the normed states, and its own norm of that."""
        if self.matrices is None or norm_out is not None or self.placement.for_experts.size > 1:
            hidden.add(self.of(hidden.normed(norm)), norm_out)
            return
        if norm is not None and norm.fuses and self.router.takes_norm(len(hidden.sum_TE)):
            routes, x_TE = self.router.route_normed(hidden.whole(), norm.as_input)
        else:
            x_TE = hidden.normed(norm)
            routes = self.router.route(x_TE)
        self._grouped(x_TE, routes, self.matrices, hidden.sum_TE)
        if self.shared is not None:
            hidden.add(_of_shared(self.shared, x_TE, routes))

    def of(self, x_TE: torch.Tensor) -> torch.Tensor:
        """[T, E] -> [T, E], with nothing around it."""
        if (wave := self.placement.wave) is None:
            routes = self.router.route(x_TE)
            return self.placement.all_reduce(self._partly(x_TE, routes, self.shared))
        every_TE = wave.gather(x_TE)
        routes, own = self.router.route(every_TE), wave.own
        y_TE = wave.all_reduce(self._partly(every_TE, routes))[own]
        if self.shared is None or not len(x_TE):
            return y_TE
        shared_T1 = None if routes.shared_T1 is None else routes.shared_T1[own]
        return y_TE + _of_shared(self.shared, x_TE, routes._replace(shared_T1=shared_T1))

    def _partly(
        self, x_TE: torch.Tensor, routes: Routes, beside: FeedForward | None = None
    ) -> torch.Tensor:
        """By what this rank holds. `beside`: the shared experts, for all of these tokens."""
        if self.packed is not None:
            return packed_experts(
                x_TE,
                routes.weights_TA,
                routes.experts_TA,
                self.packed,
                beside_TE=None if beside is None else beside.of(x_TE),
                beside_weights_T1=routes.shared_T1,
                load_X=self.load_X,
            )
        if self.matrices is None:
            y_TE = self._one_by_one(x_TE, routes)
        else:
            y_TE = self._grouped(x_TE, routes, self.matrices)
        return y_TE if beside is None else y_TE.add_(_of_shared(beside, x_TE, routes))

    def _one_by_one(self, x_TE: torch.Tensor, routes: Routes) -> torch.Tensor:
        """Of experts that have tokens; the host asks which."""
        experts = routes.experts_TA.view(-1)
        order = experts.argsort(stable=True)
        counts_X = torch.bincount(experts, minlength=self.spec.num_experts)
        if self.load_X is not None:
            self.load_X += counts_X
        weights = routes.weights_TA.view(-1).index_select(0, order).unsqueeze(1)
        tokens = order.div_(self.spec.num_active, rounding_mode="floor")
        out_TE = torch.zeros_like(x_TE)
        counts = counts_X.tolist()
        ends = list(accumulate(counts))
        for number, place in sorted(zip(self.numbers, range(len(self.numbers)), strict=True)):
            if counts[number]:
                rows = slice(ends[number] - counts[number], ends[number])
                self._add(place, x_TE, tokens[rows], weights[rows], out_TE)
        return out_TE

    def _grouped(
        self,
        x_TE: torch.Tensor,
        routes: Routes,
        matrices: tuple[StackedMatrix, StackedMatrix],
        residual_TE: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return grouped_experts(
            x_TE,
            routes.weights_TA,
            routes.experts_TA,
            *matrices,
            self.spec.activation,
            residual_TE=residual_TE,
            load_X=self.load_X,
            in_any_batch=self.deterministic,
        )

    def _add(
        self,
        expert: int,
        x_TE: torch.Tensor,
        tokens: torch.Tensor,
        weights: torch.Tensor,
        out_TE: torch.Tensor,
    ) -> None:
        every_token = tokens.shape[0] == x_TE.shape[0]  # sorted and distinct, hence all in order
        x = x_TE if every_token else x_TE.index_select(0, tokens)
        y = (self.experts[expert].of(x) * weights).to(x_TE.dtype)
        if every_token:
            out_TE.add_(y)
        elif self.deterministic:
            out_TE.index_copy_(0, tokens, out_TE.index_select(0, tokens).add_(y))
        else:
            out_TE.index_add_(0, tokens, y)

    @property
    def expert_bytes(self) -> int:
        """Of one of those here: what an exchange moves."""
        return sum(t.nbytes for linear in self.experts[0].linears for t in linear.tensors())

    def exchange(self, first: int, second: int) -> bool:
        """Two experts of two groups change places; every rank calls this between the same steps.
        False: this layer's experts are kept in several forms, and nothing has moved."""
        every, away = self.placement.for_experts, self.numbers
        if (ranks := every.collective) is None:
            raise InternalError("experts of one rank change places")
        place = next((at for at, n in enumerate(away) if n in (first, second)), None)
        mine = [] if place is None else self.experts[place].linears
        given_B = to_bytes(mine) if mine else self.experts[0].down.tensors()[0].new_empty(0)
        forms = repr({form(one.linears) for one in self.experts}).encode()
        told = torch.tensor([crc32(forms), len(given_B)])
        said = [one.tolist() for one in ranks.all_gather(told)]
        if len({found for found, _ in said}) > 1:
            return False
        most, width = max(size for _, size in said), every.size // every.ep
        taken_B: torch.Tensor | None = None
        for number in (first, second):
            for source in range(self.groups[number] * width, (self.groups[number] + 1) * width):
                sent_B = torch.zeros(most, dtype=torch.uint8, device=given_B.device)
                if source == every.rank:
                    sent_B[: len(given_B)] = given_B
                sent_B = ranks.broadcast(sent_B, source)
                is_for_us = place is not None and away[place] != number
                if is_for_us and source % width == every.rank % width:
                    taken_B = sent_B[: said[source][1]]
        if place is not None and taken_B is not None:
            adopt_bytes(mine, taken_B)
            away[place] = first + second - away[place]
        groups = self.groups
        groups[first], groups[second] = groups[second], groups[first]
        if (packed := self.packed) is not None:  # recorded steps know where these are
            gate_up, down = [e.gate_up for e in self.experts], [e.down for e in self.experts]
            biases = _biases(gate_up), _biases(down)
            packed.place(self.numbers, _packed(gate_up), _packed(down), *biases)
        return True

    @property
    def linears(self) -> list[Linear]:
        shared = [] if self.shared is None else self.shared.linears
        every = (linear for e in self.experts for linear in e.linears)
        return [self.router.linear, *shared, *every]

    def parts(self) -> list[Linear | Vector]:
        """All that holds parameters."""
        return [*self.router.parts(), *self.linears[1:]]


class ExpertLoad:
    """How evenly are tokens spread over the experts of these layers? Counted from now on, by the
    kernels that sort tokens by expert, and read now and then, without waiting for the device.
    Captured steps are filled up to their sizes, and that padding is counted too."""

    def __init__(self, layers: Sequence[Experts], device: torch.device) -> None:
        self._sizes = [layer.spec.num_experts for layer in layers]
        counted = [layer.spec.num_experts + layer.slices for layer in layers]
        shape = len(layers), max(counted, default=0)
        self._counts_LX = torch.zeros(shape, dtype=torch.int64, device=device)
        for counts_X, layer, num in zip(self._counts_LX, layers, counted, strict=True):
            layer.load_X = counts_X[:num]
        is_apart = device.type == "cuda" and len(layers) > 0
        self._read_LX = torch.zeros(shape, dtype=torch.int64, pin_memory=is_apart)
        self._arrived = torch.cuda.Event() if is_apart else None  # type: ignore[no-untyped-call]
        self._layers = layers
        self._found = [[0] * size for size in self._sizes]

    def counts(self) -> list[list[int]]:
        """Tokens of each expert by layer, as they were at the call before this one. This call
        begins the copy that the next one reads."""
        if self._arrived is not None and not self._arrived.query():  # type: ignore[no-untyped-call]
            return self._found
        both = zip(self._read_LX.tolist(), self._sizes, strict=True)
        self._found = [row[:size] for row, size in both]  # those that are chosen
        self._read_LX.copy_(self._counts_LX, non_blocking=True)
        if self._arrived is not None:
            self._arrived.record()
        return self._found

    def busiest(self) -> tuple[float, ...]:
        """Of each layer the tokens of its busiest expert over those of its mean one; 0 before any
        came."""
        return tuple(max(row) * len(row) / max(1, sum(row)) for row in self.counts())

    def fullest(self) -> tuple[float, ...]:
        """Of each layer the tokens, since the start, of the experts that are now in its fullest
        group of ranks over those of a mean one; 0 before any came."""
        loads = (
            group_loads(row, layer.groups, layer.placement.ep)
            for row, layer in zip(self.counts(), self._layers, strict=True)
        )
        return tuple(max(one) * len(one) / max(1, sum(one)) for one in loads)


def _biases(linears: Sequence[Linear]) -> list[torch.Tensor | None]:
    return [linear.added_bias_O for linear in linears]


def _packed(linears: Sequence[Linear]) -> list[PackedMatrix]:
    """Of all of them, none if one is kept in another way or unlike the others."""
    found = [linear.format.packed(linear.parameters) for linear in linears]
    forms = {None if one is None else (one.kind, one.group) for one in found}
    return [one for one in found if one is not None] if len(forms) == 1 else []


def _num_slices(spec: ExpertsSpec, expert: FeedForward, placement: Placement) -> int:
    """As so many more experts the shared ones go through the grouped products of this device."""
    is_stacked = all(tensor.device.type in STACKED_ON for tensor in expert.gate_up.tensors())
    fits = spec.shared_size % spec.intermediate_size == 0 and not spec.bias
    if (
        is_stacked
        and fits
        and placement.for_experts.size == 1
        and expert.gate_up.format.cuts_columns
    ):
        return spec.shared_size // spec.intermediate_size
    return 0


def _of_shared(shared: FeedForward, x_TE: torch.Tensor, routes: Routes) -> torch.Tensor:
    y_TE = shared.of(x_TE)
    return y_TE if routes.shared_T1 is None else y_TE.mul_(routes.shared_T1)
