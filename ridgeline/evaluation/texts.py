"""What does a text file hold, packed with gzip or not?"""

from __future__ import annotations

import gzip
import zlib
from pathlib import Path

from ridgeline.errors import ConfigError

GZIP_MARK = b"\x1f\x8b"
MAX_BYTES = 256 << 20  # unpacked; far more than a perplexity needs


def read_text(path: Path) -> str:
    """The UTF-8 text of a file. ConfigError names the file and what is wrong with it."""
    try:
        with path.open("rb") as plain:
            packed = plain.read(len(GZIP_MARK)) == GZIP_MARK
        with gzip.open(path) if packed else path.open("rb") as file:
            data = file.read(MAX_BYTES + 1)
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except (OSError, EOFError, zlib.error) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ConfigError(f"{path}: cannot be read ({reason})") from None
    if len(data) > MAX_BYTES:
        raise ConfigError(f"{path}: more than {MAX_BYTES} bytes of text; give a part of it")
    if not text.strip():
        raise ConfigError(f"{path}: holds no text")
    return text
