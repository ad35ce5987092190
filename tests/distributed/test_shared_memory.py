"""Sums in shared memory are those of one process, to the bit, and nobody waits for the dead."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from threading import Timer

import pytest
import torch

from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.placement import Placement
from ridgeline.distributed.shared_memory import SUMS, SharedMemory
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.kernels.cpu import native
from ridgeline.kernels.cpu.recorder import Arena, Recording, Replay, record
from tests.distributed.processes import TIMEOUT_S, Ranks

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
SIZES = (1, 7, 16, 1000, 4096, 65_536, 200_003)  # the last two need several pieces


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(4)
    yield ranks
    ranks.close()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def open_shared(rank: int, size: int, address: str) -> SharedMemory:
    found = open_collective("shared", rank, size, address, timeout_s=TIMEOUT_S)
    assert isinstance(found, SharedMemory)
    return found


def drawn(rank: int, seed: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * seed + rank)
    return torch.randn(num, generator=generator).mul(3).to(dtype)


def plain_sum(size: int, seed: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    """In rank order, rounded once."""
    total = drawn(0, seed, num, dtype).float()
    for rank in range(1, size):
        total += drawn(rank, seed, num, dtype).float()
    return total.to(dtype)


def given_up(placement: Placement, name: str, address: str) -> str:
    """What rank 0 is told, which waits for one that lives and never comes."""
    assert placement.collective is not None
    shared = open_collective(name, placement.rank, 2, address, timeout_s=TIMEOUT_S)
    told = ""
    if placement.rank == 0:
        later = Timer(0.2, shared.abandon)
        later.start()
        try:
            shared.all_reduce(torch.ones(4))
        except EngineFault as fault:
            told = str(fault)
        later.join()
    placement.collective.all_reduce(torch.ones(1))
    shared.close()
    return told


@torch.inference_mode()
def talk(placement: Placement, size: int, address: str) -> str:
    """What is wrong; "" if nothing is."""
    rank, wrong = placement.rank, []
    collective = open_shared(rank, size, address)
    for seed, num in enumerate(SIZES):
        for dtype in (*SUMS, torch.int64):
            mine = drawn(rank, seed, num, dtype)
            found = collective.all_gather(mine)
            if not all(torch.equal(f, drawn(r, seed, num, dtype)) for r, f in enumerate(found)):
                wrong.append(f"gather {num} {dtype}")
            if not torch.equal(collective.all_reduce(mine), plain_sum(size, seed, num, dtype)):
                wrong.append(f"sum {num} {dtype}")
    across = torch.stack([drawn(rank, seed, 5, torch.float32) for seed in range(3)]).t()
    want = torch.stack([plain_sum(size, seed, 5, torch.float32) for seed in range(3)]).t()
    if not torch.equal(collective.all_reduce(across), want):
        wrong.append("columns")
    for seed, (rows, each, left_out) in enumerate(((3, 5, 2), (1, 100_000, 0), (7, 16_384, 31))):
        every = [drawn(r, seed, rows * each, torch.float32).view(rows, each) for r in range(size)]
        side_by_side = torch.empty(rows, size * each + 3)[:, : size * each - left_out]
        collective.gather_columns(every[rank], side_by_side)
        if not torch.equal(side_by_side, torch.cat(every, -1)[:, : size * each - left_out]):
            wrong.append(f"{each} columns")
    x, arena = drawn(rank, 0, 64, torch.float32), Arena()
    recording: Recording = record(lambda: _step(collective, x), arena)
    replay = Replay(recording)
    for seed in range(1, 4):
        x.copy_(drawn(rank, seed, 64, torch.float32))
        replay()
        if not torch.equal(x, plain_sum(size, seed, 64, torch.float32)):
            wrong.append("replay")
    collective.close()
    return ", ".join(wrong)


def _step(collective: SharedMemory, x: torch.Tensor) -> None:
    collective.all_reduce(x)


@pytest.mark.parametrize(("name", "words"), [("shared", "has left"), ("gloo", "talk any more")])
def test_who_waits_for_a_stopped_rank_is_freed(ranks: Ranks, name: str, words: str) -> None:
    told, other = ranks.run(given_up, name, free_address())
    assert words in told
    assert other == ""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_sums_and_gathers(ranks: Ranks, size: int) -> None:
    assert ranks.run(talk, size, free_address(), size=size) == [""] * size


def misbehave(addresses: list[str]) -> None:
    """Rank 1: it does something else, says nothing, leaves, and is killed between two sums."""
    other = open_shared(1, 2, addresses[0])
    with pytest.raises(EngineFault, match="rank 0 does something else"):
        other.all_reduce(torch.zeros(32))
    silent = open_shared(1, 2, addresses[1])
    leaver = open_shared(1, 2, addresses[2])
    leaver.close()
    victim = open_shared(1, 2, addresses[3])
    for _ in range(5):
        victim.all_reduce(torch.zeros(4096))
    silent.broadcast(torch.zeros(1, dtype=torch.int64), 0)  # rank 0 has seen that it is late
    os.kill(os.getpid(), signal.SIGKILL)


def test_nobody_waits_for_the_dead() -> None:
    before = _own_descriptors()
    addresses = [free_address() for _ in range(4)]
    process = multiprocessing.get_context("spawn").Process(target=misbehave, args=(addresses,))
    process.start()
    x = torch.zeros(4096)
    other = open_shared(0, 2, addresses[0])
    with pytest.raises(EngineFault, match="rank 1 does something else than the others"):
        other.all_reduce(x)
    late = open_shared(0, 2, addresses[1])
    left = open_shared(0, 2, addresses[2])
    with pytest.raises(EngineFault, match="rank 1 has left while others wait"):
        left.all_gather(x)
    killed = open_shared(0, 2, addresses[3])
    for _ in range(5):
        killed.all_reduce(x)
    late._ranks.timeout_ns = 10_000_000
    with pytest.raises(EngineFault, match="rank 1 is late"):
        late.all_reduce(x)
    late.broadcast(torch.zeros(1, dtype=torch.int64), 0)
    with pytest.raises(EngineFault, match="rank 1 has ended while others wait"):
        killed.all_reduce(x)
    process.join(TIMEOUT_S)
    assert process.exitcode == -signal.SIGKILL
    for collective in (other, late, left, killed):
        collective.close()
    assert _own_descriptors() == before


def _own_descriptors() -> list[str]:
    """Those of processes that this process holds."""
    found = []
    for entry in Path("/proc/self/fd").iterdir():
        try:
            target = os.readlink(entry)
        except OSError:  # the one that lists them
            continue
        if "pidfd" in target:
            found.append(target)
    return sorted(found)


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "library", lambda: None)
    with pytest.raises(ConfigError, match=r"cannot share memory .* use --collective gloo"):
        open_shared(0, 1, free_address())
