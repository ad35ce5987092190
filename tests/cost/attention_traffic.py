"""What does attention move through memory when its score matrix is written out, and when it is not?

T tokens, d numbers in a head, M numbers of on-chip memory, all for one head.
Source: Dao et al., "FlashAttention: Fast and Memory-Efficient Exact Attention with IO-Awareness",
2022, theorem 2: Theta(T d + T^2) numbers against Theta(T^2 d^2 / M).
"""

from __future__ import annotations

from ridgeline.errors import ConfigError


def score_matrix_bytes(num_tokens: int, element_bytes: int, num_heads: int = 1) -> int:
    """What the scores of all pairs of tokens would take."""
    return num_heads * num_tokens * num_tokens * element_bytes


def written_out_traffic(num_tokens: int, head_dim: int) -> int:
    """Numbers moved when scores and probabilities are each written and read back."""
    return 4 * num_tokens * head_dim + 4 * num_tokens * num_tokens


def tiled_traffic(num_tokens: int, head_dim: int, on_chip: int) -> int:
    """Numbers moved when tiles stay on the chip. Keys and values are read once, in tiles that fill
    half of it; for each of them all queries and partial results pass by (one in, one in and out).
    """
    tile = on_chip // (4 * head_dim)  # rows of K, of V, and as many of Q and of the result
    if tile < 1:
        raise ConfigError(f"{on_chip} numbers on the chip hold no tile of {head_dim}-wide rows")
    passes = -(-num_tokens // tile)
    return 2 * num_tokens * head_dim + passes * 3 * num_tokens * head_dim


def tiled_extra_bytes(num_tokens: int, num_heads: int) -> int:
    """Memory beside the result: a running maximum and a running sum per query, in float32."""
    return num_heads * num_tokens * 2 * 4
