"""Which level the kernels work at, and that memory checkers find nothing."""

from __future__ import annotations

import ctypes
import importlib
import json
import os
import shutil
import subprocess
import sys
import zlib
from pathlib import Path

import pytest

from ridgeline.errors import ConfigError
from ridgeline.kernels.cpu import native

ROOT = Path(__file__).parents[3]
SHOW = (
    "from ridgeline.kernels.cpu import native; print(native.library() is not None, native.level())"
)

ANNOUNCE = "from ridgeline.kernels.cpu.native import announce; announce()"
WITHOUT_THE_LIBRARY = shutil.ignore_patterns("native_cpu.so", "demo", "__pycache__")

needs_library = pytest.mark.skipif(native.library() is None, reason="no native CPU kernels here")


def test_the_environment_lowers_the_level() -> None:
    assert native.wanted_level({}, "bf16") == "bf16"
    assert native.wanted_level({native.VARIABLE: "none"}, "bf16") == "none"
    with pytest.raises(ConfigError, match="choose one of none, avx2, avx512, bf16, amx"):
        native.wanted_level({native.VARIABLE: "sse9"}, "bf16")
    with pytest.raises(ConfigError, match="amx: this processor has at most bf16"):
        native.wanted_level({native.VARIABLE: "amx"}, "bf16")


@needs_library
def test_a_process_without_the_kernels() -> None:
    environment = os.environ | {native.VARIABLE: "none"}
    command = [sys.executable, "-c", SHOW]
    done = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.split() == ["False", "none"], done.stderr


def test_missing_kernels_are_told_with_the_way_out(tmp_path: Path) -> None:
    """A copy of the package without the library, in a process that set up no log."""
    shutil.copytree(ROOT / "ridgeline", tmp_path / "ridgeline", ignore=WITHOUT_THE_LIBRARY)
    command = [
        sys.executable,
        "-c",
        "from ridgeline.kernels.cpu.native import announce; announce()",
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    lines = done.stderr.splitlines()
    assert done.returncode == 0
    if native.can_be_built():
        assert len(lines) == 1
        assert "166 tokens/s" in lines[0]
        assert "`make native`" in lines[0]
    else:
        assert lines == []


def test_every_change_of_the_arguments_has_a_number() -> None:
    """Raise `native.ABI` and put its number and the new digest here."""
    structs = {}
    names = [f"kernels.cpu.{file.stem}" for file in Path(native.__file__).parent.glob("*.py")]
    for file in (*names, "distributed.shared_memory"):
        module = importlib.import_module(f"ridgeline.{file}")
        for name, found in vars(module).items():
            if isinstance(found, type) and issubclass(found, ctypes.Structure):
                structs[f"{found.__module__}.{name}"] = [
                    (field[0], field[1].__name__) for field in found._fields_
                ]
    digest = zlib.crc32(json.dumps(structs, sort_keys=True).encode())
    assert (native.ABI, digest) == (4, 2553645284)


@pytest.mark.skipif(
    shutil.which("gcc") is None or not native.can_be_built(), reason="needs a C compiler"
)
@pytest.mark.parametrize("number", [0, native.ABI + 1])
def test_a_library_of_another_version_is_refused(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It has every name that is asked for and a wrong number; 0: none, as older ones."""
    source, library = tmp_path / "other.c", tmp_path / "other.so"
    names = ("pool_set_threads", "pool_set_spin", "isa_set", "rl_advise_huge", "isa_best")
    lines = [f"int {name}() {{ return 2; }}" for name in names]
    if number:
        lines.append(f"int rl_abi() {{ return {number}; }}")
    source.write_text("\n".join(lines))
    subprocess.run(["gcc", "-shared", "-o", str(library), str(source)], check=True)
    monkeypatch.setattr(native, "_FILE", library)
    found = native._loaded.__wrapped__()
    assert found[0] is None
    monkeypatch.setattr(native, "_loaded", lambda: found)
    assert native.library() is None
    native.announce()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert f"interface {number}, not {native.ABI}" in caplog.text
    assert "`make native`" in caplog.text


@needs_library
def test_a_level_holds_for_a_while() -> None:
    before = native.level()
    with native.at_level("avx2"):
        assert native.level() == "avx2"
    assert native.level() == before


@needs_library
@pytest.mark.skipif(native.best_level() == "amx", reason="this processor has every level")
def test_a_level_that_is_not_there() -> None:
    with pytest.raises(ConfigError, match="cannot work at level 'amx'"), native.at_level("amx"):
        pass


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
def test_sanitizers_find_nothing() -> None:
    command = [sys.executable, "tools/sanitize_native.py", "--cases", "10"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all right" in done.stdout
