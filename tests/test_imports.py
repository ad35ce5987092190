"""Does what is imported beside torch's libraries really do without torch, and is it all there?"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from ridgeline import imports
from ridgeline.imports import WITHOUT_TORCH, load_beside
from ridgeline.startup import StartUp


def run(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_nothing_of_it_imports_torch() -> None:
    names = ", ".join(WITHOUT_TORCH)
    assert run(f"import sys, {names}; print('torch' in sys.modules)") == "False"


def test_a_fresh_process_imports_its_front() -> None:
    program = (
        "import sys\n"
        "from ridgeline.imports import import_engine\n"
        "from ridgeline.startup import StartUp\n"
        "startup = StartUp()\n"
        "import_engine(startup, 'ridgeline.llm')\n"
        "print('ridgeline.llm' in sys.modules, *(phase.name for phase in startup.report()))\n"
    )
    names = "True imports without torch torch imports other"
    assert run(program) == names


def test_libraries_that_are_not_there_say_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(imports, "LIBRARIES", (("none-of-that-name.so", 0),))
    thread = load_beside()
    assert thread is not None
    thread.join()
    monkeypatch.setattr(imports, "find_spec", lambda name: None)
    assert load_beside() is None
    imports.import_engine(StartUp(), "ridgeline.clock")
