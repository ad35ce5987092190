"""Does the command line teach, refuse well and end with the right code?"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from ridgeline import __version__
from ridgeline.cli import generate, main
from ridgeline.errors import ConfigError, DoesNotFit, RequestFault
from tests.thinning import slow

COMMANDS = ("generate", "chat", "serve", "inspect", "bench", "eval", "predict", "simulate")


def exit_of(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as ended:
        main.main(argv)
    out, err = capsys.readouterr()
    return int(ended.value.code or 0), out, err


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert exit_of(["--version"], capsys) == (0, f"ridgeline {__version__}\n", "")


def test_the_package_runs_as_the_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ridgeline", "--version"], capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, f"ridgeline {__version__}\n")


@pytest.mark.parametrize("command", main.COMMANDS)
def test_the_parser_loads_nothing_heavy(command: str) -> None:
    program = (
        f"import sys; from ridgeline.cli.main import build_parser; build_parser({command!r});"
        "print([m for m in ('torch', 'numpy', 'rich', 'starlette') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_a_command_is_loaded_when_it_is_asked_for() -> None:
    program = (
        "import sys; from ridgeline.cli.main import parse; parse(['serve']);"
        "print(*sorted(m for m in sys.modules if m.startswith('ridgeline.cli.')))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.split() == [
        f"ridgeline.cli.{name}" for name in ("flags", "main", "parser", "serve", "values")
    ], done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help_ends_with_examples(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = exit_of([command, "--help"], capsys)
    assert code == 0
    assert f"usage: ridgeline {command}" in out
    examples = out[out.index("examples:") :]
    assert f"ridgeline {command}" in examples


def test_top_help_names_each_command(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = exit_of(["--help"], capsys)
    assert code == 0
    assert all(f"    {command} " in out for command in COMMANDS)


def test_a_bare_name_asks_what_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    """As with pip, kubectl, docker and gh, nothing went wrong: code 0,
    and the help on standard output, where a pager can read it."""
    assert exit_of([], capsys) == exit_of(["--help"], capsys)


@pytest.mark.parametrize("command", main.COMMANDS)
def test_help_is_short_and_help_all_is_whole(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = exit_of([command, "--help"], capsys)[1]
    whole = exit_of([command, "--help-all"], capsys)[1]
    parser = main.build_parser(command)[1][command]
    assert len(short.splitlines()) <= 92
    assert ("--help-all\n\n" in short) == bool(parser.expert)
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:  # an old name, for one version more
            continue
        for flag in action.option_strings:
            shown = re.compile(rf"^ +(-\w(?: \w+)?, )?{re.escape(flag)}\b(?!-)", re.MULTILINE)
            assert shown.search(whole), flag
            assert bool(shown.search(short)) == (action not in parser.expert), flag


def test_choices_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    whole = " ".join(exit_of(["serve", "--help-all"], capsys)[1].split())
    assert "--max-in-flight {1,2}" in whole
    assert "auto, plain, checkpoint, fp8," in whole
    assert "auto, reference, sdpa, triton," in whole


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        ("max_model_len is 0", "--max-model-len is 0"),
        ("port is -1; it must be", "--port is -1; it must be"),
        ("give num_blocks or block_size", "give --num-blocks or --block-size"),
        ("lower max_model_len.", "lower --max-model-len."),
        ("unknown dtype 'x'", "unknown --dtype 'x'"),
        ("leave out deterministic", "leave out --deterministic"),
        ("prefix_caching is on", "--no-prefix-caching is on"),
        ("the device and the port of a host", "the device and the port of a host"),
        ("a/max_num_seqs: no such folder", "a/max_num_seqs: no such folder"),
        ("max_num_seqs.json and block_size=2", "max_num_seqs.json and block_size=2"),
        ("--max-num-seqs and step_fun", "--max-num-seqs and step_fun"),
    ],
)
def test_settings_are_called_by_their_flags(said: str, shown: str) -> None:
    parser = main.build_parser("serve")[1]["serve"]
    assert parser.in_flags(said) == shown


def test_ways_out_are_flags_to_type() -> None:
    parser = main.build_parser("serve")[1]["serve"]
    assert parser.setting("max_num_seqs", 8) == "--max-num-seqs 8"
    assert parser.setting("enforce_eager", True) == "--enforce-eager"
    assert parser.setting("prefix_caching", False) == "--no-prefix-caching"


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["generate", "m", "--max-token", "5"], "did you mean --max-tokens?"),
        (["generate", "m", "--temprature=1"], "did you mean --temperature?"),
        (["serve", "m", "--served-name", "x"], "did you mean --served-model-name?"),
        (["bench", "m", "--workloads", "decode"], "did you mean --workload?"),
        (["genrate"], "did you mean generate?"),
        (["--verbose"], "required: COMMAND"),
        (["generate", "m", "--kv-cache-memory-bytes", "lots"], "512MiB"),
        (["bench", "m", "--batch", "0"], "1,8,32"),
        (["generate", "m", "--token-ids", "1,x"], "1,2,3"),
        (["generate", "m", "--dtype", "float8"], "bfloat16"),
    ],
)
def test_wrong_flags_get_a_hint(
    argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = exit_of(argv, capsys)
    assert (code, out) == (2, "")
    assert "error:" in err
    assert hint in err
    assert len(err.splitlines()) == 2
    assert err.splitlines()[1].startswith("Try 'ridgeline")


def failing(monkeypatch: pytest.MonkeyPatch, error: BaseException) -> None:
    def run(args: object) -> int:
        raise error

    monkeypatch.setattr(generate, "run", run)


@pytest.mark.parametrize(
    "error", [ConfigError("no config.json here"), RequestFault("no text", param="prompt")]
)
def test_our_errors_are_one_line(
    error: Exception, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, error)
    assert main.main(["generate", "m", "-p", "x"]) == 2
    out, err = capsys.readouterr()
    assert (out, err) == ("", f"ridgeline: error: {error}\n")


def test_lack_of_memory_shows_the_table_and_the_ways_out(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    error = DoesNotFit("too big", (("weights", 3 << 30), ("KV cache", 10**9)), ("dtype bfloat16",))
    failing(monkeypatch, error)
    assert main.main(["generate", "m", "-p", "x"]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "ridgeline: error: too big"
    assert lines[1].split() == ["weights", "3.221", "GB", "3.000", "GiB"]
    assert lines[3] == "  would help: dtype bfloat16"


def test_ctrl_c_is_quiet(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, KeyboardInterrupt())
    assert main.main(["generate", "m", "-p", "x"]) == 130
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(
    "fault",
    [
        ModuleNotFoundError("No module named 'torch'", name="torch"),
        ImportError("libcudart.so.13: cannot open shared object file"),
    ],
)
def test_a_library_that_is_missing_is_one_line(
    fault: ImportError, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failing(monkeypatch, fault)
    assert main.main(["generate", "x", "-p", "hi"]) == 2
    assert capsys.readouterr().err.startswith(
        f"ridgeline: error: a library cannot be loaded: {fault}; install Ridgeline"
    )


def test_our_own_bugs_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    for bug in (ZeroDivisionError(), ImportError("no such name", name="ridgeline.llm")):
        failing(monkeypatch, bug)
        with pytest.raises(type(bug)):
            main.main(["generate", "m", "-p", "x"])


def test_a_closed_pipe_ends_quietly(tmp_path: Path) -> None:
    program = (
        "from ridgeline.cli import generate, main\n"
        "def run(args):\n"
        "    for _ in range(100000): print('text ' * 20)\n"
        "    return 0\n"
        "generate.run = run\n"
        "raise SystemExit(main.main(['generate', 'm', '-p', 'x']))\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        child.stdout.readline()
        child.stdout.close()
        err = child.stderr.read()
    assert (child.returncode, err) == (141, b"")


# Unbuffered help is not among them: argparse itself drops what it cannot write.
WRITERS = [(["inspect"], ""), (["inspect"], "1"), (["inspect", "--json"], "")]
WRITERS += [(["inspect", "--json"], "1"), (["--help"], "")]


def writers(*often: int) -> pytest.MarkDecorator:
    """All of them: these in `make test` too."""
    return pytest.mark.parametrize(
        ("argv", "unbuffered"),
        [
            pytest.param(*writer, marks=() if number in often else pytest.mark.slow)
            for number, writer in enumerate(WRITERS)
        ],
    )


@writers(0, 4)
def test_a_closed_pipe_has_one_exit_code(argv: list[str], unbuffered: str) -> None:
    """Tables go through rich, which would end with a code of its own."""
    read, write = os.pipe()
    os.close(read)
    done = command(argv, write, unbuffered)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@writers(3, 4)
def test_a_full_disk_is_one_line(argv: list[str], unbuffered: str) -> None:
    done = command(argv, os.open("/dev/full", os.O_WRONLY), unbuffered)
    assert done.returncode == 2
    assert done.stderr == (
        "ridgeline: error: the output cannot be written: No space left on device; make room "
        "there, or write elsewhere\n"
    )


@pytest.mark.parametrize("closed", [*slow(">&-", "<&-"), "2>&-", ">&- 2>&- <&-"])
def test_streams_that_are_closed_take_nothing(closed: str) -> None:
    line = f'exec "$0" -m ridgeline inspect --json {closed}'
    done = subprocess.run(
        ["sh", "-c", line, sys.executable], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) == (">&-" not in closed.replace("2>&-", ""))


def command(argv: list[str], out: int, unbuffered: str) -> subprocess.CompletedProcess[str]:
    """Run it with this descriptor as standard output, which is closed here."""
    try:
        return subprocess.run(
            [sys.executable, "-m", "ridgeline", *argv],
            stdout=out,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": unbuffered},
        )
    finally:
        os.close(out)


def test_other_faults_of_the_system_are_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    failing(monkeypatch, PermissionError(13, "Permission denied"))
    with pytest.raises(PermissionError):
        main.main(["generate", "m", "-p", "x"])


def test_prompts_come_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "p.txt").write_text("from a file\n", encoding="utf-8")
    monkeypatch.setattr("sys.stdin", SimpleNamespace(read=lambda: "from stdin"))
    argv = ["generate", "m", "--token-ids", "1,2 3", "--prompt-file", str(tmp_path / "p.txt")]
    args = main.parse([*argv, "-p", "-", "-p", "plain"])
    assert generate.read_prompts(args) == ["from stdin", "plain", "from a file\n", (1, 2, 3)]


def test_no_prompt_and_unreadable_files_are_explained(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no prompt was given"):
        generate.read_prompts(main.parse(["generate", "m"]))
    missing = str(tmp_path / "missing.txt")
    with pytest.raises(ConfigError, match=r"--prompt-file .*missing\.txt"):
        generate.read_prompts(main.parse(["generate", "m", "--prompt-file", missing]))
