"""Are the settings of a file those of the flags, checked like them and beaten by them?"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ridgeline.cli import serve
from ridgeline.cli.main import parse
from ridgeline.config import EngineConfig
from ridgeline.server.config import Limits, ServeConfig
from tests.cli.conftest import Cli

TOML = """
model = "m"
port = 9000
served_model_name = "tiny"
allowed-host = ["a", "b"]
allow-anyone-on-the-network-without-a-key = true
kv-cache-memory-bytes = "2MiB"
[engine]
no-prefix-caching = true
max-num-seqs = 3
enforce_eager = false
[limits]
max-body-bytes = 2048
drain_s = 1
"""
YAML = """
model: m
port: 9000
served_model_name: tiny
allowed-host: [a, b]
allow-anyone-on-the-network-without-a-key: true
kv-cache-memory-bytes: 2MiB
engine: {no-prefix-caching: true, max-num-seqs: 3, enforce_eager: false}
limits:
  max-body-bytes: 2048
  drain_s: 1
"""
EXPECTED = ServeConfig(
    engine=EngineConfig(
        model="m", prefix_caching=False, max_num_seqs=3, kv_cache_memory_bytes=2 << 20
    ),
    port=9000,
    served_model_name="tiny",
    allowed_hosts=("a", "b"),
    allow_anyone_on_the_network_without_a_key=True,
    limits=Limits(max_body_bytes=2048, drain_s=1.0),
)


def written(folder: Path, text: str, name: str = "serve.toml") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize(("name", "text"), [("s.toml", TOML), ("s.yaml", YAML), ("s.yml", YAML)])
def test_keys_are_flags(name: str, text: str, tmp_path: Path) -> None:
    args = parse(["serve", "--config", written(tmp_path, text, name)])
    assert serve.serve_config(args) == EXPECTED


def test_what_is_typed_wins(tmp_path: Path) -> None:
    typed = ["serve", "other", f"--config={written(tmp_path, TOML)}", "--port", "1"]
    config = serve.serve_config(parse([*typed, "--allowed-host", "c", "--drain-s", "5"]))
    assert (config.engine.model, config.port, config.allowed_hosts) == ("other", 1, ("c",))
    assert (config.limits.drain_s, config.limits.max_body_bytes) == (5.0, 2048)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("prot = 1", "unknown key 'prot'; did you mean port?"),
        ("max_model_length = 1", "did you mean max-model-len?"),
        ("help = true", "unknown key 'help'"),
        ('config = "x.toml"', "unknown key 'config'"),
        ('port = "9000"', "port is '9000'; it must be a whole number"),
        ("port = 1.5", "port is 1.5; it must be a whole number"),
        ("port = true", "port is True; it must be a whole number"),
        ("port = 99999", "--port (in {file}) is 99999; it must be from 0 to 65535"),
        ("host = 1", "host is 1; it must be text"),
        ("drain_s = [1]", "drain_s is [1]; it must be a number"),
        ("enforce-eager = 1", "enforce-eager is 1; it must be true or false"),
        ('dtype = "float8"', "dtype is 'float8'; choose one of auto, float32, bfloat16, float16"),
        ('kv-cache-memory-bytes = "much"', "kv-cache-memory-bytes: 'much' is no size"),
        ("[limits]\nport = 1", "port does not belong into [limits]"),
        ("[limit]\ndrain_s = 1", "unknown section [limit]; there are engine, limits"),
        ("drain_s = 1\n[limits]\ndrain_s = 2", "drain_s is given twice"),
        ("port =", "is no TOML: "),
        ("[limits]\ndrain_s = -1", "--drain-s (in {file}) is -1.0; it must be from 0 to 1e+09"),
    ],
)
def test_errors_name_file_key_and_limit(
    text: str, message: str, tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listen(host: str, port: int) -> None:
        raise AssertionError("it listens")

    monkeypatch.setattr("ridgeline.server.lifecycle.listen", listen)
    file = written(tmp_path, text)
    code, out, err = cli("serve", "--config", file)
    assert (code, out) == (2, "")
    assert message.replace("{file}", file) in err
    assert file in err


def test_a_typed_value_is_not_blamed_on_the_file(tmp_path: Path, cli: Cli) -> None:
    code, _, err = cli("serve", "--config", written(tmp_path, "port = 1"), "--port", -5)
    assert code == 2
    assert "--port is -5; it must be" in err


def test_files_that_are_none(tmp_path: Path, cli: Cli) -> None:
    for name, message in (("none.toml", "cannot be read"), ("x.ini", ".toml, .yaml or .yml")):
        if name == "x.ini":
            written(tmp_path, "", name)
        code, _, err = cli("serve", "--config", tmp_path / name)
        assert code == 2
        assert message in err
    code, _, err = cli("serve", "--config", written(tmp_path, "- a\n", "x.yaml"))
    assert code == 2
    assert "write keys and values" in err


def test_yaml_without_its_reader_names_the_way_out(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    code, _, err = cli("serve", "--config", written(tmp_path, "port: 1", "x.yaml"))
    assert code == 2
    assert "pip install pyyaml, or write it as TOML" in err
