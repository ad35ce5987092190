"""Does `ridgeline serve` say where it is, answer, and end when told to?"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from ridgeline.benchmark.http_client import endpoint, run_http, served_models
from ridgeline.benchmark.jobs import Job
from tests.cli.conftest import Cli


@contextmanager
def serving(*argv: object) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A server of its own process on a free port, and its URL."""
    command = [sys.executable, "-m", "ridgeline.cli.main", "serve", "--port", "0"]
    with subprocess.Popen(
        [*command, *map(str, argv)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    ) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith("ridgeline: listening on http://127.0.0.1:"), line
            yield process, line.split()[-1]
        finally:
            process.kill()


def test_a_server_from_start_to_end(bare: Path, cli: Cli, tmp_path: Path) -> None:
    argv = (bare, "--load-format", "random", "--num-blocks", 100, "--served-model-name", "tiny")
    keys = tmp_path / "keys"
    keys.write_text("# ours\nkey-of-eight-or-more\n")
    with serving(*argv, "--api-key-file", keys) as (process, url):
        assert process.stderr is not None
        while "ready to serve" not in process.stderr.readline():
            assert process.poll() is None
        key = keys.read_text().split()[-1]
        assert served_models(endpoint(url, "", key)) == ["tiny"]
        refused, errors = run_http(endpoint(url, "tiny"), [Job((1, 2), 2)])
        assert refused.failed == 1
        assert "status 401" in errors[0]
        code, out, _ = cli(
            *("bench", bare, "--url", url, "--api-key-file", keys, "--rate", 1000, "--json"),
            *("--num-requests", 5, "--prompt-len", 6, "--output-len", 4),
        )
        [load] = json.loads(out)["results"]["serving"]
        assert (code, load["failed"], load["output_tokens"]) == (0, 0, 20)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_beyond_this_machine_it_wants_a_key(bare: Path, cli: Cli) -> None:
    code, out, err = cli("serve", bare, "--load-format", "random", "--host", "0.0.0.0")
    assert (code, out) == (2, "")
    assert "key" in err.splitlines()[-1]


def test_the_old_name_of_a_flag_is_taken_with_a_warning(bare: Path, cli: Cli) -> None:
    code, _, err = cli("serve", bare, "--load-format", "random", "--tokenizer-threads", 0)
    assert code == 2
    assert "--tokenizer-threads is now --tokenizer-processes" in err
    assert "--tokenizer-processes is 0" in err.splitlines()[-1]


@pytest.mark.parametrize(
    ("flag", "value", "message"),
    [
        ("--port", 99999, "--port is 99999; it must be from 0 to 65535"),
        ("--port", -1, "--port is -1; it must be from 0 to 65535"),
        ("--tokenizer-processes", 0, "--tokenizer-processes is 0; it must be from 1 to 1024"),
        ("--max-queued-cache-fills", "nan", "--max-queued-cache-fills is nan; it must be from 0.1"),
        ("--price-per-hour", -3, "--price-per-hour is -3.0; it must be from 0 to"),
        ("--max-header-bytes", 0, "--max-header-bytes is 0; it must be from 1024 to"),
        ("--event-log", "/nowhere/log", "--event-log /nowhere/log: there is no folder /nowhere"),
        ("--calibration", "/nowhere", "/nowhere cannot be read as a calibration"),
        ("--device", "gpu", "unknown --device 'gpu'; use auto, cpu, cuda or cuda:N"),
        ("--threads", 100000, "--threads is 100000; this machine runs "),
        ("--policy", "slo", "--policy slo needs a promise: give --ttft-slo-ms and --tpot-slo-ms"),
        ("--speculate", "draft:/nowhere", "/nowhere: folder not found"),
        ("--tokenizer", "/nowhere", "--tokenizer '/nowhere': not found"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    bare: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch, flag: str, value: object, message: str
) -> None:
    def listen(host: str, port: int) -> None:
        raise AssertionError("it listens")

    monkeypatch.setattr("ridgeline.server.lifecycle.listen", listen)
    code, out, err = cli("serve", bare, "--load-format", "random", flag, value)
    assert (code, out) == (2, "")
    assert message in err.splitlines()[-1]
