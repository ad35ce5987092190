"""Who may ask, and for what? API keys, held as digests and compared in constant time."""

from __future__ import annotations

import hmac
import re
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from ridgeline.errors import ConfigError
from ridgeline.server.errors import ApiError

KEY_VARIABLE = "RIDGELINE_API_KEY"
MIN_KEY_LENGTH = 8
MAX_KEY_LENGTH = 512
REFUSAL = "a valid API key is needed: send the header `Authorization: Bearer <key>`"

RIGHTS = ("answer", "tokenize", "explain", "metrics")
ADMIN = "admin"  # all of them, and everybody's requests
ANY, OPEN = "any", "open"  # what every key may, and what needs none
ORDINARY = frozenset({"answer", "tokenize", "explain"})  # metrics tell what others do

DIGEST = "sha256:"
SETTINGS = ("name", "weight", "rights")
NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
MIN_WEIGHT, MAX_WEIGHT = 0.001, 1000.0


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who asks: the digest of the API key (b"" without keys), and the name by which shares are
    counted: that digest, or one of the client's address where there are no keys. `weight`: its
    share beside those of others. `label`: what the operator calls it."""

    key: bytes = b""
    name: bytes = b""
    weight: float = 1.0
    rights: frozenset[str] = frozenset()
    label: str = ""

    def may(self, right: str) -> bool:
        return right in (ANY, OPEN) or right in self.rights or ADMIN in self.rights

    def need(self, right: str) -> None:
        """Raises ApiError insufficient_permissions."""
        if not self.may(right):
            raise ApiError(
                "insufficient_permissions", f"this key does not have the right `{right}`"
            )


class Keys:
    """The keys that open this server. With none, everyone on the loopback interface may ask."""

    def __init__(self, tenants: tuple[Tenant, ...] = ()) -> None:
        self._tenants = tenants

    def __len__(self) -> int:
        return len(self._tenants)

    def any_may(self, right: str) -> bool:
        return any(tenant.may(right) for tenant in self._tenants)

    def check(self, authorization: bytes | None, address: str = "") -> Tenant:
        """Whose key opened the door; whoever is at `address` where none is needed.

        Raises ApiError invalid_api_key, in the same words and time whether the key is missing,
        malformed or wrong.
        """
        if not self._tenants:
            name = sha256(b"ridgeline tenant\0" + address.encode()).digest()
            return Tenant(name=name, rights=frozenset({ADMIN}))
        scheme, _, given = (authorization or b"").partition(b" ")
        digest = sha256(given.strip()[: 2 * MAX_KEY_LENGTH]).digest()
        found = None
        for tenant in self._tenants:  # all of them, always
            if hmac.compare_digest(tenant.key, digest):
                found = tenant
        if found is None or scheme.lower() != b"bearer":
            raise ApiError("invalid_api_key", REFUSAL)
        return found


def load_keys(api_key_file: str | None, from_environment: str | None) -> Keys:
    """Keys of a file, a line each, and of the environment.

    The environment is the operator's: its key has all rights, unless the file has the same key.
    A key alone has all rights too, unless its line says which. Raises ConfigError when a file was
    named and cannot be used; it never repeats what may be part of a key.
    """
    known = {} if api_key_file is None else _read_file(api_key_file)
    if from_environment:
        try:
            digest = _digest(from_environment.strip())
        except ConfigError as fault:
            raise ConfigError(f"{KEY_VARIABLE}: {fault}") from None
        known.setdefault(digest, Tenant(digest, digest, rights=frozenset({ADMIN})))
    usual = ORDINARY if len(known) > 1 else frozenset({ADMIN})
    return Keys(tuple(t if t.rights else replace(t, rights=usual) for t in known.values()))


def key_lines(text: str) -> list[tuple[int, list[str]]]:
    """The number and the words of each line that holds a key: the key, and its settings."""
    lines = [(number, line.split()) for number, line in enumerate(text.splitlines(), 1)]
    return [(number, words) for number, words in lines if words and not words[0].startswith("#")]


def _read_file(name: str) -> dict[bytes, Tenant]:
    try:
        text = Path(name).read_text("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        raise ConfigError(f"api_key_file {name} cannot be read: {fault}") from None
    known: dict[bytes, Tenant] = {}
    for number, words in key_lines(text):
        try:
            tenant = _tenant(words)
            if tenant.key in known:
                raise ConfigError("an earlier line has the same key")
            if tenant.label and any(t.label == tenant.label for t in known.values()):
                raise ConfigError("an earlier key has the same name")
        except ConfigError as fault:
            raise ConfigError(f"api_key_file {name}, line {number}: {fault}") from None
        known[tenant.key] = tenant
    if not known:
        raise ConfigError(f"api_key_file {name} holds no key; write one a line")
    return known


def _tenant(words: list[str]) -> Tenant:
    """Without rights if the line names none."""
    digest = _digest(words[0])
    settings: dict[str, str] = {}
    for word in words[1:]:
        name, is_setting, value = word.partition("=")
        if not is_setting or name not in SETTINGS:
            raise ConfigError("behind the key, only name=, weight= and rights= may stand")
        if name in settings:
            raise ConfigError(f"{name}= stands there twice")
        settings[name] = value
    label = settings.get("name", "")
    if "name" in settings and not NAME.fullmatch(label):
        raise ConfigError("a name has 1 to 64 letters, digits, dots, dashes and underscores")
    rights = frozenset(settings["rights"].split(",")) if "rights" in settings else frozenset()
    if not rights <= {*RIGHTS, ADMIN}:
        raise ConfigError(f"rights are {', '.join(RIGHTS)} and {ADMIN}, with commas between them")
    return Tenant(digest, digest, _weight(settings.get("weight", "1")), rights, label)


def _weight(text: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = -1.0
    if not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise ConfigError(f"weight must be a number from {MIN_WEIGHT:g} to {MAX_WEIGHT:g}")
    return weight


def _digest(key: str) -> bytes:
    """Of a key, or the one that stands for it: sha256: and 64 hexadecimal digits."""
    if key.startswith(DIGEST):
        if not re.fullmatch("[0-9a-fA-F]{64}", key.removeprefix(DIGEST)):
            raise ConfigError("behind sha256: there must be the 64 hexadecimal digits of a digest")
        return bytes.fromhex(key.removeprefix(DIGEST))
    if not MIN_KEY_LENGTH <= len(key) <= MAX_KEY_LENGTH or not key.isascii():
        raise ConfigError(
            f"an API key must be {MIN_KEY_LENGTH} to {MAX_KEY_LENGTH} ASCII characters"
        )
    return sha256(key.encode()).digest()
