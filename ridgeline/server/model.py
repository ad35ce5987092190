"""What does the HTTP process know of the model it serves?"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec

from ridgeline.server.config import ServeConfig
from ridgeline.server.errors import ApiError, quote
from ridgeline.server.token_text import TokenTexts
from ridgeline.server.wire import Ready
from ridgeline.text.chat import ChatTemplate, load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer


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
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
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


@dataclass(frozen=True, slots=True)
class ModelText:
    """The text side of the model in `folder`."""

    folder: Path
    tokenizer: Tokenizer | None
    chat_template: ChatTemplate | None
    texts: TokenTexts


def load_text(folder: Path) -> ModelText:
    """Read the tokenizer and chat template (blocking). Raises ConfigError."""
    tokenizer = load_tokenizer(folder)
    template = load_chat_template(folder, tokenizer)
    return ModelText(folder, tokenizer, template, TokenTexts(tokenizer))


def text_folder(config: ServeConfig) -> Path | None:
    """Where the tokenizer is, if that is known before the engine says where the model is."""
    folder = Path(config.engine.tokenizer or config.engine.model).expanduser()
    return folder if folder.is_dir() else None


def load_model(
    config: ServeConfig, ready: Ready, early: Future[ModelText] | None = None
) -> ServedModel:
    """The model as the engine has opened it (blocking); `early` is what was read of it before.
    Raises ConfigError."""
    folder = Path(config.engine.tokenizer or ready.model_path).expanduser()
    text = None if early is None else early.result()
    if text is None or text.folder != folder:
        text = load_text(folder)
    return ServedModel(
        config.served_model_name or ready.model_name,
        epoch_s(),
        ready,
        text.tokenizer,
        text.chat_template,
        text.texts,
    )
