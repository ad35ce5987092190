"""Which kernel answers a query over the cache? One file per backend."""

from __future__ import annotations

import torch

from ridgeline.architectures.spec import ModelSpec
from ridgeline.attention.backend import AttentionBackend, AttentionCase, Pieces, Supports
from ridgeline.errors import ConfigError
from ridgeline.formats import ATTENTION_BACKENDS
from ridgeline.registry import load

__all__ = [
    "ATTENTION_BACKENDS",
    "INVARIANT",
    "AttentionBackend",
    "AttentionCase",
    "Pieces",
    "Supports",
    "choose_backend",
]

# What `auto` tries, best first: our own kernels read blocks in place and can be captured; torch's
# fused ones beat the tiled reference on every device and shape that both serve.
PREFERENCE = ("triton", "native", "sdpa", "reference", "latent_triton", "latent_cpu", "latent")
INVARIANT = "triton"  # the one that can be told to treat every token alike


def choose_backend(
    name: str,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    kv_format: str = "auto",
    *,
    deterministic: bool = False,
) -> AttentionBackend:
    """The backend of this name, or with `auto` the best that serves every layer of the model.
    `deterministic`: the one whose answer to a token does not depend on the others of a step.

    ConfigError for an unknown name, or with the reason why the named one cannot be used.
    """
    if deterministic:
        return _invariant(name, spec, dtype, device, kv_format)
    if name != "auto":
        backend: AttentionBackend = load(ATTENTION_BACKENDS, name, "attention backend")()
        if reason := _why_not(backend, spec, dtype, device, kv_format):
            raise ConfigError(f"attention backend {name} {reason}; use auto")
        return backend
    for candidate in PREFERENCE:
        backend = load(ATTENTION_BACKENDS, candidate, "attention backend")()
        if _why_not(backend, spec, dtype, device, kv_format) is None:
            return backend
    raise ConfigError(f"no attention backend serves {dtype} on {device.type}")


def _invariant(
    name: str, spec: ModelSpec, dtype: torch.dtype, device: torch.device, kv_format: str
) -> AttentionBackend:
    if name not in ("auto", INVARIANT):
        raise ConfigError(
            f"deterministic needs attention_backend {INVARIANT}, not {name}; use auto, or leave out"
            " deterministic"
        )
    from ridgeline.attention.paged import PagedAttention

    backend = PagedAttention(is_invariant=True)
    if reason := _why_not(backend, spec, dtype, device, kv_format):
        raise ConfigError(
            f"deterministic needs attention backend {INVARIANT}, which {reason}; leave out"
            " deterministic"
        )
    return backend


def _why_not(
    backend: AttentionBackend,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    kv_format: str,
) -> str | None:
    for attention in {layer.attention for layer in spec.layers}:
        if reason := backend.supports.why_not(attention, dtype, device, kv_format):
            return reason
    return None
