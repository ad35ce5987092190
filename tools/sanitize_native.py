"""Do the native CPU kernels stay within their memory? Build them with sanitizers and a driver.

usage: python tools/sanitize_native.py [--seed 1] [--cases 60] [--sanitize address,undefined]

Tiles (AMX) are emulated, so that code is run on processors that have none.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parent.parent
KERNELS = ROOT / "ridgeline/kernels/cpu"
DRIVER = ROOT / "tests/kernels/cpu"


def build(folder: Path, sanitize: str) -> Path:
    """The driver as a program; CalledProcessError if it does not compile."""
    spec = importlib.util.spec_from_file_location("ridgeline_setup", ROOT / "setup.py")
    if spec is None or spec.loader is None:
        raise FileNotFoundError("setup.py")
    setup = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(setup)
    extra = ["-O1", "-g", "-DRL_EMULATE_TILES", f"-I{KERNELS}", f"-I{DRIVER}"]
    if sanitize:
        extra += [f"-fsanitize={sanitize}", "-fno-sanitize-recover=all"]

    def compiled(source: Path) -> str:
        target = folder / f"{source.stem}.o"
        flags = setup.flags(str(source))
        command = ["g++", "-c", *flags, *extra, str(source), "-o", str(target)]
        subprocess.run(command, check=True)
        return str(target)

    sources = [*sorted(KERNELS.glob("*.cpp")), *sorted(DRIVER.glob("driver*.cpp"))]
    with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
        objects = list(pool.map(compiled, sources))
    program = folder / "driver"
    subprocess.run(["g++", *extra, *objects, "-o", str(program), "-pthread"], check=True)
    return program


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--cases", type=int, default=60)
    parser.add_argument("--sanitize", default="address,undefined")
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        program = build(Path(folder), asked.sanitize)
        return subprocess.run([str(program), str(asked.seed), str(asked.cases)]).returncode


if __name__ == "__main__":
    sys.exit(main())
