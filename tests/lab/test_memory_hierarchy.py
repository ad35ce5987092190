"""Are sizes and speeds of memories those that are published, and does what has no room move on?"""

from __future__ import annotations

import pytest

from ridgeline.cost.hardware import find_device
from ridgeline.cost.hierarchy import DISK, HOST, LAST_CACHE, MEMORY, SRAM
from ridgeline.lab.page import read_inputs
from ridgeline.lab.pages.memory_hierarchy import PAGE, Inputs, Level, answer


def levels(inputs: Inputs) -> dict[str, Level]:
    return {level.name: level for level in answer(inputs).drawing.levels}


def test_an_a100_has_the_memories_of_the_teaching_texts() -> None:
    """SRAM 20.7 MB at 19 TB/s, 40 GB at 1.555 TB/s, PCIe 4.0 x16 at most 31.5 GB/s each way, and
    the 40 MB of L2 that the texts leave out."""
    found = levels(Inputs(device="a100-40-sxm"))
    assert found[SRAM].bytes == pytest.approx(20.7e6, rel=0.03)
    assert found[SRAM].bytes_per_s == pytest.approx(19e12, rel=0.03)
    assert found[LAST_CACHE].bytes == 40 << 20
    assert (found[MEMORY].bytes, found[MEMORY].bytes_per_s) == (40e9, 1.555e12)
    assert found[HOST].bytes_per_s == pytest.approx(31.5e9, rel=0.02)


def test_rates_of_sram_follow_from_peaks() -> None:
    """A multiprocessor of the A100 does 2,048 operations a clock, of the H100 4,096, others 1,024
    or (sold for games) 512, and each reads 128 B: so bytes a second are a share of the peak."""
    shares = {
        "a100-80-sxm": 1 / 16, "h100-sxm": 1 / 32, "h100-pcie": 1 / 32, "a10": 1 / 8, "l4": 1 / 8,
        "l40s": 1 / 8, "rtx-3090": 1 / 4, "rtx-4090": 1 / 4,
    }  # fmt: skip
    for name, share in shares.items():
        device = find_device(name)
        assert device.sram is not None
        assert device.sram.bytes_per_s == pytest.approx(device.peak("bf16") * share, rel=0.02)


def test_weights_that_have_no_room_come_from_the_host() -> None:
    """70.55 B parameters of 2 B on 80 GB, of which 72 may be taken: 69.1 GB lie in the host."""
    drawing = answer(
        Inputs(model="llama-3.1-70b", device="a100-80-sxm", users=1, context=16)
    ).drawing
    away = next(level for level in drawing.levels if level.name == HOST)
    weights = 70.55e9 * 2
    assert away.held[0].bytes == pytest.approx(weights - 72e9, rel=1e-3)
    read = weights - 128_256 * 8192 * 2  # a row of the embedding, all else
    slow = away.held[0].bytes / weights * read / 32e9
    assert drawing.step_s[HOST] == pytest.approx(slow, rel=2e-3)


def test_what_the_host_cannot_hold_is_on_disk() -> None:
    drawing = answer(Inputs(model="llama-3.1-405b", host_gb=64)).drawing
    held = {level.name: sum(item.bytes for item in level.held) for level in drawing.levels}
    assert held[MEMORY] == pytest.approx(72e9)
    assert held[HOST] == pytest.approx(64e9)
    assert held[DISK] == pytest.approx(2 * 405.85e9 - 136e9 + 8 * 4096 * 516_096, rel=1e-3)


def test_the_memory_wall_of_the_teaching_texts() -> None:
    """140 GB at 2 TB/s are 70 ms: here 141.1 GB at the 2.039 TB/s of the data sheet."""
    found = levels(Inputs(model="llama-3.1-70b", device="a100-80-sxm"))[MEMORY]
    assert found.read_s == pytest.approx(141.1 / 2039, rel=1e-3)


def test_a_processor_has_no_link_to_its_own_memory() -> None:
    assert list(levels(Inputs(device="epyc-9654"))) == [LAST_CACHE, MEMORY, DISK]


@pytest.mark.parametrize("preset", [preset.name for preset in PAGE.presets])
def test_presets_are_inputs(preset: str) -> None:
    chosen = next(one for one in PAGE.presets if one.name == preset)
    assert answer(read_inputs(PAGE, chosen.inputs)).sentence  # type: ignore[arg-type]
