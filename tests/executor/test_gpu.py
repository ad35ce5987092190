"""On a GPU: nothing in `submit` waits for it, and packed transfers keep every number."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.devices import open_device
from ridgeline.executor.local import LocalExecutor
from ridgeline.executor.transfer import Array, CudaTransfer
from ridgeline.kvcache import KVCache
from ridgeline.request import SamplingParams
from tests.executor.rig import VOCAB, Host, make_decoder

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

KINDS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(seed=1, top_k=9, top_p=0.9, min_p=0.01, logprobs=3),
    "nucleus": SamplingParams(seed=2, top_p=0.8, logit_bias={4: 1.0}),
    "penalised": SamplingParams(
        seed=3, repetition_penalty=1.2, min_tokens=9, stop_token_ids=[1, 2], prompt_logprobs=2
    ),
}


class Silent:
    """A decoder whose answers do not depend on anything, so that only our own code may wait."""

    def __init__(self) -> None:
        self.device = torch.device("cuda")
        self.rows_VV = torch.randn(VOCAB, VOCAB, device=self.device)
        self.layers: list[Any] = []

    def forward(self, batch: Any, kv: KVCache) -> torch.Tensor:
        wanted, ids_T = batch.logits_indices, batch.token_ids_T
        return self.rows_VV.index_select(0, ids_T if wanted is None else ids_T[wanted.rows_R])

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden.float()


@pytest.fixture
def no_waiting() -> Iterator[None]:
    torch.cuda.synchronize()
    yield
    torch.cuda.set_sync_debug_mode("default")


def make_executor(decoder: Any) -> LocalExecutor:
    spec = make_decoder().spec
    device = open_device("cuda")
    groups = kv_groups(spec)
    kv = KVCache(spec, groups, 100, 4, torch.float32, device.torch_device)
    return LocalExecutor(
        decoder,
        kv,
        device,
        num_blocks=100,
        block_size=4,
        groups=groups,
        vocab_size=VOCAB,
        max_model_len=512,
    )


def run_all(host: Host, mode: str) -> dict[str, list[int]]:
    """Plans of all sorts, submitted in the given sync debug mode; the tokens of each request."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it says that the mode is a prototype
        torch.cuda.set_sync_debug_mode(mode)
    prompts = {name: range(i, i + 9 + i) for i, name in enumerate(KINDS)}
    for name, sampling in KINDS.items():
        host.add(name, prompts[name], sampling)
    futures = [host.submit(dict.fromkeys(KINDS, 5))]
    futures += [host.submit({name: 4 + i for i, name in enumerate(KINDS)})]
    host.fork("child", "greedy", KINDS["nucleus"])
    futures += [host.submit(dict.fromkeys([*KINDS, "child"], 1)) for _ in range(6)]
    torch.cuda.set_sync_debug_mode("default")
    for future in futures:
        host.take_in(future.result())
    return {name: host.output(name) for name in [*KINDS, "child"]}


@pytest.mark.usefixtures("no_waiting")
def test_submit_never_waits() -> None:
    decoder = Silent()
    warm = run_all(Host(make_executor(decoder)), "default")  # fills the pinned pool
    assert run_all(Host(make_executor(decoder)), "error") == warm


def test_packed_arrays_arrive_as_they_were() -> None:
    rng = np.random.default_rng(1)
    arrays: list[Array] = [
        rng.integers(-(1 << 60), 1 << 60, (3, 5)),
        rng.integers(0, 1 << 30, (7, 9)).astype(np.int32)[:, ::2],
        np.zeros((2, 0), np.int64),
        rng.normal(size=11).astype(np.float32),
        np.array([5], np.int64),
    ]
    sent = CudaTransfer(torch.device("cuda", 0)).send_all(arrays)
    for array, tensor in zip(arrays, sent, strict=True):
        assert tensor.is_cuda
        assert np.array_equal(tensor.cpu().numpy(), array)
        assert tensor.cpu().numpy().dtype == array.dtype


def test_results_are_ours_although_more_work_follows() -> None:
    transfer = CudaTransfer(torch.device("cuda", 0))
    source = torch.arange(1000, device="cuda")
    fetched = [(i, transfer.fetch(source + i), transfer.mark()) for i in range(20)]
    for i, tensor, mark in fetched:
        assert mark is not None
        mark.synchronize()
        assert torch.equal(tensor, torch.arange(1000) + i)


def test_results_come_to_any_thread_and_in_any_stream() -> None:
    transfer = CudaTransfer(torch.device("cuda", 0))
    source = torch.arange(5000, device="cuda").view(50, 100)
    there = torch.zeros(100, dtype=torch.int64, device="cuda")
    found: list[bool] = []

    def work(stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            for row in range(50):
                transfer.send_into(np.arange(100) + row, there)
                fetched = transfer.fetch(source[row]), transfer.fetch(there), transfer.mark()
                assert fetched[2] is not None
                fetched[2].synchronize()
                found.append(fetched[0].tolist() == list(range(100 * row, 100 * row + 100)))
                found.append(fetched[1].tolist() == list(range(row, row + 100)))
                fetched[2].release()

    torch.cuda.synchronize()
    other = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for stream in (torch.cuda.default_stream(), other):
        thread = Thread(target=work, args=(stream,))
        thread.start()
        thread.join()
    assert len(found) == 200
    assert all(found)


def test_bytes_that_are_no_whole_words() -> None:
    transfer = CudaTransfer(torch.device("cuda", 0))
    source = torch.arange(4097, dtype=torch.int32, device="cuda")
    for num in (1, 2, 3, 7, 255, 257, 4097):
        for first in (0, 1):  # the second is at no multiple of a word
            fetched, mark = transfer.fetch(source[first:num]), transfer.mark()
            assert mark is not None
            mark.synchronize()
            assert fetched.tolist() == list(range(first, num))
            mark.release()
