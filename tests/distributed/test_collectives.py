"""Ranks in processes of their own hear what the others say."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import torch

from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.placement import Placement
from ridgeline.errors import ConfigError
from ridgeline.formats import COLLECTIVES
from tests.distributed.processes import Ranks

DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def own(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(12).view(3, 4).mul(rank + 1).to(dtype)


@torch.inference_mode()
def talk(placement: Placement) -> list[torch.Tensor]:
    rank, collective = placement.rank, placement.collective
    assert collective is not None
    found = []
    for dtype in DTYPES:
        found.append(collective.all_reduce(own(rank, dtype)))
        found.append(collective.all_reduce(own(rank, dtype).t()))  # not contiguous
        found += collective.all_gather(own(rank, dtype).t())
        found.append(collective.broadcast(own(rank, dtype), 1))
        passed = own(rank, dtype)
        if rank == 0:
            collective.send(passed.t().contiguous().t(), 1)
            passed.zero_()
            collective.recv(passed, 1)
        else:
            got = torch.empty_like(passed)
            collective.recv(got, 0)
            collective.send(got + passed, 0)
            passed = got + passed
        found.append(passed)
    assert not torch.distributed.is_initialized()
    return found


def test_gloo(ranks: Ranks) -> None:
    want = []
    for dtype in DTYPES:
        both = own(0, dtype) + own(1, dtype)
        want += [both, both.t(), own(0, dtype).t(), own(1, dtype).t(), own(1, dtype), both]
    for found in ranks.run(talk):
        for got, right in zip(found, want, strict=True):
            assert got.dtype == right.dtype
            assert torch.equal(got, right)


def test_who_does_not_come_is_told_of() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=rf"rank 0 of 2 did not meet .*{address}.* in use"):
            open_collective("gloo", 0, 2, address, timeout_s=1.0)
    with pytest.raises(ConfigError, match=r"rank 0 of 2 did not meet the others at 127.0.0.1:0 wi"):
        open_collective("gloo", 0, 2, "127.0.0.1:0", timeout_s=0.5)


def test_the_table_is_whole() -> None:
    with pytest.raises(ConfigError, match=r"unknown collective 'smoke'; choose one of .*gloo"):
        open_collective("smoke", 0, 2, "127.0.0.1:0")
    assert all(where.startswith("ridgeline.distributed.") for where in COLLECTIVES.values())
