"""Who drafts for this engine? The part of `build` that opens draft methods.

A method that has no line here is opened by the class of its line in `formats.DRAFT_METHODS` as a
look-up is: with the device, the rows of a step and the drafts of a row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ridgeline import demo
from ridgeline.architectures import read_spec
from ridgeline.architectures.eagle3_head import eagle3_names, read_eagle3
from ridgeline.architectures.mtp_head import read_mtp
from ridgeline.architectures.spec import ModelSpec, check_served
from ridgeline.config import ResolvedConfig
from ridgeline.costing import asked_drafts
from ridgeline.errors import ConfigError
from ridgeline.executor.decode_graphs import why_not_captured
from ridgeline.executor.drafter import Drafting
from ridgeline.formats import DRAFT_METHODS, FOLDER, LAYERS, MODEL, RATE, AskedDrafts
from ridgeline.kvcache import KVCache
from ridgeline.layers.decoder import Decoder
from ridgeline.loader import ModelFolder, open_checkpoint, read_config, resolve_model
from ridgeline.quantization import open_weight_format
from ridgeline.registry import load
from ridgeline.resolve import longest_context
from ridgeline.speculation.draft_model import EarlyLayers, check_pair, open_draft_model
from ridgeline.speculation.eagle3 import Eagle3Head
from ridgeline.speculation.heads import DraftHead, HeadDrafts
from ridgeline.speculation.mtp import MTPHead
from ridgeline.speculation.synthetic import Synthetic
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer


@dataclass(frozen=True, slots=True)
class DraftSource:
    """The model that drafts, before it is opened."""

    folder: ModelFolder
    spec: ModelSpec


OpenDecoder = Callable[[DraftSource], Decoder]


def draft_source(model: str) -> DraftSource:
    """Raises ConfigError."""
    folder = resolve_model(demo.located(model))
    spec = read_spec(read_config(folder.path))
    check_served(spec)
    return DraftSource(folder, spec)


def open_drafting(
    resolved: ResolvedConfig,
    decoder: Decoder,
    kv: KVCache,
    tokenizer: Callable[[], Tokenizer | None],
    open_decoder: OpenDecoder,
    why_not: str | None,
) -> Drafting | None:
    """What the executor is told of drafts; None where there are none. `why_not`: no step of the
    model is captured. Raises ConfigError."""
    if (asked := asked_drafts(resolved)) is None:
        return None
    most, rows = resolved.max_draft_tokens, resolved.max_captured_rows
    verified, where = resolved.max_verified_tokens, decoder.device
    if why_not:
        raise ConfigError(f"drafts need captured steps, but {why_not}; use speculate off")
    if asked.line.argument == LAYERS:
        early = EarlyLayers(
            decoder,
            kv,
            num_layers=int(asked.argument),
            max_draft_tokens=most,
            max_rows=rows,
            max_logit_rows=verified,
        )
        return Drafting(early, verified)
    if asked.line.argument == RATE:
        synthetic = Synthetic(
            float(asked.argument), max_draft_tokens=most, max_rows=rows, device=where
        )
        return Drafting(synthetic, verified)
    if asked.line.is_head:
        head = _head(resolved, asked, decoder)
        drafts = HeadDrafts(
            asked.method,
            head,
            decoder,
            kv,
            max_draft_tokens=most,
            max_rows=rows,
            max_logit_rows=verified,
        )
        return Drafting(drafts, verified)
    if asked.line.argument != MODEL:
        methods = {name: line.where for name, line in DRAFT_METHODS.items()}
        return Drafting(load(methods, asked.method, "draft method")(where, rows, most), verified)
    source = draft_source(asked.argument)
    theirs = load_tokenizer(source.folder.path)
    check_pair(
        decoder.spec,
        source.spec,
        max_model_len=resolved.max_model_len,
        draft_context=longest_context(source.spec),
        tokenizers=(tokenizer(), theirs),
    )
    method = open_draft_model(
        open_decoder(source),
        decoder,
        kv,
        max_draft_tokens=most,
        max_rows=rows,
        max_logit_rows=verified,
    )
    if reason := why_not_captured(method.decoder, method.kv):
        raise ConfigError(f"the draft {asked.argument} cannot draft here: {reason}; choose another")
    return Drafting(method, verified)


def _head(resolved: ResolvedConfig, asked: AskedDrafts, target: Decoder) -> DraftHead:
    """From the folder of an EAGLE-3 head, or the model's own files."""
    is_eagle = asked.line.argument == FOLDER
    folder = resolve_model(asked.argument) if is_eagle else None
    path = Path(resolved.model_path) if folder is None else folder.path
    source = open_checkpoint(path)
    backend, plain = target.backend, open_weight_format("auto")
    head: Eagle3Head | MTPHead
    if is_eagle:
        head = Eagle3Head(
            read_eagle3(read_config(path), target.spec),
            eagle3_names(source.names()),
            target.embedding,
            attention=backend,
            weight_format=plain,
            max_model_len=target.max_model_len,
            device=target.device,
        )
    else:
        spec = read_mtp(target.spec, source.names())
        head = MTPHead(spec, target, attention=backend, weight_format=plain)
    head.load(source)
    return head
