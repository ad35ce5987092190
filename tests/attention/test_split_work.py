"""A schedule is made once for a shape, and dealt out once for each batch that is answered."""

from __future__ import annotations

import torch

from ridgeline.architectures.spec import AttentionSpec, RopeSpec
from ridgeline.attention.split_work import SplitWork
from ridgeline.kernels.paged_decode import DecodeBatch

CPU = torch.device("cpu")
SPEC = AttentionSpec(4, 2, 16, RopeSpec())


def batch(num: int, window: int | None = None, num_new: int = 1) -> DecodeBatch:
    lens = torch.full((num,), num_new, dtype=torch.int32)
    starts = torch.arange(num + 1, dtype=torch.int32) * num_new
    return DecodeBatch(lens[:, None], lens, starts, num_new, window)


def test_made_once_and_dealt_out_anew_after_another_batch() -> None:
    made: list[tuple[int, int]] = []
    dealt: list[tuple[str, DecodeBatch]] = []

    def make(device: torch.device, spec: AttentionSpec, max_requests: int, max_new: int) -> str:
        made.append((max_requests, max_new))
        return f"schedule {len(made)}"

    schedules = SplitWork(make, lambda schedule, of: dealt.append((schedule, of)))
    first, second, wide, windowed = batch(3), batch(4), batch(5), batch(3, window=8)
    drafting = batch(3, num_new=3)
    for of in (first, first, second, first, wide, windowed, drafting, first):
        schedules.schedule(of, CPU, SPEC)
    assert made == [(4, 1), (8, 1), (4, 1), (4, 3)]  # rounded up; windows, drafts: their own
    assert [of for _, of in dealt] == [first, second, first, wide, windowed, drafting]
    assert [name for name, _ in dealt] == [f"schedule {n}" for n in (1, 1, 1, 2, 3, 4)]
    assert schedules.schedule(second, CPU, SPEC) == "schedule 1"


def test_stands_for_the_batch_it_was_last_dealt_out_for() -> None:
    schedules = SplitWork(lambda *_: "schedule", lambda *_: None)
    first, second = batch(3), batch(4)
    assert not schedules.stands_for(first, SPEC)
    schedules.schedule(first, CPU, SPEC)
    assert schedules.stands_for(first, SPEC)
    assert not schedules.stands_for(second, SPEC)
    schedules.schedule(second, CPU, SPEC)
    assert not schedules.stands_for(first, SPEC)


def test_no_schedule_where_there_is_no_kernel() -> None:
    schedules: SplitWork[str] = SplitWork(lambda *_: None, lambda *_: None)
    assert schedules.schedule(batch(3), CPU, SPEC) is None
