"""How many bytes does the attention of one head move, with its scores in memory and with tiles?

Letters: n tokens, d head size, r rows and c columns of a tile. In numbers of the serving dtype:

  scores in memory  4 n d + 4 n^2: q, k, v are read and the output written once; the n x n scores
                    are written, read to make weights of them, those are written, and read again
  tiles             2 n d + 2 d (keys that each tile of queries reads, summed)
                    = 2 n d (1 + n / r) without a mask, about half of the second part with one

With r of the order of M / d, where M numbers have room on the chip, the second is
Theta(n^2 d^2 / M) (Dao et al., arXiv 2205.14135, theorem 2).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

STATISTICS_BYTES = 4  # the running maximum and sum of a row, and scores, are float32


@dataclass(frozen=True, slots=True)
class TiledAttention:
    """One head over `num_tokens`: each tile of `rows` queries meets tiles of `columns` keys, with a
    causal mask only those that any of its queries sees."""

    num_tokens: int
    head_dim: int
    rows: int
    columns: int
    is_causal: bool = True
    dtype_bytes: int = 2

    @property
    def num_row_tiles(self) -> int:
        return -(-self.num_tokens // self.rows)

    @property
    def num_column_tiles(self) -> int:
        return -(-self.num_tokens // self.columns)

    def seen_column_tiles(self, row_tile: int) -> int:
        """How many tiles of keys this tile of queries meets."""
        if not self.is_causal:
            return self.num_column_tiles
        last = min((row_tile + 1) * self.rows, self.num_tokens)
        return -(-last // self.columns)

    def visits(self) -> Iterator[tuple[int, int]]:
        """The tiles in their order: (of queries, of keys)."""
        for i in range(self.num_row_tiles):
            yield from ((i, j) for j in range(self.seen_column_tiles(i)))

    @property
    def num_visits(self) -> int:
        return sum(self.seen_column_tiles(i) for i in range(self.num_row_tiles))

    @property
    def keys_read(self) -> int:
        """Keys, and as many values, over all tiles of queries."""
        ends = (self.seen_column_tiles(i) * self.columns for i in range(self.num_row_tiles))
        return sum(min(end, self.num_tokens) for end in ends)

    @property
    def tiled_bytes(self) -> int:
        """Memory traffic; queries and outputs pass once."""
        numbers = 2 * self.num_tokens * self.head_dim + 2 * self.keys_read * self.head_dim
        return numbers * self.dtype_bytes

    @property
    def score_bytes(self) -> int:
        """The scores of all queries with all keys."""
        return self.num_tokens**2 * self.dtype_bytes

    @property
    def unfused_bytes(self) -> int:
        """Memory traffic of a product, a softmax and a product, each by itself."""
        return 4 * self.num_tokens * self.head_dim * self.dtype_bytes + 4 * self.score_bytes

    @property
    def chip_bytes(self) -> int:
        """What one tile needs on the chip: q, k and v, the output and statistics of its rows in
        float32, and its scores."""
        tiles = (self.rows + 2 * self.columns) * self.head_dim * self.dtype_bytes
        kept = self.rows * (self.head_dim + 2) * STATISTICS_BYTES
        return tiles + kept + self.rows * self.columns * STATISTICS_BYTES
