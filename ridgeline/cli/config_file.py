"""What does a file of settings say? Its keys are the names of a command's flags, read from the
parser itself; what is typed beats what the file says."""

from __future__ import annotations

import argparse
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from ridgeline.cli.parser import Parser
from ridgeline.errors import ConfigError

FLAGS = ("--config", "--plan")
PLANNED = "plan"  # the section of a plan that is no setting
NOT_IN_FILES = ("--help", "--help-all", *FLAGS)
NUMBERS: dict[object, str] = {int: "a whole number", float: "a number"}


def use_file(parser: Parser, words: Sequence[str]) -> dict[str, object]:
    """Make what the file that `words` name says the defaults of `parser`, and return it by
    destination. ConfigError names the file, the key and what it may be."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for flag in FLAGS:
        finder.add_argument(flag, dest=flag)
    named = {flag: name for flag, name in vars(finder.parse_known_args(words)[0]).items() if name}
    if len(named) > 1:
        raise ConfigError(f"give {' or '.join(FLAGS)}, not both; what is typed beats either")
    if not named or not named.keys() <= parser._option_string_actions.keys():
        return {}
    ((flag, name),) = named.items()
    path = Path(name).expanduser()
    content = dict(_read(path, flag))
    if flag == "--plan":
        parser.planned = content.pop(PLANNED, None)
        if not isinstance(parser.planned, dict):
            raise ConfigError(f"{path} is not of ridgeline plan --out; use --config for settings")
    said = {}
    for key, action, value in _settings(parser, content, path):
        if action.dest in said:
            raise ConfigError(f"{path}: {key} is given twice")
        said[action.dest] = _value(action, value, f"{path}: {key}")
        for flag in action.option_strings:
            parser.sources[flag] = str(path)
    parser.set_defaults(**said)
    return said


def keep_typed(args: argparse.Namespace, said: Mapping[str, object], parser: Parser) -> None:
    """argparse adds what is typed to a default list; here it takes its place. What was typed is not
    the file's fault any more."""
    for action in parser._actions:
        found, default = getattr(args, action.dest, None), said.get(action.dest)
        if isinstance(default, list) and isinstance(found, list) and len(found) > len(default):
            setattr(args, action.dest, found[len(default) :])
        if action.dest in said and getattr(args, action.dest) != default:
            for flag in action.option_strings:
                parser.sources.pop(flag, None)


def _read(path: Path, flag: str) -> Mapping[str, Any]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{flag} {path} cannot be read: {error}") from None
    if path.suffix not in (".toml", ".yaml", ".yml"):
        raise ConfigError(f"{flag} {path}: name a file that ends in .toml, .yaml or .yml")
    try:
        found = (
            tomllib.loads(text) if path.suffix == ".toml" else import_module("yaml").safe_load(text)
        )
    except ImportError:
        raise ConfigError(f"{flag} {path}: pip install pyyaml, or write it as TOML") from None
    except Exception as error:  # whatever kind of its own each parser raises
        why = " ".join(str(error).split())
        raise ConfigError(f"{path} is no {path.suffix[1:].upper()}: {why}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{path}: write keys and values, such as port = 8000")
    return found


def _settings(
    parser: Parser, content: Mapping[str, Any], path: Path
) -> Iterator[tuple[str, argparse.Action, object]]:
    """Each key with its flag. A section has the title of a group and holds flags of it."""
    groups = {group.title: group for group in parser._action_groups if group.title}
    for key, value in content.items():
        if not isinstance(value, dict):
            yield str(key), _action(parser, str(key), path), value
            continue
        if key not in groups:
            known = sorted(t for t in groups if t.isidentifier() and t != "options")
            raise ConfigError(f"{path}: unknown section [{key}]; there are {', '.join(known)}")
        for name, inner in value.items():
            action = _action(parser, str(name), path)
            if action not in groups[key]._group_actions:
                raise ConfigError(f"{path}: {name} does not belong into [{key}]")
            yield str(name), action, inner


def _action(parser: Parser, key: str, path: Path) -> argparse.Action:
    flag = "--" + key.replace("_", "-")
    found = parser._option_string_actions.get(flag)
    if flag in NOT_IN_FILES or found is None:
        found = next((a for a in parser._actions if not a.option_strings and a.dest == key), None)
    if found is None:
        like = parser.like(flag)
        meant = f"; did you mean {like[2:]}?" if like and like not in NOT_IN_FILES else ""
        raise ConfigError(f"{path}: unknown key {key!r}{meant}")
    return found


def _value(action: argparse.Action, value: object, where: str) -> object:
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ConfigError(f"{where} is {value!r}; it must be true or false")
        return action.const if value else not action.const
    if isinstance(action, argparse._AppendAction):
        items = value if isinstance(value, list) else [value]
        return [_one(action, item, where) for item in items]
    return _one(action, value, where)


def _one(action: argparse.Action, value: object, where: str) -> object:
    kind = action.type or str
    wanted = NUMBERS.get(kind, "text" if kind is str else "text or a number")
    allowed = {int: int, float: (int, float), str: str}.get(kind, (str, int, float))  # type: ignore[arg-type]
    if isinstance(value, bool) or not isinstance(value, allowed):  # type: ignore[arg-type]
        raise ConfigError(f"{where} is {value!r}; it must be {wanted}")
    try:
        found: object = kind(str(value))  # type: ignore[operator]
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise ConfigError(f"{where}: {error}") from None
    if action.choices is not None and found not in action.choices:
        known = ", ".join(map(str, action.choices))
        raise ConfigError(f"{where} is {value!r}; choose one of {known}")
    return found
