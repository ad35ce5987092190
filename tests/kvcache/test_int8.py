"""Keys and values of 8 bits with scales. What is shared with other formats is in test_coded."""

from __future__ import annotations

import pytest
import torch

from ridgeline.kernels.paged_kv import encode_8
from tests.kvcache.test_coded import cache, rows, slots


def test_what_was_read_can_be_written_again() -> None:
    layer = cache("int8").layers[0]
    layer.write(slots(4, 9), rows(2))
    once = layer.gather(slots(4, 9))
    layer.write(slots(11, 12), once.flatten(1))
    torch.testing.assert_close(layer.gather(slots(11, 12)), once, rtol=1e-3, atol=1e-5)


def test_codes_use_all_of_their_range() -> None:
    codes_THD, scales_TH = encode_8(torch.tensor([[[-3.0, 1.5, 0.0, 3.0]]]))
    assert codes_THD.tolist() == [[[-127, 63, 0, 127]]] or codes_THD.tolist() == [
        [[-127, 64, 0, 127]]
    ]
    assert scales_TH.item() == pytest.approx(3 / 127, rel=1e-3)
