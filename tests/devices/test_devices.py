"""A device is found by name, and what is uploaded comes back."""

from __future__ import annotations

import pytest
import torch

from ridgeline.devices import open_device
from ridgeline.errors import ConfigError
from tests.conftest import TEST_DEVICE


def test_device_under_test() -> None:
    device = open_device(TEST_DEVICE)
    assert device.name.startswith(TEST_DEVICE)
    sent = device.upload([1, 2, 1 << 40])
    assert sent.device.type == device.torch_device.type
    assert sent.dtype == torch.int64
    assert device.upload([7], torch.int32).dtype == torch.int32
    assert device.download(sent).tolist() == [1, 2, 1 << 40]
    device.synchronize()
    assert 0 < device.memory_free() <= device.memory_total()
    assert device.best_dtype in ("float32", "bfloat16", "float16")
    assert device.describe()


def test_auto_finds_a_device() -> None:
    wanted = "cuda" if torch.cuda.is_available() else "cpu"
    assert open_device("auto").torch_device.type == wanted


@pytest.mark.parametrize("name", ["tpu", "cuda:x", "cuda:", "", "cpu:0", "meta"])
def test_unknown_names(name: str) -> None:
    with pytest.raises(ConfigError, match="use auto, cpu, cuda or cuda:N"):
        open_device(name)


def test_a_gpu_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match=r"use cpu|there are \d+ GPUs"):
        open_device("cuda:99")
