"""A model comes from the hub once, pinned to its commit, and from the cache ever after."""

from __future__ import annotations

import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from ridgeline.errors import ConfigError
from ridgeline.loader import ModelFolder, open_checkpoint, resolve_model
from ridgeline.loader.hub import find_config
from tests.hub_server import HubServer, serve_hub
from tests.loader.write import write_safetensors, write_sharded

COMMIT = "a" * 40
NEXT_COMMIT = "b" * 40


@pytest.fixture
def hub() -> Iterator[HubServer]:
    with serve_hub() as server:
        yield server


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_ENDPOINT", "HF_HUB_OFFLINE", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """The hub's client waits between its tries and writes 10 MB at a time; here it need not."""
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 10_000)


def make_model(folder: Path, *, rows: int = 1000, shards: int = 1) -> Path:
    folder.mkdir()
    tensors = {f"w{i}": torch.full((rows, 16), float(i)) for i in range(4)}
    if shards == 1:
        write_safetensors(folder / "model.safetensors", tensors)
    else:
        write_sharded(folder, tensors, shards)
    (folder / "config.json").write_text(json.dumps({"rows": rows}))
    (folder / "generation_config.json").write_text("{}")
    (folder / "tokenizer_config.json").write_text("{}")
    (folder / "pytorch_model.bin").write_bytes(b"PK\3\4 never to be fetched")
    (folder / "modeling_evil.py").write_text("raise SystemExit")
    (folder / "README.md").write_text("read me")
    return folder


def get(hub: HubServer, model: str = "someone/model", **options: object) -> ModelFolder:
    return resolve_model(model, endpoint=hub.url, **options)  # type: ignore[arg-type]


def test_first_start_downloads_with_progress_and_records_the_commit(
    hub: HubServer, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source")
    hub.add("someone/model", source)
    seen: list[tuple[str, int, int]] = []
    found = get(hub, progress=lambda *step: seen.append(step))
    assert found.revision == COMMIT
    assert found.name == "someone/model"
    assert found.path.name == COMMIT
    fetched = {path.name for path in found.path.iterdir()}
    needed = {"config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"}
    assert fetched == needed
    assert hub.files_asked_for() == needed
    total = sum((source / name).stat().st_size for name in needed)
    assert {(stage, of) for stage, _, of in seen} == {("download", total)}
    done = [step[1] for step in seen]
    assert done == sorted(done)
    assert done[-1] == total
    assert any(0 < count < total for count in done)
    assert all(f"/resolve/{COMMIT}/" in line for line in hub.requests if "/resolve/" in line)
    checkpoint = open_checkpoint(found.path)
    assert checkpoint.tensor("w3").eq(3).all()


def test_the_second_start_needs_no_server(hub: HubServer, tmp_path: Path) -> None:
    hub.add("someone/model", make_model(tmp_path / "source", shards=2))
    first = get(hub)
    hub.stop()
    assert get(hub) == first
    assert get(hub, offline=True) == first
    assert open_checkpoint(first.path).tensor("w2").eq(2).all()


def test_falling_back_to_the_cache_is_said(
    hub: HubServer, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("someone/model", make_model(tmp_path / "source"))
    first = get(hub)
    hub.status = 503
    with caplog.at_level(logging.WARNING, logger="ridgeline"):
        assert get(hub) == first
    assert "using the cached copy" in caplog.text
    assert COMMIT in caplog.text


def test_a_second_start_online_fetches_nothing_again(hub: HubServer, tmp_path: Path) -> None:
    hub.add("someone/model", make_model(tmp_path / "source"))
    first = get(hub)
    hub.requests.clear()
    assert get(hub) == first
    assert hub.files_asked_for() == set()


def test_a_moved_branch_gives_the_new_commit_and_a_pinned_one_stays(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("someone/model", make_model(tmp_path / "one", rows=10))
    assert get(hub).revision == COMMIT
    hub.add("someone/model", make_model(tmp_path / "two", rows=20), NEXT_COMMIT)
    moved = get(hub)
    assert moved.revision == NEXT_COMMIT
    assert open_checkpoint(moved.path).shape("w0") == (20, 16)
    hub.requests.clear()
    pinned = get(hub, f"someone/model@{COMMIT}")
    assert open_checkpoint(pinned.path).shape("w0") == (10, 16)
    assert hub.requests == []  # a commit that is complete in the cache cannot have changed


def test_a_named_revision_is_resolved(hub: HubServer, tmp_path: Path) -> None:
    hub.add("someone/model", make_model(tmp_path / "one"), branch="main")
    hub.add("someone/model", make_model(tmp_path / "two"), NEXT_COMMIT, branch="v2.0")
    assert get(hub, "someone/model@v2.0").revision == NEXT_COMMIT
    hub.stop()
    assert get(hub, "someone/model@v2.0").revision == NEXT_COMMIT
    with pytest.raises(ConfigError, match=r"someone/model: the hub gave no answer"):
        get(hub)


def test_the_endpoint_comes_from_the_environment_of_this_moment(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("someone/model", make_model(tmp_path / "source"))
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    found = resolve_model("someone/model")
    assert found.revision == COMMIT
    assert found.path.is_relative_to(tmp_path / "home")


def test_a_cut_transfer_resumes_where_it_stopped(
    hub: HubServer, tmp_path: Path, no_waiting: None
) -> None:
    source = make_model(tmp_path / "source")
    hub.add("someone/model", source)
    hub.cut_after["model.safetensors"] = 70_000
    found = get(hub)
    ranges = [line for line in hub.requests if "bytes=" in line]
    assert len(ranges) == 1
    assert ranges[0].endswith("bytes=70000-")
    data = (found.path / "model.safetensors").read_bytes()
    assert data == (source / "model.safetensors").read_bytes()


def test_a_transfer_that_cannot_go_on_names_the_file(
    hub: HubServer, tmp_path: Path, no_waiting: None
) -> None:
    hub.add("someone/model", make_model(tmp_path / "source"))
    hub.cut_after["model.safetensors"] = 0
    hub.always_cut = True
    with pytest.raises(ConfigError, match=r"transfer of model\.safetensors failed"):
        get(hub)
    with pytest.raises(ConfigError, match="not complete in the cache"):
        get(hub, offline=True)
    hub.always_cut = False
    hub.cut_after.clear()
    assert get(hub).revision == COMMIT


def test_a_later_start_keeps_the_files_that_were_complete(
    hub: HubServer, tmp_path: Path, no_waiting: None
) -> None:
    source = make_model(tmp_path / "source", shards=2)
    hub.add("someone/model", source)
    cut, whole = "model-00002-of-00002.safetensors", "model-00001-of-00002.safetensors"
    hub.cut_after[cut] = 100_000
    hub.down_after_cut = True
    with pytest.raises(ConfigError, match=rf"transfer of {cut} failed"):
        get(hub)
    hub.status, hub.down_after_cut = None, False
    hub.requests.clear()
    found = get(hub)
    assert hub.files_asked_for() == {cut}
    for name in (cut, whole):
        assert (found.path / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.parametrize("stop", [KeyboardInterrupt, ConfigError])
def test_a_later_start_goes_on_in_the_middle_of_a_file(
    hub: HubServer, tmp_path: Path, no_waiting: None, stop: type[BaseException]
) -> None:
    source = make_model(tmp_path / "source")
    hub.add("someone/model", source)

    def interrupt(stage: str, done: int, total: int) -> None:
        if stop is KeyboardInterrupt and done > total // 2:
            raise stop

    if stop is ConfigError:
        hub.cut_after["model.safetensors"], hub.down_after_cut = 100_000, True
    with pytest.raises(stop):
        get(hub, progress=interrupt)
    hub.status, hub.down_after_cut = None, False
    (part,) = tmp_path.rglob("*.incomplete")
    had = part.stat().st_size
    assert had > 60_000
    hub.requests.clear()
    found = get(hub)
    assert [line for line in hub.requests if line.startswith("GET") and "bytes=" in line] == [
        f"GET /someone/model/resolve/{COMMIT}/model.safetensors bytes={had}-"
    ]
    data = (found.path / "model.safetensors").read_bytes()
    assert data == (source / "model.safetensors").read_bytes()
    assert not list(tmp_path.rglob("*.incomplete"))


@pytest.mark.parametrize(
    "name", ["model.safetensors", "config.json", "model.safetensors.index.json"]
)
def test_a_file_with_a_wrong_hash_is_removed_and_named(
    hub: HubServer, tmp_path: Path, name: str
) -> None:
    hub.add("someone/model", make_model(tmp_path / "source", shards=2 if "index" in name else 1))
    hub.wrong_hash = name
    for _ in range(2):  # it never counts as one that is there
        with pytest.raises(
            ConfigError, match=rf"^model someone/model: {name}: its hash is .*remov"
        ):
            get(hub)
    assert not [path for path in (tmp_path / "home").rglob(name) if path.is_file()]
    hub.wrong_hash = ""
    assert get(hub).revision == COMMIT


def test_room_is_looked_for_before_anything_comes(
    hub: HubServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.add("someone/model", make_model(tmp_path / "source"))
    full = SimpleNamespace(free=0)
    monkeypatch.setattr("ridgeline.loader.hub_files.shutil.disk_usage", lambda path: full)
    with pytest.raises(
        ConfigError, match=r"needs 25. kB more at .*, where 0 B are free; .*HF_HOME"
    ):
        get(hub)
    assert hub.files_asked_for() == set()


def test_half_a_model_in_the_cache_does_not_count(hub: HubServer, tmp_path: Path) -> None:
    hub.add("someone/model", make_model(tmp_path / "source", shards=2))
    found = get(hub)
    (found.path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(ConfigError, match="not complete in the cache"):
        get(hub, offline=True)
    assert get(hub) == found
    assert open_checkpoint(found.path).tensor("w3").eq(3).all()


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("someone/nothing", "neither a folder here nor a model on the hub"),
        ("someone/model@v9", "knows no revision 'v9'"),
        ("someone/model@" + "c" * 40, "knows no revision"),
        ("someone/closed", "access is restricted"),
        ("someone/pickled", r"only pickled weights \(pytorch_model.bin\)"),
        ("someone/bare", "no config.json"),
    ],
)
def test_what_the_hub_refuses_is_a_clear_error(
    hub: HubServer, tmp_path: Path, model: str, message: str
) -> None:
    hub.add("someone/model", make_model(tmp_path / "source"))
    hub.add("someone/closed", tmp_path / "source")
    hub.models["someone/closed"].gated = True
    pickled = make_model(tmp_path / "pickled")
    (pickled / "model.safetensors").unlink()
    hub.add("someone/pickled", pickled)
    bare = make_model(tmp_path / "bare")
    (bare / "config.json").unlink()
    hub.add("someone/bare", bare)
    with pytest.raises(ConfigError, match=message) as caught:
        get(hub, model)
    assert str(caught.value).startswith(f"model {model}")


def test_an_index_that_names_a_foreign_file_fetches_nothing_more(
    hub: HubServer, tmp_path: Path
) -> None:
    source = make_model(tmp_path / "source", shards=2)
    index = source / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"w0": "../../secret.safetensors"}}))
    hub.add("someone/model", source)
    with pytest.raises(ConfigError, match=r"a shard is a \.safetensors file beside it"):
        get(hub)
    assert hub.files_asked_for() == {"model.safetensors.index.json"}


def test_an_unreachable_hub_and_an_empty_cache(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    with pytest.raises(ConfigError, match=r"gave no answer \(Connect.*Error\), and the cache at"):
        resolve_model("someone/model", endpoint=f"http://127.0.0.1:{port}")


def test_a_config_alone_comes_once_and_then_from_the_cache(hub: HubServer, tmp_path: Path) -> None:
    """Of a model whose weights could not be served, too."""
    source = make_model(tmp_path / "source")
    (source / "model.safetensors").unlink()
    hub.add("someone/model", source)
    found = find_config("someone/model", endpoint=hub.url)
    assert [path.name for path in found.iterdir()] == ["config.json"]
    assert hub.files_asked_for() == {"config.json"}
    hub.stop()
    assert find_config("someone/model", endpoint=hub.url) == found
    assert find_config("someone/model", endpoint=hub.url, offline=True) == found
    assert find_config(f"someone/model@{COMMIT}", endpoint=hub.url) == found


def test_a_look_at_a_new_config_leaves_the_whole_model_in_the_cache(
    hub: HubServer, tmp_path: Path
) -> None:
    hub.add("someone/model", make_model(tmp_path / "source"))
    whole = get(hub)
    hub.add("someone/model", make_model(tmp_path / "next", rows=5), NEXT_COMMIT)
    assert find_config("someone/model", endpoint=hub.url).name == NEXT_COMMIT
    assert get(hub, offline=True) == whole


def test_a_config_that_is_not_to_be_had_is_refused_like_a_model(
    hub: HubServer, capfd: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        nobody = f"http://127.0.0.1:{closed.getsockname()[1]}"
    for model, endpoint, offline in (
        ("someone/model", nobody, False),
        ("someone/nothing", hub.url, False),
        ("./a/b", hub.url, False),
    ):
        with pytest.raises(ConfigError) as of_model:
            resolve_model(model, endpoint=endpoint, offline=offline)
        with pytest.raises(ConfigError) as of_config:
            find_config(model, endpoint=endpoint, offline=offline)
        assert str(of_config.value) == str(of_model.value)
    with pytest.raises(ConfigError, match=r"offline, and its config\.json is not in the cache"):
        find_config("someone/model", offline=True)
    assert capfd.readouterr() == ("", "")  # the hub's client tells of each of its tries


def test_offline_by_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(ConfigError, match="offline, and it is not complete in the cache"):
        resolve_model("someone/model", endpoint="http://127.0.0.1:9")


def test_a_folder_of_that_name_wins(tmp_path: Path) -> None:
    folder = tmp_path / "someone" / "model"
    folder.mkdir(parents=True)
    found = resolve_model("someone/model", endpoint="http://127.0.0.1:9")
    assert found == ModelFolder(Path("someone/model"), "model", None)
    assert resolve_model(str(folder)).path == folder


@pytest.mark.parametrize(
    "model", ["./models/x", "/no/such/folder", "../x", "~/no-such-folder-here", "a/b/c", "a b"]
)
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(model: str) -> None:
    with pytest.raises(ConfigError, match="folder not found"):
        resolve_model(model, endpoint="http://127.0.0.1:9")


def test_a_name_of_the_catalogue_is_never_asked_for(hub: HubServer) -> None:
    """It has no weights; the way to them is said."""
    with pytest.raises(ConfigError, match=r"or the hub id meta-llama/Llama-3\.1-8B"):
        resolve_model("Llama-3.1-8b", endpoint=hub.url)
    with pytest.raises(ConfigError, match="or the hub id deepseek-ai/DeepSeek-V3"):
        resolve_model("deepseek-v3", endpoint=hub.url)
    for find in (resolve_model, find_config):
        with pytest.raises(ConfigError, match=r"did you mean llama-3\.1-8b"):
            find("llama-3.1-8", endpoint=hub.url)
    assert hub.requests == []


def test_where_the_hub_says_no_the_catalogue_is_named(hub: HubServer) -> None:
    said = r"neither a folder.*; the catalogue has llama-3\.1-8b"
    with pytest.raises(ConfigError, match=said):
        find_config("meta-llama/Llama-3.1-8B-Instruct", endpoint=hub.url)


def test_an_empty_name_is_not_the_current_folder() -> None:
    with pytest.raises(ConfigError, match="no model was named"):
        resolve_model("")


def test_a_file_is_not_a_model_folder(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x")
    with pytest.raises(ConfigError, match="is a file; give the folder"):
        resolve_model(str(file))
