"""Rows with drafts behind them, on the device and as plain lists, for every kind of kernel: the
reference, C where the library is, and Triton (in its interpreter, or on a GPU)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import pytest
import torch

from ridgeline.kernels.cpu import native
from ridgeline.kernels.drafts import PADDING_LENGTH, History, make_history
from ridgeline.kernels.prompt_lookup import MOST_SPLITS, LookupBuffers, LookupRule

GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if GPU else "cpu")
SIZE = 4  # of a block
ROOM, DRAFT_TOKENS, MOST = 9, 5, 40  # rows, drafts, tokens

each_kind = pytest.mark.parametrize("kind", ["reference", "native", "triton"])
each_seed = pytest.mark.parametrize("seed", range(6))


def kernel(kind: str, name: str) -> Callable[..., Any]:
    """One that knows a kind of device, of the file that its function is in."""
    file = "prompt_lookup" if name == "lookup" else "drafts"
    if kind == "native" and (GPU or native.library() is None):
        pytest.skip("no native CPU kernels here")
    if kind == "triton":
        pytest.importorskip("triton")
    place, end = {
        "reference": (file, "_reference"),
        "native": ("cpu.drafts", ""),
        "triton": (f"{file}_triton", "_triton"),
    }[kind]
    found: Callable[..., Any] = getattr(import_module(f"ridgeline.kernels.{place}"), name + end)
    return found


@dataclass
class Case:
    """Rows of random tokens of a small alphabet, with drafts behind them. Some of the step's rows
    are padding."""

    history: History
    rows: list[int]
    limits: list[int]
    tokens: list[list[int]]  # of each place, as wide as the history
    lens: list[int]
    found: list[int]
    generator: torch.Generator

    def random(self, low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=self.generator)

    def on_device(self) -> tuple[torch.Tensor, torch.Tensor]:
        return whole(self.rows), whole(self.limits)


def whole(numbers: object) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device=DEVICE)


def make_case(seed: int, *, letters: int = 3, shortest: int = 2) -> Case:
    print("seed", seed)
    generator = torch.Generator().manual_seed(seed)
    history = make_history(ROOM, MOST, DRAFT_TOKENS, DEVICE)
    shape = tuple(history.tokens_NL.shape)
    tokens = torch.randint(0, letters, shape, generator=generator, dtype=torch.int32)
    lens = torch.randint(shortest, MOST + 1, (ROOM,), generator=generator)
    lens[1], lens[2] = shortest, MOST
    found = torch.randint(0, DRAFT_TOKENS + 1, (ROOM,), generator=generator)
    lens[0], found[0] = PADDING_LENGTH, 0
    for ours, value in ((history.tokens_NL, tokens), (history.lens_N, lens)):
        ours.copy_(value)
    history.found_N.copy_(found)
    real = (torch.randperm(ROOM - 1, generator=generator) + 1).tolist()[: 1 + seed % (ROOM - 1)]
    rows = [*real, 0, 0, 0]
    limits = torch.randint(0, DRAFT_TOKENS + 1, (len(rows),), generator=generator).tolist()
    return Case(history, rows, limits, tokens.tolist(), lens.tolist(), found.tolist(), generator)


def check_history(case: Case) -> None:
    """The device has what the lists have; nothing of row 0 has changed."""
    assert case.history.tokens_NL.tolist() == case.tokens
    assert case.history.lens_N.tolist() == case.lens
    assert case.history.found_N.tolist() == case.found


def gpu_room(rows: int) -> LookupBuffers:
    return LookupBuffers(
        torch.full((rows * MOST_SPLITS,), 1 << 60, device=DEVICE),
        torch.zeros(rows, dtype=torch.int32, device=DEVICE),
    )


def run_look_up(
    kind: str, rows: torch.Tensor, history: History, rule: LookupRule, *, span: int = 16
) -> None:
    run = kernel(kind, "lookup")
    if kind == "triton":
        run(rows, history, rule, gpu_room(len(rows)), span=span)
    else:
        run(rows, history, rule)
