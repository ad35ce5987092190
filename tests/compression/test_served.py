"""What was quantized here is served as it is: the numbers of the dequantized model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ridgeline import LLM
from ridgeline.compression.checkpoints import write_plain
from ridgeline.compression.stream import Job, quantize_model
from ridgeline.formats import CHECKPOINT
from tests.compression.test_stream import CONFIGS, method, texts, written
from tests.conftest import TEST_DEVICE
from tests.portable import only_portable

OPTIONS: dict[str, Any] = {"dtype": "float32", "device": TEST_DEVICE, "num_blocks": 32}
PROMPT = [1, 17, 60, 33, 5, 88]


@pytest.mark.parametrize("bits", [None, 4, 3])
@pytest.mark.parametrize("name", CONFIGS)
def test_every_family(
    name: str, bits: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`bits` None: some layers have 8 and some 4."""
    only_portable(monkeypatch)
    model, out, plain = (tmp_path / folder for folder in ("model", "out", "plain"))
    written(model, name)
    mixed = (8, 4, 8) if bits is None else None
    how = method("rtn", model, bits=bits or 4, symmetric=bits != 3)
    quantize_model(Job(model, out, how, texts(), bits=mixed))
    write_plain(out, plain)
    served, wanted = LLM(str(out), **OPTIONS), LLM(str(plain), **OPTIONS)
    assert served.resolved.weight_format == CHECKPOINT
    torch.testing.assert_close(served.logits(PROMPT), wanted.logits(PROMPT), atol=1e-4, rtol=1e-4)
    unpacked = LLM(str(out), weight_format="plain", **OPTIONS)
    assert torch.equal(unpacked.logits(PROMPT), wanted.logits(PROMPT))
    for llm in (served, unpacked):
        [weights] = [row for row in llm.memory if row.what == "weights"]
        assert weights.measured == weights.predicted
