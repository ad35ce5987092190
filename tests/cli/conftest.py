"""Models for the commands, and how to run one."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from ridgeline.cli.main import main
from tests.tiny_model import tiny_config, write_tokenizer

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """config.json alone: no weights, no tokenizer."""
    folder = tmp_path_factory.mktemp("bare")
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    return folder


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer without chat template, random weights."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    write_tokenizer(folder, chat_template=False)
    return folder


@pytest.fixture(scope="session")
def chatty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer with a chat template, random weights."""
    folder = tmp_path_factory.mktemp("chatty")
    (folder / "config.json").write_text(json.dumps(tiny_config()))
    write_tokenizer(folder)
    return folder


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Run a command in this process: (exit code, standard output, standard error)."""

    def run(*argv: object) -> tuple[int, str, str]:
        try:
            code = main([str(word) for word in argv])
        except SystemExit as ended:  # as argparse does for a wrong word
            code = int(ended.code or 0)
        out, err = capsys.readouterr()
        return code, out, err

    return run
