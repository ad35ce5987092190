"""Speculative sampling in closed form, as its paper has it: what is accepted, what comes out, and
the speedup of one request on a device that waits for memory alone."""

from __future__ import annotations

from collections.abc import Sequence

from ridgeline.speculation.price import MAX_DRAFTS, simple_speedup


def acceptance_rate(target: Sequence[float], draft: Sequence[float]) -> float:
    """How often a token drawn from `draft` is accepted, with probability min(1, p/q), where
    `target` gives p and `draft` gives q of each token: the overlap of the two."""
    return sum(map(min, target, draft))


def after_rejection(target: Sequence[float], draft: Sequence[float]) -> tuple[float, ...]:
    """Probabilities to draw from instead of a rejected token: max(0, p - q), normalised."""
    excess = [max(0.0, p - q) for p, q in zip(target, draft, strict=True)]
    total = sum(excess)
    return tuple(target) if total == 0 else tuple(value / total for value in excess)


def emitted(target: Sequence[float], draft: Sequence[float]) -> tuple[float, ...]:
    """Probabilities of the token that comes out, accepted or replaced: those of the target."""
    replaced = 1 - acceptance_rate(target, draft)
    rest = after_rejection(target, draft)
    return tuple(min(p, q) + replaced * r for p, q, r in zip(target, draft, rest, strict=True))


def best_simple(acceptance: float, draft_ratio: float) -> tuple[int, float]:
    """The best number of draft tokens in that form, and the speedup."""
    found = {k: simple_speedup(acceptance, k, draft_ratio) for k in range(MAX_DRAFTS + 1)}
    return max(found.items(), key=lambda one: one[1])
