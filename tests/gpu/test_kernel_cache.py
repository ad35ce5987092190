"""On a GPU a second start compiles nothing that the first has compiled."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

COUNTS = re.compile(r"(\d+) kernels compiled in [\d.]+ s, (\d+) found in")


def start(home: Path) -> tuple[int, int, str]:
    """Kernels compiled and found until the first token, and the answer."""
    words = [sys.executable, "-m", "ridgeline.cli.main", "generate", "demo:draft", "-p", "Once"]
    words += ["--device", "cuda", "--max-tokens", "4", "--temperature", "0", "-v"]
    words += ["--kv-cache-memory-bytes", "256MiB"]
    environ = {k: v for k, v in os.environ.items() if k != "TRITON_CACHE_DIR"}
    done = subprocess.run(
        words,
        env=environ | {"XDG_CACHE_HOME": str(home)},
        capture_output=True,
        text=True,
        check=True,
        timeout=300,
    )
    found = COUNTS.search(done.stderr)
    assert found is not None, done.stderr
    return int(found[1]), int(found[2]), done.stdout


def test_kernels_are_kept(tmp_path: Path) -> None:
    compiled, _, answer = start(tmp_path)
    assert compiled > 0
    again, found_again, same = start(tmp_path)
    assert (again, same) == (0, answer)
    assert found_again >= compiled
    [folder] = (tmp_path / "ridgeline" / "kernels").iterdir()
    assert folder.name.startswith("ridgeline-")
