"""Does `ridgeline inspect` count right, with and without weights?"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.conftest import Cli
from tests.hub_server import HubServer, serve_hub
from tests.tiny_model import tiny_config

GGUF_FILES = Path(__file__).parents[1] / "loader" / "gguf_files"
LLAMA_3_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
}


def inspect(cli: Cli, folder: Path, *argv: object) -> dict[str, object]:
    code, out, _ = cli("inspect", folder, "--json", *argv)
    assert code == 0
    return dict(json.loads(out))


def test_known_figures_from_a_config_alone(tmp_path: Path, cli: Cli) -> None:
    """Llama-3.1-70B: 70.6 billion parameters, 320 KiB of cache a token, 40 GiB at 128K tokens."""
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**LLAMA_3_70B)))
    found = inspect(cli, tmp_path, "--dtype", "bfloat16")
    assert found["parameters"]["total"] == 70_553_706_496  # type: ignore[index]
    memory = found["memory_bytes"]["bfloat16"]  # type: ignore[index]
    assert memory["kv_per_token"] == 320 << 10
    assert memory["kv_cache"] == 40 << 30
    assert memory["weights"] == 2 * 70_553_706_496
    assert memory["total"] == memory["weights"] + memory["kv_cache"]
    assert found["checkpoint"] is None


def test_what_each_of_several_devices_has(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(**LLAMA_3_70B)))
    asked = ("--tp", 16, "--batch", 4, "--context", 1024)
    ranks = inspect(cli, tmp_path, *asked)["ranks"]
    assert isinstance(ranks, list)
    assert [one["kv_heads"] for one in ranks[:4]] == [[0, 1], [0, 1], [1, 2], [1, 2]]
    assert [one["query_heads"] for one in ranks[:3]] == [[0, 4], [4, 8], [8, 12]]
    assert {one["num_blocks"] for one in ranks} == {4 * 64}
    # One KV head of 128, keys and values of 80 layers in 2 bytes: 16 tokens, and the null block.
    assert {one["kv_cache"] for one in ranks} == {257 * 16 * 2 * 80 * 128 * 2}
    copied = 2 * 2 * 80 * 8192 * 128 * 8  # a KV head is held twice
    norms = 15 * 2 * 161 * 8192
    total = sum(one["weights"] for one in ranks)
    assert total == 2 * 70_553_706_496 + copied + norms
    code, out, _ = cli("inspect", tmp_path, *asked)
    assert code == 0
    assert "memory of each device: tp 16" in out
    code, _, err = cli("inspect", tmp_path, "--dp", 2)
    assert code == 2
    assert "--dp is 2; this model has no experts to divide" in err


def test_context_and_batch(bare: Path, cli: Cli) -> None:
    found = inspect(cli, bare, "--context", 100, "--batch", 7)
    memory = found["memory_bytes"]
    assert isinstance(memory, dict)
    # 2 layers, K and V, 2 KV heads of 8
    assert {name: row["kv_per_token"] for name, row in memory.items()} == {
        "float32": 256,
        "bfloat16": 128,
        "float16": 128,
    }
    assert memory["float32"]["kv_cache"] == 256 * 100 * 7
    code, out, err = cli("inspect", bare, "--batch", 0)
    assert (code, out) == (2, "")
    assert "at least 1" in err


def test_a_window_caps_the_cache(tmp_path: Path, cli: Cli) -> None:
    config = tiny_config(model_type="mistral", sliding_window=64)
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = inspect(cli, tmp_path, "--context", 500, "--dtype", "float32")
    assert found["memory_bytes"]["float32"]["kv_cache"] == 256 * 64  # type: ignore[index]
    assert "window of 64 tokens" in cli("inspect", tmp_path)[1]


def test_weights_are_checked_where_there_are_some(shared: Path, cli: Cli) -> None:
    found = inspect(cli, shared / "models" / "stories260K")
    assert found["checkpoint"] == {"tensors": 47, "bytes": 260_032 * 4, "dtypes": ["F32"]}
    _, out, _ = cli("inspect", shared / "models" / "babyllama-char105-moe4")
    assert "4 experts of 88, 4 per token" in out
    assert "active per token" in out
    assert "all that the model needs are there" in out


def test_missing_tensors_are_named(shared: Path, tmp_path: Path, cli: Cli) -> None:
    source = shared / "models" / "stories260K"
    config = json.loads((source / "config.json").read_text()) | {"num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((source / "model.safetensors").read_bytes())
    code, out, err = cli("inspect", tmp_path)
    assert (code, out) == (2, "")
    assert "model.layers.5." in err


def test_tables_show_both_units(bare: Path, cli: Cli) -> None:
    _, out, _ = cli("inspect", bare)
    assert "MiB" in out
    assert "together MB" in out
    assert "4 heads of 8, 2 KV heads" in out


@pytest.mark.parametrize("name", ["no such folder", "../nowhere/at all"])
def test_no_model_there(name: str, cli: Cli) -> None:
    code, out, err = cli("inspect", name)
    assert (code, out) == (2, "")
    assert "folder not found" in err


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HubServer]:
    """Asked by this process, whose cache is empty."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    with serve_hub() as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        yield hub


def test_of_a_hub_model_only_the_config_is_fetched(
    bare: Path, tmp_path: Path, cli: Cli, hub: HubServer
) -> None:
    hub.add("user/model", bare)
    hub.add("user/model", bare, "b" * 40, "v2")
    assert cli("inspect", "user/model@v2")[0] == 0
    assert cli("inspect", "user/model")[0] == 0
    assert hub.files_asked_for() == {"config.json"}
    assert {path.name for path in tmp_path.glob("hub/*/snapshots/*")} == {"a" * 40, "b" * 40}


@pytest.mark.parametrize("command", ["inspect", "predict"])
def test_a_hub_that_does_not_answer_is_asked_once(command: str, cli: Cli, hub: HubServer) -> None:
    hub.status = 503
    code, out, err = cli(command, "user/model")
    assert (code, out, len(hub.requests)) == (2, "", 1)
    assert err.startswith("ridgeline: error: model user/model: the hub gave no answer (HTTP 503)")
    assert err.count("\n") == 1


def test_a_gguf_file_is_shown_like_a_folder(cli: Cli) -> None:
    path = GGUF_FILES / "llama.gguf"
    found = inspect(cli, path)
    checkpoint = found["checkpoint"]
    assert isinstance(checkpoint, dict)
    assert {"Q4_0", "Q8_0", "F32"} <= set(checkpoint["dtypes"])
    code, out, _ = cli("inspect", path)
    assert code == 0
    assert "the quantized matrices above are kept so" in " ".join(out.split())
    code, _, err = cli("inspect", GGUF_FILES / "types.gguf")
    assert code == 2
    assert "types.gguf" in err


def test_a_name_of_the_catalogue_asks_nobody(cli: Cli, hub: HubServer) -> None:
    code, out, _ = cli("inspect", "deepseek-v3", "--json", "--dtype", "bfloat16")
    found = json.loads(out)
    assert code == 0
    assert found["parameters"]["total"] == 671_026_419_200
    assert found["memory_bytes"]["bfloat16"]["kv_per_token"] == 70_272
    assert found["source"] == "config.json of deepseek-ai/DeepSeek-V3, 2024-12"
    assert "not served" not in found["architecture"]
    assert cli("predict", "qwen3-32b", "--device", "h100-sxm")[0] == 0
    assert hub.requests == []


def test_a_folder_of_that_name_wins_and_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cli: Cli
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("qwen3-8b").mkdir()
    Path("qwen3-8b/config.json").write_text(json.dumps(tiny_config()))
    code, out, err = cli("inspect", "qwen3-8b", "--json")
    assert (code, json.loads(out)["num_layers"]) == (0, 2)
    assert (
        err
        == "ridgeline: qwen3-8b is a folder here, and a name of the catalogue; the folder is used\n"
    )


def test_the_list(cli: Cli) -> None:
    code, out, _ = cli("inspect", "--list", "--json")
    found = {line["name"]: line for line in json.loads(out)}
    assert code == 0
    assert found["llama-3.1-8b"] == {
        "name": "llama-3.1-8b",
        "family": "llama",
        "hub_id": "meta-llama/Llama-3.1-8B",
        "source": "config.json of meta-llama/Llama-3.1-8B, 2024-07",
        "parameters": 8_030_261_248,
        "active_parameters": 8_030_261_248 - 128_256 * 4096,
        "num_layers": 32,
        "context": 131_072,
        "kv_bytes_per_token": 128 << 10,
        "served": True,
        "needs": [],
    }
    _, table, _ = cli("inspect", "--list")
    rows = table.splitlines()[1:]
    assert [row.split()[0] for row in rows] == list(found)
    assert all(found[row.split()[0]]["hub_id"] == row.split()[-1] for row in rows)


def test_weights_that_no_reader_knows_are_not_compared(tmp_path: Path, cli: Cli) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config(model_type="internlm3")))
    (tmp_path / "model.safetensors").write_bytes(b"of which nobody knows the names")
    code, out, _ = cli("inspect", tmp_path)
    assert code == 0
    assert "none were read, only config.json of" in " ".join(out.split())
