"""Do several ranks that draft say what one rank without drafts says, in any company?

All draft methods, through the whole engine: shared prefixes, chunks, preemptions, forks, aborts,
and as many drafts in each step as a coin says. Beside tensor parallelism nothing drafts yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from ridgeline import LLM
from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu import native
from tests.distributed.prepared import prepared
from tests.distributed.test_recorded import FAMILIES as RECORDED
from tests.distributed.test_recorded import must_record as must_record
from tests.distributed.test_recorded import said, write
from tests.executor.test_draft_company import Coin
from tests.speculation.test_heads import head_folder, target_folder
from tests.test_pipeline import LITTLE, check_engine
from tests.test_ranks import OPTIONS, SEED, requests, serve
from tests.thinning import slow

pytestmark = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")
MOST = 3
METHODS = ("ngram", *slow("suffix"), "early:1", "draft", "eagle3", "mtp")


def target(folder: Path, method: str) -> tuple[Path, str]:
    """A model, and what its engine is asked to draft by."""
    if method == "mtp":
        return target_folder(folder / "model", "deepseek"), f"mtp:{MOST}"
    path = target_folder(folder / "model", "eagle3")
    if method == "eagle3":
        return path, f"eagle3:{head_folder(folder / 'head')}:{MOST}"
    if method == "draft":  # the model itself, so that drafts are right
        return path, f"draft:{path}:{MOST}"
    return path, f"{method}:{MOST}"


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[LLM]:
    with prepared(), LLM(folder, **OPTIONS | LITTLE | options) as llm:
        yield llm


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("tp", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_random_company(method: str, tp: int, tmp_path: Path) -> None:
    folder, speculate = target(tmp_path, method)
    with opened(folder) as one:
        want = serve(one.engine, requests(one.spec.vocab_size), aborts=False)
    with opened(folder, tp=tp, speculate=speculate) as llm:
        coin = llm.engine.scheduler.draft_lengths = Coin(MOST, SEED)
        check_engine(llm, want)
        assert coin.num_verified > 50
        if method == "draft":
            assert coin.num_right > 0.5 * coin.num_verified
        said = {decision.field: decision.got for decision in llm.resolved.decisions}
        assert said["speculate"].startswith(method.partition(":")[0])


@pytest.mark.usefixtures("must_record")
@pytest.mark.parametrize("speculate", ["ngram:3", "early:2:3", "draft"])
def test_steps_with_drafts_are_recorded(speculate: str, tmp_path: Path) -> None:
    config = RECORDED["qwen2"]
    write(tmp_path, config)
    if speculate == "draft":
        speculate = f"draft:{tmp_path}:3"
    drafted, num_captured = said(tmp_path, tp=2, speculate=speculate)
    assert 4 <= num_captured <= 16
    assert drafted == said(tmp_path, tp=2)[0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"pp": 2}, "no captured step can wait for the stage before it; leave out pp"),
        ({"pp": 2, "tp": 2}, "no captured step can wait for the stage before it; leave out pp"),
        ({"collective": "gloo", "tp": 2}, "ranks talk over gloo, .* use collective shared"),
    ],
)
def test_what_is_refused(options: dict[str, Any], words: str, tmp_path: Path) -> None:
    folder = target_folder(tmp_path / "model", "eagle3")
    with pytest.raises(ConfigError, match=f"'ngram': drafts need captured steps, and {words}"):
        LLM(folder, **OPTIONS | options | {"speculate": "ngram"})
