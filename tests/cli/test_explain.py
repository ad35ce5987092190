"""Does `ridgeline explain` read logs and servers, and print what they say?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.server.model_folder import write_model_folder
from tests.server.running import Running, fake_config, running, until
from tests.server.test_keys import bearer


@pytest.fixture(scope="module")
def log(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The event log of a real, small model: three prompts, one of them twice."""
    from ridgeline import LLM, SamplingParams

    path = tmp_path_factory.mktemp("log") / "events.jsonl"
    with LLM(
        str(bare), event_log=str(path), load_format="random", num_blocks=50, device="cpu", threads=1
    ) as llm:
        sampling = SamplingParams(max_tokens=6, ignore_eos=True)
        prompts = [list(range(n)) for n in (3, 40, 5, 3)]
        llm.generate(prompts, sampling, progress=False)
    return path


def test_a_log_as_json(log: Path, cli: Cli) -> None:
    code, out, _ = cli("explain", "--log", log, "--json")
    report = json.loads(out)
    assert code == 0
    assert [r["num_prompt_tokens"] for r in report["requests"]] == [3, 40, 5, 3]
    for request in report["requests"]:
        assert sum(request["parts"].values()) == pytest.approx(request["latency_s"], abs=1e-9)
        assert request["num_output_tokens"] == 6
    assert report["server"]["num_finished"] == 4
    assert report["whole"]["decode"] > 0


def test_a_log_as_tables(log: Path, cli: Cli) -> None:
    code, out, _ = cli("explain", "--log", log, "--requests", 2)
    assert code == 0
    assert "where the time of 4 requests went" in out
    assert "the slowest 2 of 4" in out
    assert "ended\nnot calibrated: ridgeline calibrate\n" in out  # whatever the device is called
    assert "over the floor" not in out
    assert "of expected" not in out
    assert "so no change is advised. To be seen:" in out
    assert (
        "  not calibrated: what steps should take is assumed\n    -> ridgeline calibrate\n" in out
    )
    for part in ("queue", "own prompt", "others' prompts", "decode", "preemption", "host"):
        assert part in out


def test_one_request_of_a_log(log: Path, cli: Cli) -> None:
    code, out, _ = cli("explain", "--log", log, "--request", "q1", "--json")
    [request] = json.loads(out)["requests"]
    assert (code, request["num_prompt_tokens"]) == (0, 40)
    code, _, err = cli("explain", "--log", log, "--request", "nobody")
    assert (code, "'nobody'" in err) == (2, True)


def test_files_that_explain_nothing(tmp_path: Path, cli: Cli) -> None:
    other = tmp_path / "other"
    other.write_text("hello\nthere\n")
    code, _, err = cli("explain", "--log", other)
    assert (code, str(other) in err) == (2, True)
    code, _, err = cli("explain", "--log", tmp_path / "none")
    assert (code, "cannot be read" in err) == (2, True)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = write_model_folder(tmp_path_factory.mktemp("models") / "fake")
    place = tmp_path_factory.mktemp("server")
    (place / "keys").write_text("# theirs\nordinary-key name=ordinary\n")
    config = fake_config(folder, api_key_file=str(place / "keys"))
    with running(config, place, key="key-of-eight-or-more") as started:
        yield started


def test_a_living_server(server: Running, tmp_path: Path, cli: Cli) -> None:
    with server.http as http:
        body = {"model": "fake", "prompt": "!slow hello", "max_tokens": 4}
        assert http.post("/v1/completions", json=body).status_code == 200
    key = tmp_path / "key"
    key.write_text("# ours\nkey-of-eight-or-more\n")
    code, out, _ = cli("explain", "--url", server.url, "--api-key-file", key, "--json")
    [request] = json.loads(out)["requests"]
    assert (code, request["num_output_tokens"]) == (0, 4)
    assert request["parts"]["decode"] >= 3 * 0.02
    code, out, _ = cli("explain", "--url", server.url, "--api-key-file", key)
    assert (code, "the slowest 1 of 1" in out) == (0, True)
    code, _, err = cli("explain", "--url", server.url)
    assert (code, "status 401" in err) == (2, True)


def test_a_key_that_sees_its_own_requests(server: Running, tmp_path: Path, cli: Cli) -> None:
    key = tmp_path / "key"
    key.write_text(f"sha256:{'0' * 64}\nordinary-key name=ordinary weight=2\n")
    words = ("explain", "--url", server.url, "--api-key-file", key)
    code, out, _ = cli(*words)
    assert (code, out) == (0, "fake: 0 requests of this key\n")
    with server.http as http:
        body = {"model": "fake", "prompt": "hello", "max_tokens": 4}
        asked = http.post("/v1/completions", json=body, headers=bearer("ordinary-key"))
        assert asked.status_code == 200

    def told() -> str:
        code, out, _ = cli(*words)
        assert code == 0
        return out

    until(lambda: "fake: 1 request of this key\n" in told(), "a new report")
    assert "the slowest 1 of 1" in told()
    assert "the gap" not in told()


def test_nobody_at_the_url(cli: Cli) -> None:
    code, _, err = cli("explain", "--url", "http://127.0.0.1:1")
    assert (code, "http://127.0.0.1:1" in err) == (2, True)
    code, _, err = cli("explain", "--url", "nowhere")
    assert (code, "is no server" in err) == (2, True)
