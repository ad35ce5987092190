"""A captured step of one whole prompt: what fills its bucket up reaches no token of the prompt."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch.nn import attention as torch_attention

from ridgeline.architectures import read_spec
from ridgeline.attention import sdpa
from ridgeline.attention.layout import MixedLayout
from ridgeline.attention.paged import PagedAttention, PagedPlan
from ridgeline.attention.sdpa import LongPiece, SdpaPlan
from ridgeline.executor.mixed_graphs import LONGEST_PIECE, MixedStep, _has_long, _is_whole
from tests.tiny_model import tiny_config

SPEC = read_spec(tiny_config()).layers[0].attention
NUM_SLOTS, BUCKET = 64, 16


class Store:
    """Keys and values of all slots; slot 0 is the null block's."""

    views = None

    def __init__(self) -> None:
        shape = (NUM_SLOTS, 2, SPEC.num_kv_heads, SPEC.head_dim)
        self.kv = torch.randn(shape, generator=torch.Generator().manual_seed(1))
        self.kv[0] = 1e4

    def gather(self, slots: torch.Tensor) -> torch.Tensor:
        return self.kv[slots]


def plainly(q: torch.Tensor, kv: torch.Tensor) -> torch.Tensor:
    share = SPEC.num_heads // SPEC.num_kv_heads
    k, v = (x.repeat_interleave(share, 1).transpose(0, 1) for x in kv.unbind(1))
    scores = q.transpose(0, 1) @ k.transpose(1, 2) * SPEC.head_dim**-0.5
    hidden = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    seen: torch.Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    return (seen @ v).transpose(0, 1)


@pytest.mark.parametrize("length", [1, 9, BUCKET])
def test_padding_reaches_nobody(length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "sdpa_kernel", lambda _: nullcontext())
    store: Any = Store()
    slots = torch.zeros(BUCKET, dtype=torch.int64)
    order = torch.randperm(NUM_SLOTS - 1, generator=torch.Generator().manual_seed(2)) + 1
    slots[:length] = order[:length]
    shape = (BUCKET, SPEC.num_heads, SPEC.head_dim)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    backend = PagedAttention()
    layout = MixedLayout(None, None, (), (slots,), BUCKET, 16, is_whole=True)
    got = backend.attend(q, store, backend.plan_mixed(layout, 0, None), SPEC)
    want = plainly(q[:length], store.kv[slots[:length]])
    torch.testing.assert_close(got[:length], want, rtol=1e-4, atol=1e-4)


def step(starts: list[int], num_new: list[int], seq_lens: list[int]) -> MixedStep:
    tokens = np.zeros(sum(num_new), np.int64)
    rows = np.arange(len(starts))
    about = (np.array(values) for values in (starts, num_new, seq_lens))
    return MixedStep(tokens, tokens, tokens, [tokens], rows, *about)


def test_which_steps_are_one_whole_prompt() -> None:
    assert _is_whole(step([0], [12], [12]))  # or the first chunk of a longer one
    assert not _is_whole(step([0], [12], [20]))
    assert not _is_whole(step([0, 12], [12, 3], [12, 3]))


def test_which_steps_have_a_long_new_prompt() -> None:
    most = LONGEST_PIECE
    assert _has_long(step([0, 1], [1, most + 1], [9, most + 1]))
    assert not _has_long(step([0, 1], [1, most], [9, most]))
    assert not _has_long(step([0, 1], [1, most + 1], [9, most + 2]))  # with tokens before it


@pytest.mark.parametrize("num_new", [9, 16])
def test_a_long_prompt_alone_is_answered_without_a_copy(
    num_new: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Filled up or not; its last token by itself; and as it was beside others."""
    monkeypatch.setattr(torch_attention, "sdpa_kernel", lambda _: nullcontext())
    monkeypatch.setattr(sdpa, "suits_cudnn", lambda case: True)
    store: Any = Store()
    store.views = ()
    shape = (num_new, SPEC.num_heads, SPEC.head_dim)
    q = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    order = torch.randperm(NUM_SLOTS - 1, generator=torch.Generator().manual_seed(2)) + 1
    slots = order[:num_new]
    filled = torch.cat((slots, slots[-1:].expand(16 - num_new)))
    piece = LongPiece(0, num_new, filled, num_new, plain=True, padded=16)
    plan = PagedPlan(None, None, None, SdpaPlan(None, (), (piece,), None))
    backend, want = PagedAttention(), plainly(q, store.kv[slots])
    got = backend.attend(q, store, plan, SPEC)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    last = backend.attend_last(q[-1:], store, plan, SPEC)
    assert last is not None
    torch.testing.assert_close(last, want[-1:], rtol=1e-4, atol=1e-4)
    copied = torch.full_like(q, torch.nan)
    assert plan.long is not None
    backend._torch.attend_rows(q, store, plan.long, SPEC, copied)
    assert torch.equal(copied, got)
    beside = PagedPlan(None, cast("Any", "decodes"), None, plan.long)
    assert backend.attend_last(q[-1:], store, beside, SPEC) is None
