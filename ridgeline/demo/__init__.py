"""Where are the small models that come with the package?"""

from __future__ import annotations

from pathlib import Path

from ridgeline.errors import ConfigError

NAMES = ("chat", "draft", "moe")
PREFIX = "demo:"
DEFAULT = "demo:chat"  # the model of whoever names none
FILES = ("config.json", "tokenizer.json")
WEIGHTS = ("model.safetensors", "model.safetensors.index.json")  # one file, or shards


def folder(name: str = "chat") -> Path:
    """The folder of the bundled model `name`. ConfigError when there is none, or not all of it."""
    if name not in NAMES:
        known = ", ".join(PREFIX + known for known in NAMES)
        raise ConfigError(f"no bundled model is called {PREFIX}{name}; there are {known}")
    path = Path(__file__).parent / name
    missing = [file for file in FILES if not (path / file).is_file()]
    if not any((path / file).is_file() for file in WEIGHTS):
        missing.append(" or ".join(WEIGHTS))
    if missing:
        raise ConfigError(
            f"the bundled model {PREFIX}{name} is not part of this installation "
            f"({', '.join(missing)} missing in {path}); name a model folder or a hub id instead"
        )
    return path


def located(model: str) -> str:
    """MODEL with the name of a bundled model replaced by its folder; any other is left as it is."""
    return str(folder(model.removeprefix(PREFIX))) if model.startswith(PREFIX) else model
