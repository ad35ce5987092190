"""Which scheduling policies are there? Adding one is one file and one line of POLICIES."""

from __future__ import annotations

from ridgeline import registry
from ridgeline.errors import ConfigError, check
from ridgeline.formats import POLICIES
from ridgeline.scheduler.policies.base import Policy, PolicySetting


def make_policy(name: str, setting: PolicySetting) -> Policy:
    """The policy of this name for one engine. Raises ConfigError."""
    policy = registry.load(POLICIES, name, "policy").make(setting)
    check(isinstance(policy, Policy), "a policy derives from Policy", name=name)
    return policy  # type: ignore[no-any-return]


def check_promise(name: str, ttft_slo_ms: float | None, tpot_slo_ms: float | None) -> None:
    """A policy that promises times needs both, and no other takes any. Raises ConfigError."""
    given = [value for value in (ttft_slo_ms, tpot_slo_ms) if value is not None]
    if any(not value > 0 for value in given):
        raise ConfigError("ttft_slo_ms and tpot_slo_ms must be above 0")
    needs = registry.load(POLICIES, name, "policy").needs_promise
    if needs and len(given) < 2:
        raise ConfigError(f"policy {name} needs a promise: give ttft_slo_ms and tpot_slo_ms")
    if given and not needs:
        raise ConfigError(f"policy {name} promises no times: add policy slo, or leave them out")
