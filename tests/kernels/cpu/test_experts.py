"""All experts in one native call give what each gives by itself, at every level that is here."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from ridgeline.errors import InternalError
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.experts import PackedExperts, packed_experts
from ridgeline.kernels.cpu.packed_linear import Codes, linear, pack
from ridgeline.kernels.silu_mul import gated

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")

LEVELS = native.LEVELS[1 : native.LEVELS.index(native.best_level()) + 1]
EXPERTS, ACTIVE, HIDDEN, WIDTH, GROUP = 6, 3, 96, 48, 32
GROUPS = {Codes.INT4: GROUP, Codes.GROUPS4: GROUP}
KINDS = (Codes.BF16, Codes.INT8, Codes.INT4, Codes.GROUPS4)


@pytest.fixture(params=LEVELS)
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    name: str = request.param
    with native.at_level(name):
        yield name


class Case:
    """Random experts, tokens and routes; expert 1 is nobody's."""

    def __init__(
        self, kind: Codes, activation: str = "silu", *, has_bias: bool = False, tokens: int
    ) -> None:
        made = torch.Generator().manual_seed(tokens)

        def packed(outputs: int, inputs: int) -> list[torch.Tensor]:
            return [torch.randn(outputs, inputs, generator=made) / 10 for _ in range(EXPERTS)]

        self.weights = packed(2 * WIDTH, HIDDEN), packed(HIDDEN, WIDTH)
        self.gate_up, self.down = (
            [
                pack(
                    weight.to(torch.bfloat16),
                    kind,
                    group=GROUPS.get(kind, 0),
                    has_zero=kind == Codes.GROUPS4,
                )
                for weight in weights
            ]
            for weights in self.weights
        )
        self.biases = [
            [torch.randn(size, generator=made) if has_bias else None for _ in range(EXPERTS)]
            for size in (2 * WIDTH, HIDDEN)
        ]
        self.activation = activation
        self.x_TE = torch.randn(tokens, HIDDEN, generator=made)
        others = torch.tensor([0, 2, 3, 4, 5])
        order = torch.rand(tokens, len(others), generator=made).argsort(1)
        self.chosen_TA = others[order[:, :ACTIVE]].contiguous()
        self.weights_TA = torch.rand(tokens, ACTIVE, generator=made)

    def experts(self) -> PackedExperts:
        return PackedExperts(self.gate_up, self.down, self.activation, *self.biases)

    def one_by_one(self) -> torch.Tensor:
        """In the order of the experts' numbers."""
        y_TE = torch.zeros(len(self.x_TE), HIDDEN)
        for expert in range(EXPERTS):
            tokens, places = torch.nonzero(self.chosen_TA == expert, as_tuple=True)
            x, wide = self.x_TE[tokens], self.gate_up[expert]
            wide_bias, narrow_bias = (biases[expert] for biases in self.biases)
            if self.activation == "silu":
                inner = linear(x, wide, bias_N=wide_bias, gated=True)
            else:
                inner = gated(linear(x, wide, bias_N=wide_bias), self.activation)
            y = linear(inner, self.down[expert], bias_N=narrow_bias)
            y_TE.index_add_(0, tokens, y * self.weights_TA[tokens, places, None])
        return y_TE


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 2, 75])
def test_bits_are_those_of_one_by_one(kind: Codes, tokens: int) -> None:
    case = Case(kind, tokens=tokens)
    load_X = torch.ones(EXPERTS, dtype=torch.int64)
    got = packed_experts(case.x_TE, case.weights_TA, case.chosen_TA, case.experts(), load_X=load_X)
    torch.testing.assert_close(got, case.one_by_one(), rtol=0, atol=0)
    counts = torch.bincount(case.chosen_TA.flatten(), minlength=EXPERTS)
    assert load_X.tolist() == (counts + 1).tolist()


@pytest.mark.usefixtures("level")
@pytest.mark.parametrize("kind", [Codes.BF16, Codes.INT4])
def test_biases_a_clamped_gate_and_what_is_beside(kind: Codes) -> None:
    case = Case(kind, "clamped", has_bias=True, tokens=33)
    case.x_TE *= 20  # so that gates are clamped
    beside_TE, weights_T1 = torch.randn(33, HIDDEN), torch.rand(33, 1)
    got = packed_experts(
        case.x_TE,
        case.weights_TA,
        case.chosen_TA,
        case.experts(),
        beside_TE=beside_TE,
        beside_weights_T1=weights_T1,
    )
    want = case.one_by_one() + beside_TE * weights_T1
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("tokens", [1, 40])
def test_bfloat16_against_float64(tokens: int) -> None:
    """Of x, weights and answers; sums of one token are rounded once."""
    case = Case(Codes.BF16, tokens=tokens)
    x_TE = case.x_TE.to(torch.bfloat16)
    got = packed_experts(x_TE, case.weights_TA, case.chosen_TA, case.experts())
    want = torch.zeros(tokens, HIDDEN, dtype=torch.float64)
    for token, (chosen, weights) in enumerate(zip(case.chosen_TA, case.weights_TA, strict=True)):
        for expert, weight in zip(chosen.tolist(), weights.double(), strict=True):
            wide, narrow = (of[expert].to(torch.bfloat16).double() for of in case.weights)
            inner = gated(x_TE[token].double() @ wide.T, "silu")
            want[token] += narrow @ inner.to(torch.bfloat16).double() * weight
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got.double(), want, rtol=2**-8, atol=1e-2)


def test_many_tokens_take_several_passes() -> None:
    case = Case(Codes.INT4, tokens=3000)
    got = packed_experts(case.x_TE, case.weights_TA, case.chosen_TA, case.experts())
    torch.testing.assert_close(got, case.one_by_one(), rtol=0, atol=0)


def test_an_expert_that_there_is_not_is_refused() -> None:
    case = Case(Codes.BF16, tokens=2)
    case.chosen_TA[1, 2] = EXPERTS
    with pytest.raises(InternalError, match="code 1"):
        packed_experts(case.x_TE, case.weights_TA, case.chosen_TA, case.experts())


def test_no_tokens() -> None:
    case = Case(Codes.BF16, tokens=0)
    got = packed_experts(case.x_TE, case.weights_TA, case.chosen_TA, case.experts())
    assert got.shape == (0, HIDDEN)


@pytest.mark.parametrize("tokens", [1, 2, 75])
@pytest.mark.parametrize("has_bias", [False, True])
def test_shares_add_up(tokens: int, has_bias: bool) -> None:
    """Of ranks that hold whole experts: of the second one only expert 1, which is nobody's."""
    case = Case(Codes.INT4, has_bias=has_bias, tokens=tokens)
    total_TE = torch.zeros_like(case.x_TE)
    for numbers in ([0, 3], [1], [2, 4, 5]):
        matrices = [[of[n] for n in numbers] for of in (case.gate_up, case.down)]
        biases = [[of[n] for n in numbers] for of in case.biases]
        gate_up, down = matrices
        gate_up_bias, down_bias = biases
        share = PackedExperts(
            gate_up, down, case.activation, gate_up_bias, down_bias,
            numbers=numbers, num_experts=EXPERTS,
        )  # fmt: skip
        load_X = torch.zeros(EXPERTS, dtype=torch.int64)
        got = packed_experts(case.x_TE, case.weights_TA, case.chosen_TA, share, load_X=load_X)
        assert load_X.tolist() == torch.bincount(case.chosen_TA.flatten(), minlength=6).tolist()
        assert bool(got.any()) == (numbers != [1])
        total_TE += got
    torch.testing.assert_close(total_TE, case.one_by_one(), rtol=1e-5, atol=1e-6)
