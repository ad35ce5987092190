"""Can a stranger install this? Resolves what pyproject.toml asks for against the public index
alone, without this machine's pip settings, for each Python and processor that the README names.

Nothing is built or installed; of a wheel only its metadata is read.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import tomllib
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ("3.11", "3.12", "3.13")
MACHINES = ("x86_64", "aarch64")
NEWEST_GLIBC = 39  # of Ubuntu 24.04; CUDA's libraries ask for 2.28 at most
CERTIFICATES = ("PIP_CERT", "SSL_CERT_FILE")
AT_ONCE = 4  # pip mostly waits for the index


@dataclass(frozen=True, slots=True)
class Case:
    """What is resolved, for which Python and processor."""

    python: str
    machine: str
    extras: tuple[str, ...]
    constraints: str | None


def plain_environment(folder: Path) -> dict[str, str]:
    """This process's environment without pip's settings: no further index, no local wheels. The
    certificate stays: it says whom to trust, not where to look."""
    certificate = next((os.environ[name] for name in CERTIFICATES if name in os.environ), "")
    settings = folder / "pip.conf"
    settings.write_text(f"[global]\ncert = {certificate}\n" if certificate else "")
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    return {**kept, "PIP_CONFIG_FILE": str(settings), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}


def requirements(extras: tuple[str, ...]) -> list[str]:
    """What pyproject.toml asks for."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    optional = project["optional-dependencies"]
    return [*project["dependencies"], *(line for name in extras for line in optional[name])]


def platforms(machine: str) -> list[str]:
    """The tags of wheels that such a machine takes, newest first."""
    numbered = [f"manylinux_2_{minor}_{machine}" for minor in range(NEWEST_GLIBC, 4, -1)]
    named = [f"manylinux{name}_{machine}" for name in ("2014", "2010", "1")]
    return [*numbered, *named, f"linux_{machine}"]


def resolve(case: Case) -> dict[str, str]:
    """The version of each package that would be installed; CalledProcessError holds pip's words
    where nothing fits."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        report = folder / "report.json"
        words = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed"]
        words += ["--quiet", "--use-feature=fast-deps", "--report", str(report)]
        words += ["--only-binary=:all:", "--implementation=cp", "--target", str(folder / "unused")]
        words += [f"--python-version={case.python}"]
        words += [f"--platform={tag}" for tag in platforms(case.machine)]
        words += ["-c", case.constraints] if case.constraints else []
        words += requirements(case.extras)
        environment = plain_environment(folder)
        subprocess.run(words, cwd=ROOT, env=environment, check=True, capture_output=True, text=True)
        rows = json.loads(report.read_text(encoding="utf-8"))["install"]
    return {row["metadata"]["name"]: row["metadata"]["version"] for row in rows}


def cases() -> list[Case]:
    """With the pins and the extra of the tests, and without either, as the bare wheel."""
    places = [(python, machine) for python in PYTHONS for machine in MACHINES]
    pinned = [Case(*place, ("test",), "constraints.txt") for place in places]
    return [*pinned, *(Case(*place, (), None) for place in places)]


def attempt(case: Case) -> tuple[Case, dict[str, str], str]:
    """The versions, or pip's reason why there are none."""
    try:
        return case, resolve(case), ""
    except subprocess.CalledProcessError as error:
        return case, {}, error.stderr


def describe(case: Case, versions: dict[str, str]) -> str:
    what = f"{'with' if case.constraints else 'without'} pins"
    what += f" and extra {','.join(case.extras)}" if case.extras else ""
    shown = "".join(f", {name} {versions[name]}" for name in ("torch", "triton", "setuptools"))
    return f"Python {case.python} {case.machine:<8}{what:<26}{len(versions):3} packages{shown}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="all names and versions")
    args = parser.parse_args()
    with ThreadPoolExecutor(AT_ONCE) as pool:
        results = list(pool.map(attempt, cases()))
    failed = [(case, reason) for case, versions, reason in results if not versions]
    if args.json:
        print(json.dumps([{**asdict(case), "versions": rows} for case, rows, _ in results]))
    else:
        print("\n".join(describe(case, rows) for case, rows, _ in results if rows))
    for case, reason in failed:
        print(f"\n{case} does not resolve:\n{reason}", file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
