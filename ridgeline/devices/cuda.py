"""How do we run on one NVIDIA GPU?"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ridgeline.clock import WallClock
from ridgeline.errors import ConfigError
from ridgeline.figures import scaled
from ridgeline.log import say

BFLOAT16_CAPABILITY = (8, 0)
DRIVER = 2 << 30  # bytes; a context and the driver's own part take less

logger = logging.getLogger(__name__)


class CudaDevice:
    """GPU `index`. Opening it switches TF32 off, so that float32 means float32."""

    def __init__(self, index: int) -> None:
        if not torch.cuda.is_available():
            raise ConfigError("device cuda was asked for, but torch finds no CUDA GPU; use cpu")
        count = torch.cuda.device_count()
        if index >= count:
            raise ConfigError(f"device cuda:{index} does not exist; there are {count} GPUs")
        self.name = f"cuda:{index}"
        self.torch_device = torch.device("cuda", index)
        torch.cuda.set_device(self.torch_device)
        torch.set_float32_matmul_precision("highest")
        capable = torch.cuda.get_device_capability(self.torch_device) >= BFLOAT16_CAPABILITY
        self._pool: Any = None
        self.best_dtype = "bfloat16" if capable else "float16"

    def describe(self) -> str:
        return torch.cuda.get_device_name(self.torch_device)

    def memory_total(self) -> int:
        return torch.cuda.mem_get_info(self.torch_device)[1]

    def memory_free(self) -> int:
        """Free for the driver, plus what torch's allocator holds without using it."""
        free = torch.cuda.mem_get_info(self.torch_device)[0]
        reserved = torch.cuda.memory_reserved(self.torch_device)
        return free + reserved - torch.cuda.memory_allocated(self.torch_device)

    def memory_bound(self) -> str:
        """The driver's own part, some hundred megabytes, belongs to no process."""
        free, total = torch.cuda.mem_get_info(self.torch_device)
        held = total - free - torch.cuda.memory_reserved(self.torch_device)
        return f"others hold {scaled(held, 'B')} of {scaled(total, 'B')}" if held > DRIVER else ""

    def num_peers(self) -> int:
        here = self.torch_device.index
        others = (card for card in range(torch.cuda.device_count()) if card != here)
        return sum(torch.cuda.can_device_access_peer(here, card) for card in others)

    def upload(self, values: Sequence[int], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        pinned = torch.tensor(values, dtype=dtype, pin_memory=True)
        return pinned.to(self.torch_device, non_blocking=True)

    def download(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.cpu()

    def capture(self, launch: Callable[[], None], what: str = "a step") -> Callable[[], None]:
        """A CUDA graph. Kernels are compiled and libraries wake up in a first, plain run; all
        graphs share one pool, so they must run one after the other. How long that took the host
        is said at INFO."""
        clock = WallClock()
        begun = clock.now()
        stream = torch.cuda.Stream(self.torch_device)  # type: ignore[no-untyped-call]
        stream.wait_stream(torch.cuda.current_stream(self.torch_device))
        with torch.cuda.stream(stream):
            launch()
        torch.cuda.current_stream(self.torch_device).wait_stream(stream)
        launched = clock.now()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, stream=stream):
            launch()
        say(
            logger, logging.INFO, f"captured {what}", first_run_s=f"{launched - begun:.3f}",
            capture_s=f"{clock.now() - launched:.3f}",
        )  # fmt: skip
        replay: Callable[[], None] = graph.replay
        return replay

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.torch_device)
