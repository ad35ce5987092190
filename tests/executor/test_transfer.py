"""Is memory that the device still reads or writes ever given to the next step?

The driver's calls are played by a queue that does nothing until somebody waits for a mark.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ridgeline.executor.transfer import (
    MOST_KINDS,
    MOST_SENT,
    MOST_UNMARKED,
    Array,
    CudaTransfer,
)
from ridgeline.kernels.copies import MOST_BYTES, Copies

CPU = torch.device("cpu")


@dataclass
class Queue(Copies):
    """A stream that is as late as may be. An event is a list of what was asked before it."""

    asked: list[Callable[[], object]] = field(default_factory=list)
    num_events: int = 0
    num_dropped: int = 0
    done: int = 0

    def send(self, target: int, pinned: int, num_bytes: int) -> None:
        self.asked.append(lambda: ctypes.memmove(target, pinned, num_bytes))

    def fetch(self, pinned: int, source: int, num_bytes: int) -> None:
        self.asked.append(lambda: ctypes.memmove(pinned, source, num_bytes))

    def make_event(self) -> Any:
        self.num_events += 1
        return [0]

    def set_event(self, event: Any) -> None:
        event[0] = len(self.asked)

    def wait(self, event: Any) -> None:
        for do in self.asked[self.done : event[0]]:
            do()
        self.done = max(self.done, event[0])

    def is_reached(self, event: Any) -> bool:
        return bool(self.done >= event[0])

    def drop_event(self, event: Any) -> None:
        self.num_dropped += 1


def test_steps_in_flight_have_memory_of_their_own() -> None:
    queue = Queue()
    transfer = CudaTransfer(CPU, queue)
    there = torch.zeros(6, 4, dtype=torch.int64)
    answers = torch.arange(24).view(6, 4) * 10
    flying = []
    for step in range(6):
        transfer.send_into(np.full((2, 2), step), there[step])
        flying.append((transfer.fetch(answers[step]), transfer.mark()))
    for step, (fetched, mark) in enumerate(flying):
        assert mark is not None
        mark.synchronize()
        assert fetched.tolist() == answers[step].tolist()
        mark.release()
    assert there.tolist() == [[step] * 4 for step in range(6)]


def test_memory_is_used_again_once_it_is_released() -> None:
    queue = Queue()
    transfer = CudaTransfer(CPU, queue)
    there, source = torch.zeros(3, dtype=torch.int64), torch.tensor([7, 8, 9])
    addresses = set()
    for step in range(20):
        transfer.send_into(np.array([step, 1, 2]), there)
        fetched = transfer.fetch(source)
        addresses.add(fetched.data_ptr())
        mark = transfer.mark()
        assert mark is not None
        mark.synchronize()
        assert there[0] == step
        assert fetched.tolist() == [7, 8, 9]
        mark.release()
        mark.release()  # once more is no harm
        mark.synchronize()
    assert len(addresses) <= 2
    assert queue.num_events == 1


def test_what_nobody_waits_for_is_over_before_its_memory_goes() -> None:
    queue = Queue()
    transfer = CudaTransfer(CPU, queue)
    there = torch.zeros(3, dtype=torch.int64)
    transfer.send_into(np.array([1, 2, 3]), there)
    transfer.mark()
    gc.collect()
    assert there.tolist() == [1, 2, 3]
    assert queue.num_dropped == 1


def test_many_numbers_and_odd_ones_are_left_to_torch() -> None:
    queue = Queue()
    transfer = CudaTransfer(CPU, queue)
    many = torch.zeros(MOST_SENT // 8 + 1, dtype=torch.int64)
    transfer.send_into(np.arange(len(many)), many)
    assert torch.equal(many, torch.arange(len(many)))
    assert transfer.send(np.arange(len(many)))[-1] == len(many) - 1
    some = torch.arange(MOST_BYTES // 8 + 1)
    assert torch.equal(transfer.fetch(some), some)
    assert transfer.send(some[:0].numpy()).shape == (0,)
    odd = torch.arange(12.0).view(3, 4)
    assert torch.equal(transfer.fetch(odd.t()), odd.t())
    assert transfer.fetch(odd.bfloat16()).dtype == torch.bfloat16
    assert transfer.fetch(odd[:0]).shape == (0, 4)
    assert not queue.asked


def test_what_is_sent_together_comes_apart_and_waits_for_its_turn() -> None:
    queue = Queue()
    transfer = CudaTransfer(CPU, queue)
    arrays: list[Array] = [
        np.arange(6).reshape(2, 3),
        np.array([0.5], np.float32),
        np.arange(5, dtype=np.int32),
    ]
    first = transfer.send_all(arrays)
    for array in arrays:
        array += 1  # it has been taken
    second = transfer.send_all(arrays)
    mark = transfer.mark()
    assert mark is not None
    mark.synchronize()
    assert [x.tolist() for x in first] == [[[0, 1, 2], [3, 4, 5]], [0.5], [0, 1, 2, 3, 4]]
    assert [x.tolist() for x in second] == [[[1, 2, 3], [4, 5, 6]], [1.5], [1, 2, 3, 4, 5]]
    assert len(queue.asked) == 2


def test_sizes_of_what_is_sent_share_few_buffers() -> None:
    transfer = CudaTransfer(CPU, Queue())
    for num in range(1, 1000):
        there = transfer.send(np.arange(num))
        mark = transfer.mark()
        assert mark is not None
        mark.synchronize()
        mark.release()
        assert len(there) == num
    assert len(transfer._free) <= 14


def test_who_never_sets_a_mark_does_not_pile_up_memory() -> None:
    queue = Queue()
    transfer = CudaTransfer(CPU, queue)
    for num in range(3 * MOST_UNMARKED):
        there = transfer.send(np.full(3, num))
    assert there.tolist() == [num] * 3  # by torch, which keeps what it needs
    assert len(transfer._used) == len(queue.asked) == MOST_UNMARKED


def test_as_many_kinds_of_buffers_as_there_are_do_not_add_up() -> None:
    transfer = CudaTransfer(CPU, Queue())
    for length in range(1, 3 * MOST_KINDS):
        transfer.fetch(torch.zeros(length, dtype=torch.int64))
        mark = transfer.mark()
        assert mark is not None
        mark.synchronize()
        mark.release()
        assert len(transfer._free) <= MOST_KINDS + 1
