"""A model family from outside in the shape of OLMo-2: no norm before attention and feed-forward but
one behind each, and queries and keys that are normed over all heads of a token.

Its table line: `FAMILIES["toy_post_norm"] = "tests.extensions.toy_post_norm:read"`.
"""

from __future__ import annotations

from ridgeline.architectures.config_reader import ConfigReader
from ridgeline.architectures.family import Defaults, dense, model_spec, read_trunk
from ridgeline.architectures.parts import LLAMA_NAMES
from ridgeline.architectures.spec import ModelSpec

DEFAULTS = Defaults(rope_theta=10_000.0, norm_eps=1e-5, max_positions=2048)


def read(config: ConfigReader, max_model_len: int | None) -> ModelSpec:
    trunk = read_trunk(config, DEFAULTS, max_model_len)
    attention = trunk.attention(qk_norm=True, norms_all_heads=True)
    return model_spec(
        config,
        trunk,
        family="toy_post_norm",
        attention=(attention,) * trunk.num_layers,
        feed_forward=dense(config),
        tensor_names=LLAMA_NAMES,
        norms="after",
    )
