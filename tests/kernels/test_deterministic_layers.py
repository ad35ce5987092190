"""A whole decoder over the kernels of deterministic steps: logits are the same bits in any chunks.

Through Triton's interpreter on a CPU, where PyTorch does what stands between the kernels.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ridgeline.attention.paged import PagedAttention
from ridgeline.executor import scorer
from ridgeline.kernels.invariant_linear import InvariantTile
from ridgeline.kernels.paged_prefill import Config
from tests.executor.rig import VOCAB, make_decoder, make_scorer

triton_linear = pytest.importorskip("ridgeline.kernels.invariant_linear_triton")
pytest.importorskip("ridgeline.kernels.paged_prefill_triton")

TILE = InvariantTile(16, 32, 32, stages=2)
CONFIG = Config(16, 16, 4, 2)


@pytest.fixture
def own_kernels(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Our kernels where a CPU would take their references; how many rows they were called with."""
    rows: list[int] = []

    def linear(x: torch.Tensor, weight: torch.Tensor, **beside: Any) -> torch.Tensor:
        rows.append(len(x))
        got: torch.Tensor = triton_linear.invariant_linear_triton(x, weight, tile=TILE, **beside)
        return got

    for module in ("ridgeline.quantization.plain",):
        monkeypatch.setattr(f"{module}.invariant_linear", linear)
    monkeypatch.setattr("ridgeline.attention.paged.prefill_config", lambda *_, **__: CONFIG)
    return rows


@pytest.mark.skipif(torch.cuda.is_available(), reason="on a GPU tests/gpu does this, and more")
@pytest.mark.parametrize("window", [None, 9])
def test_logits_are_the_same_bits_in_any_chunks(
    monkeypatch: pytest.MonkeyPatch, own_kernels: list[int], window: int | None
) -> None:
    changes: dict[str, Any] = (
        {} if window is None else {"model_type": "mistral", "sliding_window": window}
    )
    model = make_decoder(
        attention=PagedAttention(is_invariant=True),
        deterministic=True,
        head_dim=16,
        num_hidden_layers=2,
        **changes,
    )
    token_ids = torch.randint(VOCAB, (17,), generator=torch.Generator().manual_seed(5)).tolist()
    whole = make_scorer(model).logits(token_ids)
    for size in (1, 7):
        monkeypatch.setattr(scorer, "CHUNK_TOKENS", size)
        assert torch.equal(make_scorer(model).logits(token_ids), whole), size
    assert {1, 7, 17} <= set(own_kernels)
