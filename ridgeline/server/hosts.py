"""By which names may a browser reach us? A guard against DNS rebinding on the loopback."""

from __future__ import annotations

import ipaddress

from ridgeline.errors import ConfigError
from ridgeline.server.auth import ADMIN, KEY_VARIABLE, Keys
from ridgeline.server.errors import ApiError

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "::1")


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def check_bind(host: str, *, has_keys: bool, allow_anyone: bool) -> None:
    """Raises ConfigError for an address that others can reach while no key is asked for."""
    if is_loopback(host) or has_keys or allow_anyone:
        return
    raise ConfigError(
        f"host {host} can be reached from the network and no API key is set: name a key file "
        f"(api_key_file), set {KEY_VARIABLE}, listen on 127.0.0.1, or say "
        "allow_anyone_on_the_network_without_a_key"
    )


def check_admin_bind(host: str, keys: Keys) -> None:
    """Raises ConfigError for an address that others can reach while no key is an operator's."""
    if not is_loopback(host) and not keys.any_may(ADMIN):
        raise ConfigError(
            f"admin_host {host} can be reached from the network and no API key has the right "
            f"{ADMIN}: write rights={ADMIN} behind one in the file of keys (api_key_file), set "
            f"{KEY_VARIABLE}, or listen on 127.0.0.1"
        )


class HostGuard:
    """On a loopback bind, or with a list given, only these names may stand in `Host`."""

    def __init__(self, bind: str, allowed: tuple[str, ...]) -> None:
        self._active = is_loopback(bind) or bool(allowed)
        self._names = frozenset(name.lower() for name in (*LOOPBACK_NAMES, bind, *allowed))

    def check(self, hosts: list[bytes]) -> None:
        """`hosts` are the values of all Host headers. Raises ApiError invalid_host."""
        if not self._active:
            return
        if len(hosts) != 1 or _name(hosts[0]) not in self._names:
            raise ApiError("invalid_host", "this server does not answer to that Host header")


def _name(host: bytes) -> str:
    """The name without its port; IPv6 without its brackets."""
    text = host.decode("latin-1").strip().lower()
    if text.startswith("["):
        return text[1:].partition("]")[0]
    return text.rpartition(":")[0] if text.count(":") == 1 else text
