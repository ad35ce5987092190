"""What does the HTTP process know of the model it serves?"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from ridgeline.server.config import ServeConfig
from ridgeline.server.errors import ApiError, quote
from ridgeline.server.token_text import TokenTexts
from ridgeline.server.wire import Ready
from ridgeline.text.chat import ChatTemplate, load_chat_template
from ridgeline.text.tokenizer import Tokenizer, load_tokenizer


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


def load_model(config: ServeConfig, ready: Ready) -> ServedModel:
    """Read the tokenizer and chat template (blocking). Raises ConfigError."""
    folder = Path(config.engine.tokenizer or ready.model_path)
    tokenizer = load_tokenizer(folder)
    return ServedModel(
        config.served_model_name or ready.model_name,
        epoch_s(),
        ready,
        tokenizer,
        load_chat_template(folder, tokenizer),
        TokenTexts(tokenizer),
    )
