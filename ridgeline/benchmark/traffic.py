"""How many bytes must a decode step read? The weights it uses, once, and its requests' cache.

Norms and the gathered embedding rows are left out: they are under a thousandth of the rest.
"""

from __future__ import annotations

from ridgeline.architectures.counts import kv_bytes, linear_weights, mean_kept_bits
from ridgeline.architectures.spec import ExpertsSpec, ModelSpec
from ridgeline.cost.precision import DTYPE_BYTES
from ridgeline.formats import STORED, weight_line


def decode_bytes(
    spec: ModelSpec,
    dtype: str,
    batch: int,
    context: float,
    *,
    weight_format: str = "plain",
    kv_format: str = "auto",
) -> float:
    """Bytes that one decode step of `batch` requests at `context` tokens each has to read."""
    size = DTYPE_BYTES[dtype]
    line = weight_line(weight_format)
    bits, of_head = (one.bits_per_weight(size) for one in (line, weight_line(line.vocabulary)))
    if weight_format == STORED:
        bits = mean_kept_bits(spec, size)
    head = spec.vocab_size * spec.hidden_size
    weights = (layer_weights_read(spec, batch) * bits + head * of_head) / 8
    return weights + batch * kv_bytes(spec, round(context), size, kv_format)


def layer_weights_read(spec: ModelSpec, batch: int) -> float:
    """Weights of all layers' matrices, without the experts that nobody chose."""
    idle = sum(
        (ffn.num_experts - experts_used(ffn, batch)) * 3 * spec.hidden_size * ffn.intermediate_size
        for ffn in (layer.feed_forward for layer in spec.layers)
        if isinstance(ffn, ExpertsSpec)
    )
    return linear_weights(spec) - idle


def experts_used(ffn: ExpertsSpec, batch: int) -> float:
    """Different experts that `batch` tokens choose, expected, if each chooses at random:
    X * (1 - (1 - k / X) ** batch)."""
    share = ffn.num_active / ffn.num_experts
    return ffn.num_experts * (1 - (1 - share) ** batch)
