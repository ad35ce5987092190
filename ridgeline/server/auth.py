"""Who may ask? API keys, held as digests and compared in constant time."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.server.errors import ApiError

KEY_VARIABLE = "RIDGELINE_API_KEY"
MIN_KEY_LENGTH = 8
MAX_KEY_LENGTH = 512
REFUSAL = "a valid API key is needed: send the header `Authorization: Bearer <key>`"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks: the digest of the API key (b"" without keys), and the name by which shares are
    counted: that digest, or one of the client's address where there are no keys."""

    key: bytes = b""
    name: bytes = b""


def tenant_of(key: bytes, address: str) -> Tenant:
    return Tenant(key, key or sha256(b"ridgeline tenant\0" + address.encode()).digest())


class Keys:
    """The keys that open this server. With none, everyone on the loopback interface may ask."""

    def __init__(self, keys: tuple[str, ...] = ()) -> None:
        for key in keys:
            if not MIN_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH or not key.isascii():
                raise ConfigError(
                    f"an API key must be {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} ASCII characters"
                )
        self._digests = tuple(sha256(key.encode()).digest() for key in keys)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def check(self, authorization: bytes | None) -> bytes:
        """The digest of the key that opened the door (b"" when none is needed).

        Raises ApiError invalid_api_key, in the same words and time whether the key is missing,
        malformed or wrong.
        """
        if not self._digests:
            return b""
        scheme, _, given = (authorization or b"").partition(b" ")
        digest = sha256(given.strip()[: 2 * MAX_KEY_LENGTH]).digest()
        found = False
        for known in self._digests:  # all of them, always
            found |= hmac.compare_digest(known, digest)
        if not found or scheme.lower() != b"bearer":
            raise ApiError("invalid_api_key", REFUSAL)
        return digest


def load_keys(api_key_file: str | None, from_environment: str | None) -> Keys:
    """Keys of a file (one a line, # starts a comment) and of the environment.

    Raises ConfigError when a file was named and cannot be used.
    """
    keys: list[str] = []
    if from_environment:
        keys.append(from_environment.strip())
    if api_key_file is not None:
        try:
            lines = Path(api_key_file).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as fault:
            raise ConfigError(f"api_key_file {api_key_file} cannot be read: {fault}") from None
        named = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
        if not named:
            raise ConfigError(f"api_key_file {api_key_file} holds no key; write one a line")
        keys += named
    return Keys(tuple(keys))
