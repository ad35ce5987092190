"""Do ranks on GPUs add up right, also in captured steps, and give the tokens of one rank?"""

from __future__ import annotations

import hashlib
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM, SamplingParams
from ridgeline.distributed.collectives import open_collective
from ridgeline.distributed.peer import PeerSum, memory_bytes
from ridgeline.distributed.placement import Collective, Placement
from tests.distributed.processes import TIMEOUT_S, Ranks
from tests.test_ranks import requests, serve
from tests.tiny_model import make_tiny_model

NUM_CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0
one_card = pytest.mark.skipif(not NUM_CARDS, reason="needs a GPU")
two_cards = pytest.mark.skipif(NUM_CARDS < 2, reason="needs two GPUs")
CLOSE = {torch.bfloat16: 2**-7, torch.float16: 2**-9, torch.float32: 2**-20}
CASES = (
    ((1, 64), torch.bfloat16), ((2, 4096), torch.bfloat16), ((3, 2880), torch.float16),
    ((70, 1024), torch.float32), ((256, 4096), torch.bfloat16), ((2, 16384), torch.bfloat16),
)  # fmt: skip
EPS, REPLAYS = 1e-5, 1000


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    ranks = Ranks(2)
    yield ranks
    ranks.close()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def drawn(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    noise = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=noise).to("cuda", dtype)


def is_off(got: torch.Tensor, want: torch.Tensor) -> bool:
    worst = (got.double() - want).abs().max() / want.abs().max()
    return not bool(worst <= CLOSE[got.dtype])


def wrong_sums(collective: Collective, rank: int) -> list[str]:
    """Against float64, sizes and dtypes that failed."""
    wrong = []
    for shape, dtype in CASES:
        every = [drawn(seed, shape, dtype) for seed in range(2)]
        before, weight = drawn(2, shape, dtype), drawn(3, shape[1:], dtype)
        total = every[0].double() + every[1].double()
        if is_off(collective.all_reduce(every[rank].clone()), total):
            wrong.append(f"sum {shape} {dtype}")
        gathered = collective.all_gather(every[rank])
        if not all(map(torch.equal, gathered, every)):
            wrong.append(f"gather {shape} {dtype}")
        residual = before.clone()
        normed = collective.all_reduce_norm(every[rank].clone(), residual, weight, EPS)
        whole = total + before.double()
        scale = (whole.square().mean(-1, keepdim=True) + EPS).rsqrt()
        if is_off(residual, whole) or is_off(normed, whole * scale * weight.double()):
            wrong.append(f"sum and norm {shape} {dtype}")
    return wrong


class Chain:
    """A step whose input is what the step before gave, through every kind of call."""

    def __init__(self, collective: Any, rank: int) -> None:
        self._collective = collective
        self.state = drawn(5, (6, 1024), torch.bfloat16)
        self._own = drawn(6 + rank, (6, 1024), torch.bfloat16)
        self._weight = drawn(9, (1024,), torch.bfloat16)
        self._residual = torch.empty_like(self.state)

    def step(self) -> None:
        summed = self._collective.all_reduce(self.state * self._own)
        self._residual.copy_(self.state)
        norm = self._collective.all_reduce_norm
        normed = norm(summed + self._own, self._residual, self._weight, EPS)
        first, second = self._collective.all_gather(normed)
        self.state.copy_(first + second * 0.25)

    def digest(self) -> str:
        return hashlib.sha256(self.state.float().cpu().numpy().tobytes()).hexdigest()


def captured(step: Callable[[], None]) -> torch.cuda.CUDAGraph:
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()  # type: ignore[no-untyped-call]
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


@torch.inference_mode()
def talk(placement: Placement, name: str, address: str, card: int | None, times: int) -> Any:
    """What is wrong, and what the chain gave without a graph and with one."""
    rank = placement.rank
    torch.cuda.set_device(rank if card is None else card)
    collective = open_collective(name, rank, 2, address, timeout_s=TIMEOUT_S)
    wrong = wrong_sums(collective, rank)
    eager, replayed = Chain(collective, rank), Chain(collective, rank)
    for _ in range(times):
        eager.step()
    torch.cuda.synchronize()
    graph = captured(replayed.step)
    for _ in range(times):
        graph.replay()
    torch.cuda.synchronize()
    found = wrong, eager.digest(), replayed.digest()
    del graph
    collective.close()
    return found


@torch.inference_mode()
def wait_alone(placement: Placement, name: str, address: str) -> float:
    """Rank 0 replays a captured step that the other never joins; seconds until it is free again."""
    rank = placement.rank
    torch.cuda.set_device(rank)
    collective = open_collective(name, rank, 2, address, timeout_s=TIMEOUT_S)
    chain = Chain(collective, rank)
    chain.step()
    graph = captured(chain.step)
    torch.cuda.synchronize()
    took_s = 0.0
    if rank == 0:
        graph.replay()
        time.sleep(0.2)
        assert not torch.cuda.current_stream().query()
        began = time.monotonic()
        collective.abandon()
        torch.cuda.synchronize()
        took_s = time.monotonic() - began
    del graph
    collective.close()
    return took_s


def check_alike(found: list[Any]) -> None:
    (wrong, eager, replayed), other = found
    assert not wrong
    assert eager == replayed
    assert found[0] == other


@pytest.mark.multi_gpu
@two_cards
@pytest.mark.parametrize("name", ["nccl", "peer"])
def test_sums_of_two_cards(ranks: Ranks, name: str) -> None:
    check_alike(ranks.run(talk, name, free_address(), None, REPLAYS))


@pytest.mark.multi_gpu
@two_cards
@pytest.mark.parametrize("name", ["nccl", "peer"])
def test_who_waits_in_a_captured_step_is_freed(ranks: Ranks, name: str) -> None:
    assert ranks.run(wait_alone, name, free_address())[0] < 2


@pytest.mark.gpu
@one_card
def test_sums_of_two_processes_on_one_card(ranks: Ranks) -> None:
    """They take turns on it, so it is slow."""
    check_alike(ranks.run(talk, "peer", free_address(), 0, 20))


class Alone:
    """The kernel as a collective, without processes."""

    def __init__(self, kernel: PeerSum) -> None:
        self._kernel = kernel
        self.all_reduce_norm = kernel.sum_norm

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        self._kernel.sum(x)
        return x

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        out = x.new_empty((2, *x.shape))
        self._kernel.gather(x, out)
        return list(out.unbind())


@pytest.mark.gpu
@one_card
@torch.inference_mode()
def test_two_streams_of_one_process() -> None:
    """Captured steps of two ranks, replayed at once, do what they do without a graph."""
    device = torch.device("cuda", torch.cuda.current_device())
    memory = [torch.zeros(memory_bytes(2), dtype=torch.uint8, device=device) for _ in range(2)]
    places = [one.data_ptr() for one in memory]
    ranks = [PeerSum(rank, places, device, TIMEOUT_S) for rank in range(2)]
    kernels = [Alone(one) for one in ranks]
    for one, kernel in zip(ranks, kernels, strict=True):  # kernels are loaded: later that waits
        one.abandon()
        Chain(kernel, 0).step()
        torch.cuda.synchronize()
        one._abandoned.zero_()
        one._calls.zero_()
    for lent in memory:
        lent.zero_()
    eager, replayed = ([Chain(kernel, n) for n, kernel in enumerate(kernels)] for _ in range(2))
    graphs = [captured(chain.step) for chain in replayed]
    streams = [torch.cuda.Stream() for _ in ranks]  # type: ignore[no-untyped-call]
    for stream in streams:  # memory that the steps will take: later that waits, too
        with torch.cuda.stream(stream):
            kept = [torch.empty(1 << 14, device=device) for _ in range(64)]
            del kept
    torch.cuda.synchronize()
    for turn in range(REPLAYS):
        for stream, chain in zip(streams, eager, strict=True):
            with torch.cuda.stream(stream):
                chain.step()
        if turn % 10 == 9:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    for turn in range(REPLAYS):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        if turn % 10 == 9:
            torch.cuda.synchronize()
    torch.cuda.synchronize()
    assert len({chain.digest() for chain in (*eager, *replayed)}) == 1


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"hidden_size": 64, "head_dim": 16},
    "qwen2": {
        "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 64,
        "head_dim": 16,
    },
}  # fmt: skip


@pytest.mark.multi_gpu
@two_cards
@pytest.mark.parametrize("collective", ["peer", "nccl"])
@pytest.mark.parametrize("family", FAMILIES)
def test_two_cards_give_the_tokens_of_one(tmp_path: Path, family: str, collective: str) -> None:
    folder = make_tiny_model(tmp_path, **FAMILIES[family])
    options: dict[str, Any] = {
        "device": "cuda", "dtype": "float32", "speculate": "off", "block_size": 16,
        "max_model_len": 128, "num_blocks": 200, "max_num_seqs": 16, "warm_up": "off",
    }  # fmt: skip
    with LLM(folder, **options) as one:
        want = serve(one.engine, requests(one.spec.vocab_size), aborts=False)
        ids = one.encode("Once upon a time there was a small house by the sea.")
        logits = one.logits(ids)
    with LLM(folder, tp=2, collective=collective, **options) as two:
        assert two.resolved.max_captured_rows > 0
        got = serve(two.engine, requests(two.spec.vocab_size), aborts=False)
        torch.testing.assert_close(two.logits(ids), logits, rtol=1e-4, atol=1e-4)
    assert got == want


@pytest.mark.multi_gpu
@two_cards
def test_what_is_foreseen_is_captured_by_both(tmp_path: Path) -> None:
    with LLM(make_tiny_model(tmp_path), tp=2, device="cuda", num_blocks=200, max_num_seqs=4) as two:
        assert two.resolved.collective == "peer"
        found = two.generate(["Once upon"] * 4, SamplingParams(temperature=0.0, max_tokens=16))
    assert len({one.text for one in found}) == 1
