"""Who drafts tokens in this engine, and how many? What `speculate` asked for becomes what is done.

Drafts are checked in captured steps (recorded ones on a CPU), so an engine without these has none.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from ridgeline import demo
from ridgeline.architectures.draft_groups import draft_groups
from ridgeline.architectures.kv_groups import kv_groups
from ridgeline.architectures.scheme_config import is_quantized
from ridgeline.architectures.spec import NATIVE, ExpertsSpec, ModelSpec
from ridgeline.config import EngineConfig
from ridgeline.cost.captured import RECORDED_KV
from ridgeline.cost.memory import device_kind
from ridgeline.errors import ConfigError
from ridgeline.executor.rows import FIRST_ROWS
from ridgeline.formats import (
    AUTO_DRAFT_TOKENS,
    CHECKPOINT,
    LAYERS,
    MODEL,
    AskedDrafts,
    read_speculate,
)
from ridgeline.kernels.cpu.native import library, why_no_library
from ridgeline.speculation.memory import (
    DraftMemory,
    DraftSetting,
    draft_head,
    draft_model,
    early_layers,
    looking_up,
)
from ridgeline.speculation.price import head_spec

KNOWN_DRAFTS = {"chat": "draft"}  # among the bundled models

ReadSpec = Callable[[str], ModelSpec]  # of a model by name, as MODEL of the command line


@dataclass(frozen=True, slots=True)
class Drafting:
    """What was decided, None for off, and why. `draft` is the model that drafts, if it is one."""

    asked: AskedDrafts | None
    because: str
    draft: ModelSpec | None = None
    kind: str = "cuda"  # of device

    @property
    def method(self) -> str | None:
        return None if self.asked is None else self.asked.method

    @property
    def argument(self) -> str:
        return "" if self.asked is None else self.asked.argument

    @property
    def max_draft_tokens(self) -> int:
        """Of one request in one step."""
        if self.asked is None:
            return 0
        return self.asked.num_draft_tokens or AUTO_DRAFT_TOKENS[device_kind(self.kind)]

    @property
    def num_draft_tokens(self) -> int | None:
        return None if self.asked is None else self.asked.num_draft_tokens

    def memory(self, spec: ModelSpec, setting: DraftSetting) -> DraftMemory:
        """What it takes on the device, beside the model `spec`."""
        if self.asked is None:
            return DraftMemory(())
        if self.draft is not None and self.asked.line.is_head:
            return draft_head(spec, self.draft, setting)
        if self.draft is not None:
            weights = CHECKPOINT if is_quantized(self.draft) else "plain"
            return draft_model(spec, self.draft, replace(setting, weight_format=weights))
        if self.asked.line.argument == LAYERS:
            return early_layers(spec, setting)
        return looking_up(setting)

    @property
    def text(self) -> str:
        if self.asked is None:
            return "off"
        name = ":".join(filter(None, (self.asked.method, self.asked.argument)))
        if self.asked.num_draft_tokens is None:
            return f"{name}, up to {self.max_draft_tokens} drafts"
        return f"{name}, {self.asked.num_draft_tokens} drafts"


def decide_drafting(
    config: EngineConfig,
    spec: ModelSpec,
    model_path: str,
    *,
    why_not: str | None,
    read_draft: ReadSpec | None,
) -> Drafting:
    """`why_not` is the first reason against drafts in this engine: with `auto` they are off then,
    and what was asked for is a ConfigError."""
    if config.speculate != "auto":
        return _as_asked(config.speculate, spec, why_not, read_draft)
    known = known_draft(model_path)
    if config.num_ranks > 1:
        return Drafting(None, "several ranks draft where a method is named, such as ngram")
    if known is None:
        return Drafting(None, "no draft is known for this model; ngram or a draft can be asked for")
    if why_not is not None:
        return Drafting(None, why_not)
    try:
        found = _as_asked(f"draft:{known}", spec, None, read_draft)
    except ConfigError as problem:
        return Drafting(None, str(problem))
    return Drafting(found.asked, "the draft that comes with this model", found.draft)


def num_token_rows(max_rows: int) -> int:
    """Rows whose tokens stay on the device, of an engine whose largest captured step has so many:
    as many as the executor begins with."""
    return max(FIRST_ROWS, 1 << max_rows.bit_length())


def known_draft(model_path: str) -> str | None:
    """The name of the bundled model that drafts for the model in this folder."""
    here = Path(model_path)
    for name, draft in KNOWN_DRAFTS.items():
        if here.name == name and here.resolve().parent == Path(demo.__file__).resolve().parent:
            return demo.PREFIX + draft
    return None


def why_no_drafts(
    config: EngineConfig,
    spec: ModelSpec,
    kind: str,
    dtype: str,
    captured: int,
    ranks: tuple[str, str],
) -> str | None:
    """What of this engine does not go with drafts, and the way out. `captured` as resolved;
    `ranks`: why several ranks capture no step, and what lets them, or twice nothing."""
    if config.deterministic:
        return (
            "drafts are checked several at once, which deterministic rules out; leave out one of "
            "deterministic and speculate"
        )
    if ranks[0]:
        return f"drafts need captured steps, and {ranks[0]}; {ranks[1]}"
    if captured:
        return None
    if spec.implementation != NATIVE:
        return f"drafts need captured steps, which implementation {spec.implementation} has not"
    if any(isinstance(layer.feed_forward, ExpertsSpec) for layer in spec.layers):
        return (
            "drafts need captured steps, which models with experts have not in weight formats"
            " without grouped products, nor on a CPU in float32"
        )
    if config.enforce_eager:
        return "drafts need captured steps, which enforce_eager rules out; leave it out"
    if kind == "cpu":
        return _why_not_on_cpu(config, dtype)
    return f"drafts need captured steps, which {_asked_backend(config)} rules out; leave it at auto"


def _why_not_on_cpu(config: EngineConfig, dtype: str) -> str:
    """There drafts are verified in recorded steps (`resolve._captured_rows`)."""
    if library() is None:
        return f"drafts need the native kernels on a CPU, and they are missing: {why_no_library()}"
    if config.kv_cache_dtype not in RECORDED_KV:
        return (
            f"the kernels that verify drafts on a CPU read no {config.kv_cache_dtype} KV cache; "
            f"use kv_cache_dtype {' or '.join(RECORDED_KV)}"
        )
    if dtype not in ("bfloat16", "float32"):
        return f"drafts are verified in bfloat16 or float32 on a CPU, not in {dtype}"
    if config.attention_backend not in ("auto", "native"):
        return f"drafts need recorded steps, which {_asked_backend(config)} rules out; use auto"
    return f"in {dtype} on a CPU drafts are used only where a method is named, such as ngram"


def _asked_backend(config: EngineConfig) -> str:
    return f"attention_backend {config.attention_backend}"


def _as_asked(
    text: str, spec: ModelSpec, why_not: str | None, read_draft: ReadSpec | None
) -> Drafting:
    asked = read_speculate(text)
    if asked is None:
        return Drafting(None, "as asked")
    if why_not is not None:
        raise ConfigError(f"speculate {text!r}: {why_not}, or use speculate off")
    wanted, draft = asked.line.argument, None
    if wanted == LAYERS and int(asked.argument) >= spec.num_layers:
        raise ConfigError(
            f"speculate {text!r}: the model has {spec.num_layers} layers; draft with fewer, at most"
            f" {spec.num_layers - 1}"
        )
    if asked.line.is_head:
        draft = head_spec(spec)
    if wanted == MODEL and read_draft is not None:
        draft = read_draft(asked.argument)
        draft_groups(kv_groups(spec), draft)  # raises
    return Drafting(asked, asked.line.text, draft)
