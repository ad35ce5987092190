"""How do ranks on the GPUs of one host talk about little? By one kernel that writes into the memory
of all others (`peer_sum.cu`). What is longer goes by NCCL.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from ridgeline.distributed.nccl import Nccl
from ridgeline.errors import ConfigError, EngineFault
from ridgeline.kernels import nvrtc
from ridgeline.kernels.launching import launches_early

ELEMENTS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}
PACK = 16  # bytes that a thread takes at once
CTAS, SLOT_PACKS = 128, 1024  # places of a rank in the memory of each other, and what each holds
MOST_BYTES = CTAS * SLOT_PACKS * PACK  # of one kernel's message
MOST_THREADS, MOST_PACKS = 512, 4  # of a CTA; of a row, for each of them
PLAIN_THREADS = 512  # of a CTA that sums without a norm
HANDLE_BYTES = 64  # CU_IPC_HANDLE_SIZE
LAZY_PEER_ACCESS = 1  # CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS


def memory_bytes(size: int) -> int:
    """That each rank lends the others: a number beside each four bytes, and two calls."""
    return 2 * size * 2 * MOST_BYTES


class PeerSum:
    """One rank's side of the kernel. `memory`: where that of each rank is in this process, zeros
    before the first call."""

    def __init__(
        self, rank: int, memory: Sequence[int], device: torch.device, timeout_s: float
    ) -> None:
        self._rank, self._size, self._device = rank, len(memory), device
        self._memory = (ctypes.c_uint64 * len(memory))(*memory)
        self._timeout_ns = ctypes.c_uint64(int(timeout_s * 1e9))
        self._calls = torch.zeros(CTAS, dtype=torch.int32, device=device)
        self._abandoned = torch.zeros(1, dtype=torch.int32, pin_memory=True)

    def takes(self, x: torch.Tensor) -> bool:
        fits = x.dtype in ELEMENTS and x.nbytes % PACK == 0 == x.data_ptr() % PACK
        return fits and x.is_contiguous()

    def sum(self, x: torch.Tensor) -> None:
        """In place."""
        flat, size = x.view(-1), MOST_BYTES // x.itemsize
        for begin in range(0, x.numel(), size):
            part = flat[begin : begin + size]
            self._plain(part, part, 0, gathers=False)

    def gather(self, x: torch.Tensor, out: torch.Tensor) -> None:
        """`out`: as many of x as there are ranks."""
        flat, size, stride = x.view(-1), MOST_BYTES // x.itemsize, x.nbytes // PACK
        into = out.view(self._size, -1)
        for begin in range(0, x.numel(), size):
            here = slice(begin, begin + size)
            self._plain(flat[here], into[:, here], stride, gathers=True)

    def takes_rows(self, x_TE: torch.Tensor, residual_TE: torch.Tensor) -> bool:
        size = x_TE.shape[1] * x_TE.itemsize
        rows = SLOT_PACKS * PACK // size * CTAS if size else 0
        return (
            x_TE.dtype in ELEMENTS
            and x_TE.dtype == residual_TE.dtype
            and size <= MOST_THREADS * MOST_PACKS * PACK
            and x_TE.shape[0] <= rows
            and all(
                x.stride(1) == 1
                and size % PACK == x.stride(0) * x.itemsize % PACK == x.data_ptr() % PACK == 0
                for x in (x_TE, residual_TE)
            )
        )

    def sum_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        """As `Collective.all_reduce_norm`."""
        rows, row_packs = x_TE.shape[0], x_TE.shape[1] * x_TE.itemsize // PACK
        normed_TE = torch.empty(x_TE.shape, dtype=x_TE.dtype, device=x_TE.device)
        threads = min(MOST_THREADS, -(-row_packs // 32) * 32)
        packs = -(-row_packs // threads)
        strides = [x.stride(0) * x.itemsize // PACK for x in (x_TE, residual_TE)]
        self._launch(
            x_TE, (threads, packs, True, False), min(rows, CTAS),
            x_TE, ctypes.c_int64(strides[0]), residual_TE, ctypes.c_int64(strides[1]), weight_E,
            normed_TE, ctypes.c_int64(0), ctypes.c_float(eps), ctypes.c_int32(row_packs),
            ctypes.c_int64(rows * row_packs),
        )  # fmt: skip
        return normed_TE

    def abandon(self) -> None:
        """No wait lasts any longer."""
        self._abandoned.fill_(1)

    def _plain(self, x: torch.Tensor, out: torch.Tensor, out_stride: int, *, gathers: bool) -> None:
        packs = x.nbytes // PACK
        row = PLAIN_THREADS
        nothing = ctypes.c_int64(0)
        self._launch(
            x, (PLAIN_THREADS, 1, False, gathers), min(-(-packs // row), CTAS),
            x, ctypes.c_int64(row), nothing, nothing, nothing, out, ctypes.c_int64(out_stride),
            ctypes.c_float(0.0), ctypes.c_int32(row), ctypes.c_int64(packs),
        )  # fmt: skip

    def _launch(
        self, like: torch.Tensor, shape: tuple[int, int, bool, bool], ctas: int, *args: nvrtc.Arg
    ) -> None:
        if ctas == 0:
            return
        threads, packs, norms, gathers = shape
        pdl = launches_early(self._device)
        defines = {
            "ELEMENT": ELEMENTS[like.dtype], "RANKS": self._size, "THREADS": threads,
            "PACKS": packs, "CTAS": CTAS, "SLOT_PACKS": SLOT_PACKS, "NORM": int(norms),
            "GATHER": int(gathers), "DEPENDENT": int(pdl),
        }  # fmt: skip
        kernel = nvrtc.kernel("peer_sum.cu", "peer_sum", defines, self._device)
        more = self._memory, self._calls, self._abandoned, self._timeout_ns
        kernel.launch((ctas, 1, 1), threads, 0, [*args, *more, ctypes.c_int32(self._rank)], pdl=pdl)


class _Handle(ctypes.Structure):
    """CUipcMemHandle, which is passed by value."""

    _fields_ = (("content", ctypes.c_byte * HANDLE_BYTES),)


class PeerMemory:
    """Some of this GPU's that other processes may write to, and what they lend. Its methods raise
    EngineFault."""

    def __init__(self) -> None:
        self._driver = nvrtc.cuda_driver()
        self._lent = ctypes.c_uint64()
        self._borrowed: list[ctypes.c_uint64] = []

    def lend(self, num_bytes: int) -> bytes:
        """Zeros; what others find them by."""
        driver, size, handle = self._driver, ctypes.c_size_t(num_bytes), _Handle()
        code = driver.cuMemAlloc_v2(ctypes.byref(self._lent), size)
        code = code or driver.cuMemsetD8_v2(self._lent, ctypes.c_ubyte(0), size)
        code = code or driver.cuCtxSynchronize()
        code = code or driver.cuIpcGetMemHandle(ctypes.byref(handle), self._lent)
        nvrtc.check_driver(code, "lending memory to other ranks")
        return bytes(handle)

    def places(self, handles: Sequence[bytes], rank: int) -> list[int]:
        """Of each rank's, in this process."""
        found = []
        for other, handle in enumerate(handles):
            place = self._lent
            if other != rank:
                place, shared = ctypes.c_uint64(), _Handle.from_buffer_copy(handle)
                open_handle = self._driver.cuIpcOpenMemHandle_v2
                code = open_handle(ctypes.byref(place), shared, LAZY_PEER_ACCESS)
                nvrtc.check_driver(code, f"opening the memory of rank {other}")
                self._borrowed.append(place)
            found.append(place.value)
        return found

    def close(self) -> None:
        for place in self._borrowed:
            self._driver.cuIpcCloseMemHandle(place)
        self._borrowed.clear()
        self._driver.cuMemFree_v2(self._lent)
        self._lent = ctypes.c_uint64()


class Peer(Nccl):
    """Ranks that share a GPU, which NCCL refuses, send in pieces what is long."""

    # Up to so many bytes the kernel is the faster way: between two H200s 2.5 us and NCCL 17.8 for
    # 16 KiB, 15 and 41 for 2 MiB, 31 and 45 for 4, 61 and 58 for 8.
    most_summed = most_gathered = 2 * MOST_BYTES
    fuses_norms = True

    def meet(self, rank: int) -> None:
        self._peers: PeerSum | None = None
        handle, problem = bytes(HANDLE_BYTES), ""
        with torch.cuda.device(self.device):
            self._memory = PeerMemory()
            try:
                handle = self._memory.lend(memory_bytes(self.size))
            except EngineFault as fault:
                problem = str(fault)
            card = str(torch.cuda.get_device_properties(self.device).uuid)
            told = self.all_gather(torch.tensor(list(handle + card.encode()), dtype=torch.uint8))
            every = [bytes(one.tolist()) for one in told]
            memory: list[int] = []
            try:
                if not problem:
                    memory = self._memory.places([one[:HANDLE_BYTES] for one in every], rank)
            except EngineFault as fault:
                problem = str(fault)
        if self.all_reduce(torch.tensor([bool(problem)], dtype=torch.int32)).item():
            self.close()
            raise ConfigError(
                f"rank {rank} cannot write into the memory of the other GPUs:"
                f" {problem or 'another rank says why'}; use --collective nccl"
            )
        self._is_shared = len({one[HANDLE_BYTES:] for one in every}) < self.size
        if not self._is_shared:
            super().meet(rank)
        self._peers = PeerSum(rank, memory, self.device, self.timeout_s)

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        if not self._takes(x, self.most_summed):
            return super().all_reduce(x)
        self.peers.sum(x)
        return x

    def all_reduce_norm(
        self, x_TE: torch.Tensor, residual_TE: torch.Tensor, weight_E: torch.Tensor, eps: float
    ) -> torch.Tensor:
        if x_TE.nbytes <= self.most_summed and self.peers.takes_rows(x_TE, residual_TE):
            return self.peers.sum_norm(x_TE, residual_TE, weight_E, eps)
        return super().all_reduce_norm(x_TE, residual_TE, weight_E, eps)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        if not self._takes(x, self.most_gathered):
            return super().all_gather(x)
        out = x.new_empty((self.size, *x.shape))
        self.peers.gather(x, out)
        return list(out.unbind())

    def _takes(self, x: torch.Tensor, most: int) -> bool:
        return x.is_cuda and (self._is_shared or x.nbytes <= most) and self.peers.takes(x)

    @property
    def peers(self) -> PeerSum:
        if self._peers is None:
            raise EngineFault("the ranks do not talk any more")
        return self._peers

    def abandon(self) -> None:
        if self._peers is not None:
            self._peers.abandon()
        super().abandon()

    def close(self) -> None:
        super().close()
        torch.cuda.synchronize(self.device)
        self._peers = None
        self._memory.close()
