"""What does the HTTP process know of the model it serves?"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
from msgspec.structs import replace

from ridgeline.server.config import ServeConfig
from ridgeline.server.errors import ApiError, quote
from ridgeline.server.text_wire import Loaded
from ridgeline.server.token_text import TokenTexts
from ridgeline.server.wire import Ready
from ridgeline.text.vocabulary import Table, Vocabulary


class ModelCard(msgspec.Struct, frozen=True):
    id: str
    object: str
    created: int
    owned_by: str
    max_model_len: int


class ModelList(msgspec.Struct, frozen=True):
    object: str
    data: list[ModelCard]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The text side of the model, and what the engine process said of the rest.

    `created` is in seconds since 1970, as clients expect it.
    """

    name: str
    created: int
    ready: Ready
    vocabulary: Vocabulary | None
    has_chat_template: bool
    texts: TokenTexts

    @property
    def max_model_len(self) -> int:
        return self.ready.max_model_len

    @property
    def defaults(self) -> dict[str, Any]:
        """Sampling fields that the model's own generation_config asks for."""
        return dict(self.ready.default_sampling)

    def check_name(self, name: str, *, required: bool = True) -> None:
        """Raises ApiError when a request names another model, or none where one is needed."""
        if not name and required:
            raise ApiError("missing_required_parameter", "model is required", "model")
        if name and name != self.name:
            raise ApiError("model_not_found", f"there is no model {quote(name)} here", "model")


def epoch_s() -> int:
    """Wall time in whole seconds since 1970; for stamps in replies only."""
    return int(datetime.now(UTC).timestamp())


def text_folder(config: ServeConfig, ready: Ready | None = None) -> Path | None:
    """Where the tokenizer is; before the engine says where the model is, perhaps None."""
    if ready is not None:
        return Path(config.engine.tokenizer or ready.model_path).expanduser()
    folder = Path(config.engine.tokenizer or config.engine.model).expanduser()
    return folder if folder.is_dir() else None


def served_model(config: ServeConfig, ready: Ready, loaded: Loaded, folder: Path) -> ServedModel:
    """The model as the engine and the tokenizer's process have opened it (blocking)."""
    vocabulary, table = None, loaded.vocabulary
    if table is not None and table.rule is not None:
        pieces = Table(table.rule, *table.tables)
        vocabulary = Vocabulary(pieces, frozenset(table.special_ids))
    elif table is not None:
        from ridgeline.text.tokenizer import load_tokenizer

        vocabulary = load_tokenizer(folder)  # only it can decode; it was seen to load
    if not ready.end_token_ids and loaded.end_token_id is not None:
        ready = replace(ready, end_token_ids=(loaded.end_token_id,))
    return ServedModel(
        config.served_model_name or ready.model_name,
        epoch_s(),
        ready,
        vocabulary,
        loaded.has_template,
        TokenTexts(vocabulary),
    )
