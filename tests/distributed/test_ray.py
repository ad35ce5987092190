"""Are ranks that Ray places the same as one, refused in time, and gone at the end? On a real
cluster of this machine."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray", reason="needs ridgeline[ray]")

from ridgeline import LLM, SamplingParams
from ridgeline.distributed import launch_ray
from ridgeline.distributed.launch_ray import Cluster, Placed, why_not
from ridgeline.errors import ConfigError, EngineLost
from tests.server.running import until
from tests.tiny_model import make_tiny_model

OPTIONS: dict[str, Any] = {
    "device": "cpu", "dtype": "float32", "speculate": "off", "threads": 1, "block_size": 8,
    "max_model_len": 128,
}  # fmt: skip
PROMPTS = ["Once upon a time", "The sea was", "A small house by the"]
SAMPLING = SamplingParams(max_tokens=12, temperature=0.8, seed=7, ignore_eos=True)
NUM_CPUS = 4


def descendants(pid: int) -> set[int]:
    """Those that live."""
    parents: dict[int, int] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            if words[0] != "Z":
                parents[int(path.parent.name)] = int(words[1])
    found: set[int] = set()
    while more := {one for one, parent in parents.items() if parent in {pid, *found}} - found:
        found |= more
    return found


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """Nothing of it is left: no process, no file, no shared memory."""
    before = descendants(os.getpid()), set(os.listdir("/dev/shm"))
    started = Cluster(NUM_CPUS)
    folder = Path(started.folder or "")
    assert folder.is_dir()
    assert len(descendants(os.getpid())) > len(before[0])
    yield started
    started.close()
    assert not folder.exists()
    until(lambda: descendants(os.getpid()) <= before[0], "Ray's processes to end")
    assert set(os.listdir("/dev/shm")) <= before[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model"))


def tokens(llm: LLM) -> list[list[int]]:
    return [list(answer.token_ids) for answer in llm.generate(PROMPTS, SAMPLING)]


def test_ranks_that_ray_places_give_the_tokens_of_one(folder: Path, cluster: Cluster) -> None:
    """Then one of them is killed, which is known with what Ray says of it; and its place is free
    for the next group."""
    with LLM(folder, **OPTIONS) as one:
        want = tokens(one)
    with LLM(folder, tp=2, launcher="ray", **OPTIONS) as two:
        assert tokens(two) == want
        assert two.built.ranks is not None
        (found,) = re.findall(r"pid (\d+)", two.built.ranks.words(1))
        os.kill(int(found), signal.SIGKILL)
        with pytest.raises(EngineLost, match=r"rank 1 \(host .*\) has ended"):
            until(lambda: not tokens(two), "it to be missed")
    with LLM(folder, tp=2, pp=2, launcher="ray", **OPTIONS) as four:
        assert tokens(four) == want
    until(lambda: free(cluster) == NUM_CPUS, "all places to be free again")


def free(cluster: Cluster) -> float:
    found: float = cluster.ray.available_resources().get("CPU", 0)
    return found


def test_what_cannot_be_placed_is_refused_in_time(folder: Path, cluster: Cluster) -> None:
    assert launch_ray.PLACE_S < 2.0
    with pytest.raises(
        ConfigError, match=r"CPU 8 of one machine is asked for, and Ray has .*CPU 4"
    ):
        LLM(folder, tp=4, launcher="ray", **OPTIONS | {"threads": 2})
    held = Placed(cluster, {"CPU": 1.0}, [3])
    with pytest.raises(
        ConfigError, match=r"is not free within 1.5 s; free in all of Ray now: CPU 1"
    ):
        LLM(folder, tp=2, launcher="ray", **OPTIONS)
    held.remove()
    until(lambda: free(cluster) == NUM_CPUS, "its place to be free again")


class Ended:
    """A rank that cannot even begin."""

    def run(self, host: str, port: int, secret: str, rank: int) -> int:
        raise RuntimeError("no such disk")


def test_a_rank_that_ends_before_it_reports_is_named(
    folder: Path, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launch_ray, "RankActor", Ended)
    with pytest.raises(ConfigError, match=r"ranks cannot be had: rank 1: .*no such disk"):
        LLM(folder, tp=2, launcher="ray", **OPTIONS)


def test_a_bundle_is_never_cut() -> None:
    nodes = {"a": {"CPU": 8.0, "GPU": 4.0}, "b": {"CPU": 8.0, "GPU": 3.0}}
    assert not why_not({"CPU": 2.0, "GPU": 2.0}, 3, nodes)
    words = why_not({"CPU": 2.0, "GPU": 2.0}, 4, nodes)
    assert words.startswith(
        "4 times CPU 2, GPU 2 of one machine is asked for, and Ray has a: CPU 8"
    )
    assert why_not({"CPU": 1.0, "GPU": 8.0}, 1, nodes)
