"""Model folders whose template or tokenizer does whatever a hostile author wants, and what sets
each of them off."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import Regex, normalizers, pre_tokenizers

from tests.server.model_folder import TEMPLATE, write_model_folder

# What a template does when the conversation names it; all else is rendered as usual.
TEMPLATES: dict[str, str] = {
    "squares": "{% set x = 10000**100 %}" + "{% set x = x * x %}" * 15 + "{{ x }}",
    "center": "{{ 'a'.center(1500000000) }}",
    "center filter": "{{ 'a' | center(1500000000) }}",
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat twice": "{{ 'a' * 10**6 * 10**6 }}",
    "percent": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent filter": "{{ '%1000000000d' | format(1) }}",
    "format": "{{ '{:>1000000000}'.format(1) }}",
    "format of format": "{{ '{:>{}}'.format(1, 1000000000) }}",
    "turns": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "zfill": "{{ '1'.zfill(1000000000) }}",
    "ljust": "{{ '1'.ljust(10**9) ~ '1'.rjust(10**9) }}",
    "join": "{% set s = 'a' * 900000 %}{{ ([s] * 9000) | join(s) }}",
    "replace": "{% set s = 'a' * 900000 %}{{ s.replace('a', s) }}",
    "replace filter": "{% set s = 'a' * 900000 %}{{ s | replace('a', s) }}",
    "indent": "{{ ('a\\n' * 9000) | indent(10**9) }}",
    "batch": "{{ [1] | batch(10**9, 1) | list }}",
    "list": "{{ [1] * 10**9 }}",
    "doubling": "{% set n = namespace(x='aaaaaaaa') %}{% for i in range(60) %}"
    "{% set n.x = n.x ~ n.x %}{% endfor %}{{ n.x }}",
    "macro": "{% macro m(n) %}{{ m(n) }}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "wide macro": "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "sort": "{{ range(99999) | list | sort | map('string') | list | join | wordwrap(1) }}",
    "output": "{% for i in range(9999) %}{{ 'a' * 1000 }}{% endfor %}",
}
GROWTH = "\x01" * 20_000  # a tokenizer with this normalizer makes 5 MB of it
SLOW = "b" * 64 + "!"  # takes a tokenizer with this split 2**64 steps


def write_template_bombs(folder: Path) -> Path:
    """Its template is a bomb when the first message is the name of one."""
    write_model_folder(folder)
    cases = "".join(
        f"{{% {'el' * bool(i)}if messages[0].content == '{name}' %}}{bomb}"
        for i, (name, bomb) in enumerate(TEMPLATES.items())
    )
    (folder / "chat_template.jinja").write_text(f"{cases}{{% else %}}{TEMPLATE}{{% endif %}}")
    return folder


def write_tokenizer_bombs(folder: Path) -> Path:
    """Its tokenizer blows up on GROWTH and on SLOW."""
    write_model_folder(folder)
    path = folder / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
    tokenizer.normalizer = normalizers.Replace(GROWTH[0], GROWTH[:256])  # more does not load
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"(b|b?b)+$"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.save(str(path))
    return folder


def write_growing_decoder(folder: Path) -> Path:
    """Its pieces cannot be worked out in any memory."""
    write_model_folder(folder)
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    step = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 1_000_000}
    content["decoder"] = {"type": "Sequence", "decoders": [step, step, {"type": "Fuse"}]}
    path.write_text(json.dumps(content))
    return folder
