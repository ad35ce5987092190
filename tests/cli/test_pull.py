"""`ridgeline pull` against a hub on the loopback: what comes, what stays out, what is said."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.hub_server import HubServer, serve_hub
from tests.tiny_model import make_tiny_model

COMMIT = "a" * 40


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    source = make_tiny_model(tmp_path / "source")
    (source / "modeling_evil.py").write_text("raise SystemExit")
    (source / "pytorch_model.bin").write_bytes(b"PK\3\4 never to be fetched")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    with serve_hub() as server:
        monkeypatch.setenv("HF_ENDPOINT", server.url)
        server.add("someone/model", source)
        yield server


def test_a_model_comes_once_and_can_be_used(
    cli: Cli, hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)
    code, said, noted = cli("pull", "someone/model")
    assert code == 0
    folder = Path(said.strip())
    assert folder.is_relative_to(tmp_path / "home")
    assert folder.name == COMMIT
    assert "hashes are right" in noted
    assert "(modeling_evil.py, pytorch_model.bin)" in noted
    assert "\n100 %, 150 kB of 150 kB\n" in noted  # of lines, where there is no terminal
    assert not {"modeling_evil.py", "pytorch_model.bin"} & hub.files_asked_for()
    hub.requests.clear()
    code, again, noted = cli("pull", "someone/model")
    assert (code, again) == (0, said)
    assert "all of it was here already, nothing was fetched" in noted
    assert "%" not in noted
    assert hub.files_asked_for() == set()
    assert cli("pull", "-q", "someone/model")[1:] == (said, "")
    hub.stop()
    assert cli("pull", f"someone/model@{COMMIT}")[:2] == (0, said)
    code, answer, _ = cli("generate", folder, "-p", "x", "--max-tokens", 2)
    assert code == 0
    assert answer


def test_a_revision_and_the_result_as_json(cli: Cli, hub: HubServer, tmp_path: Path) -> None:
    hub.add("someone/model", make_tiny_model(tmp_path / "next"), "b" * 40, branch="v2.0")
    code, said, _ = cli("pull", "someone/model@v2.0", "--json")
    assert code == 0
    record = json.loads(said)
    assert record["revision"] == "b" * 40
    assert record["num_bytes"] == record["fetched_bytes"] == sum(record["files"].values())
    assert record["left_out"] == {}
    assert {path.name for path in Path(record["path"]).iterdir()} == set(record["files"])


@pytest.mark.parametrize(
    ("model", "why"),
    [
        ("someone/nothing", "neither a folder here nor a model on the hub"),
        ("someone/model@v9", "the hub knows no revision 'v9'"),
        ("someone/closed", "access is restricted; accept its terms"),
        ("source", "source is here already, as a folder or file"),
        ("demo:chat", "comes with the package"),
        ("a b", "it is no hub id user/name[@revision]"),
    ],
)
def test_errors_are_one_line(
    cli: Cli, hub: HubServer, tmp_path: Path, model: str, why: str
) -> None:
    hub.add("someone/closed", tmp_path / "source")
    hub.models["someone/closed"].gated = True
    code, said, noted = cli("pull", model)
    assert (code, said) == (2, "")
    assert why in noted
    assert noted.count("\n") == 1


def test_a_wrong_hash_and_no_network(cli: Cli, hub: HubServer) -> None:
    hub.wrong_hash = "model.safetensors"
    code, said, noted = cli("pull", "someone/model")
    assert (code, said) == (2, "")
    assert "model.safetensors: its hash is" in noted
    hub.stop()
    code, said, noted = cli("pull", "someone/model")
    assert (code, said) == (2, "")
    assert "the hub gave no answer" in noted
