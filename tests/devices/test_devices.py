"""A device is found by name, and what is uploaded comes back."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from ridgeline.devices import open_device, wake_driver
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


@pytest.mark.parametrize("name", ["cpu", "tpu", "cuda:x", ""])
def test_what_is_no_gpu_by_its_name_is_not_woken(name: str) -> None:
    assert wake_driver(name) is None


@pytest.mark.parametrize("driver", ["libno-such-driver.so.1", "libc.so.6"])
def test_a_driver_that_is_none_is_left_to_open_device(driver: str) -> None:
    """Missing, or without the calls: nothing is raised in the thread, and it ends."""
    thread = wake_driver("cuda:0", driver)
    assert thread is not None
    thread.join(30)
    assert not thread.is_alive()


def test_waking_does_not_import_torch() -> None:
    code = "import sys; from ridgeline.devices import wake_driver; sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], check=False, timeout=60)
    assert done.returncode == 0
