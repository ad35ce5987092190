"""How much does a user download? Sizes of our wheel and of all that it needs, torch apart."""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True, slots=True)
class Wheel:
    name: str
    version: str
    requires: tuple[str, ...]
    num_bytes: int = 0


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def required_name(requirement: str) -> str | None:
    """The package that a Requires-Dist line names, None for one behind an extra."""
    if "extra ==" in requirement:
        return None
    return canonical(re.split(r"[ ;<>=!~(\[]", requirement.strip(), maxsplit=1)[0])


def pip(*words: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "-q", *words], check=True, cwd=ROOT)


def resolve(report: Path) -> dict[str, Wheel]:
    """Everything an installation of our package takes, by canonical name."""
    pip(
        *("install", "--dry-run", "--ignore-installed", "--report", str(report)),
        *("-c", "constraints.txt", "."),
    )
    rows = json.loads(report.read_text(encoding="utf-8"))["install"]
    wheels = {}
    for metadata in (row["metadata"] for row in rows):
        requires = tuple(
            name for line in metadata.get("requires_dist", ()) if (name := required_name(line))
        )
        name = canonical(metadata["name"])
        wheels[name] = Wheel(name, metadata["version"], requires)
    return wheels


def closure(wheels: dict[str, Wheel], start: str, without: str) -> set[str]:
    """What `start` needs, not following `without`."""
    found: set[str] = set()
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in wheels and name not in found and name != without:
            found.add(name)
            waiting += wheels[name].requires
    return found


def download(wheel: Wheel, folder: Path) -> int:
    """Bytes of the file that pip would fetch for it."""
    target = folder / wheel.name
    if wheel.name == "ridgeline":
        pip("wheel", "--no-deps", "-w", str(target), ".")
    else:
        pip("download", "--no-deps", "-d", str(target), f"{wheel.name}=={wheel.version}")
    return sum(path.stat().st_size for path in target.iterdir())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        wheels = resolve(folder / "report.json")
        ours = closure(wheels, "ridgeline", without="torch")
        sizes = {name: download(wheels[name], folder) for name in sorted(ours)}
    total = sum(sizes.values())
    if args.json:
        print(json.dumps({"total_bytes": total, "wheels": sizes}, indent=2))
        return 0
    for name, num_bytes in sorted(sizes.items(), key=lambda item: -item[1]):
        print(f"{name:<24} {wheels[name].version:<14} {num_bytes / 1e6:8.3f} MB")
    print(f"{'all without torch':<39} {total / 1e6:8.3f} MB = {total / 2**20:.3f} MiB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
