"""Rows of different lengths that lie one after the other along the token dimension, and how to index them.

A step builds one `PackedRows` and passes it to every layer: what the convolution and the delta rule need to
know about the rows is worked out at the first layer and kept in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cached_property

import numpy as np
import numpy.typing as npt
import torch
from attrs import evolve, field, frozen
from torch import Tensor

from trivet.caches.state import StateCut
from trivet.capacity.chunks import CHUNK_TOKENS, DEVICE_CHUNK_TOKENS, SHORT_TOKENS, chunk_table_parts
from trivet.ops.transfer import to_device

Indices = npt.NDArray[np.int64]


def _lengths(lengths: Iterable[int]) -> tuple[int, ...]:
    return tuple(int(length) for length in lengths)


def _in_order(cuts: Iterable[StateCut]) -> tuple[StateCut, ...]:
    return tuple(sorted(cuts))


@frozen
class ConvolutionEdges:
    """Where a row's first tokens and its tail look back past its start, for one kernel size.

    All that those places read fits in a small `window`: the carried tails of all rows, oldest first, then
    the tokens named by `tokens`.

    Attributes:
        tokens: ``[edge_tokens]``, the packed tokens that the window holds after the carried tails.
        heads: ``[head_tokens]``, the packed tokens with fewer than ``kernel - 1`` predecessors in their row.
        taps: ``[kernel * head_tokens]``, the window entry under each tap of those, oldest tap first.
        tails: ``[rows * (kernel - 1)]``, the window entries that are the rows' new tails.
    """

    tokens: Tensor
    heads: Tensor
    taps: Tensor
    tails: Tensor


@frozen
class SingleRows:
    """The rows of one token, which take one recurrent step.

    Attributes:
        rows: ``[single_rows]``, which rows.
        tokens: ``[single_rows]``, their packed tokens.
    """

    rows: Tensor
    tokens: Tensor


@frozen
class ChunkGrid:
    """Rows of two tokens or more, cut into chunks of one length.

    Rows are taken longest first, and chunks by their number within the row: first all first chunks, then the
    second chunks of the rows that have one, and so on. The rows that still have a chunk are thus always the
    first ones, and their chunks lie together.

    Attributes:
        rows: ``[grid_rows]``, which rows, most chunks first; None if that is every row in its own place.
        chunk_tokens: length of a chunk, padding included.
        active_rows: for each chunk number, how many rows still have a chunk.
        source: ``[chunks * chunk_tokens]``, the packed token in each place of the grid; a padded place repeats
            its row's last token, so that nothing of another row can reach it.
        padding: ``[chunks, chunk_tokens, 1]``, which places hold no token; None if all hold one.
        future: ``[chunk_tokens, chunk_tokens]``, which later places (columns) a place (row) must not see.
        tokens: ``[grid_tokens]``, the packed tokens of these rows; None if that is every packed token.
        places: ``[grid_tokens]``, the place in the grid of each of those tokens.
    """

    rows: Tensor | None
    chunk_tokens: int
    active_rows: tuple[int, ...]
    source: Tensor
    padding: Tensor | None
    future: Tensor
    tokens: Tensor | None
    places: Tensor

    @property
    def chunks(self) -> int:
        """Chunks of all rows together."""
        return sum(self.active_rows)


@frozen
class ChunkTable:
    """Rows in segments of chunks, as kernels for varying lengths look them up.

    A row's segments lie between the places at which its state is kept. Rows, segments, chunks and tokens are counted
    from the first row's.

    Attributes:
        starts: int64 ``[segments + 1]``, each segment's first token, and the number of tokens.
        chunks: int64 ``[chunks, 2]``, each chunk's segment and its number within the segment.
        segments: int64 ``[segments, 3]``, each segment's row, the tokens of the row before it, and the snapshot of the
            state behind it: -1 for the last of a row, and for no other.
        row_segments: int64 ``[rows + 1]``, each row's first segment, and the number of segments.
        chunk_tokens: length of a chunk; a segment's last may be shorter.
        cuts: places at which a state is kept.
    """

    starts: Tensor
    chunks: Tensor
    segments: Tensor
    row_segments: Tensor
    chunk_tokens: int
    cuts: int


@frozen
class TableShape:
    """How a `ChunkTable` lies in one array.

    Attributes:
        rows, segments, chunks, cuts: how many there are.
    """

    rows: int
    segments: int
    chunks: int
    cuts: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """Elements of the parts, in the order of the table's attributes."""
        return chunk_table_parts(self.rows, self.segments, self.chunks)

    def table(self, whole: Tensor) -> ChunkTable:
        """The table over int64 ``whole``."""
        starts, chunks, segments, row_segments = whole.split(self.sizes)
        return ChunkTable(
            starts=starts[: self.segments + 1],
            chunks=chunks.view(-1, 2),
            segments=segments[: 3 * self.segments].view(-1, 3),
            row_segments=row_segments[: self.rows + 1],
            chunk_tokens=DEVICE_CHUNK_TOKENS,
            cuts=self.cuts,
        )


@frozen
class PackedRows:
    """The rows of one step.

    Attributes:
        lengths: tokens of each row, at least 1.
        device: where the index tensors live: that of the tensors they index.
        chunk_tokens: longest chunk of the delta rule, a power of two.
        cuts: places inside rows at which recurrent state is kept, by row and tokens. Of what is worked out here only
            tables have them.

    Raises:
        ValueError: no rows, an empty row, a chunk length that is not a power of two, a cut that is not inside a row, or
            two at one place.
    """

    lengths: tuple[int, ...] = field(converter=_lengths)
    device: torch.device = field(default=torch.device("cpu"), converter=torch.device)
    chunk_tokens: int = CHUNK_TOKENS
    cuts: tuple[StateCut, ...] = field(default=(), converter=_in_order)
    _edges: dict[int, ConvolutionEdges] = field(factory=dict, init=False, repr=False, eq=False)
    _tables: dict[int, ChunkTable] = field(factory=dict, init=False, repr=False, eq=False)

    def __attrs_post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise ValueError(f"packed rows: found lengths {self.lengths}, expected rows of at least one token")
        if self.chunk_tokens < 1 or self.chunk_tokens & (self.chunk_tokens - 1):
            raise ValueError(f"packed rows: chunk_tokens is {self.chunk_tokens}, expected a power of two")
        for cut in self.cuts:
            length = self.lengths[cut.row] if 0 <= cut.row < self.rows else 0
            if not 0 < cut.tokens < length:
                raise ValueError(f"packed rows: found {cut}, expected a place inside one of rows {self.lengths}")
        if len({(cut.row, cut.tokens) for cut in self.cuts}) < len(self.cuts):
            raise ValueError(f"packed rows: found cuts {self.cuts}, expected one at a place")

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.lengths)

    @cached_property
    def tokens(self) -> int:
        """Tokens of all rows together."""
        return sum(self.lengths)

    @cached_property
    def single(self) -> bool:
        """Whether every row is one token: a pure decode step."""
        return self.tokens == self.rows

    def edges(self, kernel: int) -> ConvolutionEdges:
        """The edges for a convolution of `kernel` taps, 2 or more."""
        if kernel not in self._edges:
            self._edges[kernel] = self._find_edges(kernel - 1)
        return self._edges[kernel]

    @cached_property
    def singles(self) -> SingleRows | None:
        """The rows of one token, if there are any."""
        rows = np.flatnonzero(self._counts == 1)
        if not rows.size:
            return None
        return SingleRows(rows=self._tensor(rows), tokens=self._tensor(self._starts[rows]))

    @cached_property
    def grids(self) -> tuple[ChunkGrid, ...]:
        """The rows of more than one token, short rows apart from long ones so that neither pads the other."""
        counts = self._counts
        short = (counts > 1) & (counts <= min(SHORT_TOKENS, self.chunk_tokens))
        long = (counts > 1) & ~short
        return tuple(self._find_grid(members) for members in (long, short) if members.any())

    def table(self, first_row: int) -> ChunkTable:
        """The rows from `first_row` on, at least one, as kernels look them up.

        Raises:
            ValueError: a row before `first_row` has a cut, which the table would miss.
        """
        if first_row not in self._tables:
            values, shape = self.table_values(first_row)
            self._tables[first_row] = shape.table(self._tensor(values))  # one copy for all parts
        return self._tables[first_row]

    def with_table(self, table: ChunkTable) -> PackedRows:
        """The same rows, for which `table` is what kernels look up, whatever it says when they do."""
        rows = evolve(self)
        rows._tables[0] = table
        return rows

    def table_values(self, first_row: int) -> tuple[Indices, TableShape]:
        """The table of the rows from `first_row` on, as one array, and how it is divided."""
        if self.cuts and self.cuts[0].row < first_row:
            raise ValueError(f"packed rows: found {self.cuts[0]}, expected cuts of rows from {first_row} on")
        counts = self._counts[first_row:]
        rows = len(counts)
        cuts = np.asarray(self.cuts, dtype=np.int64).reshape(-1, 3)
        cut_rows = cuts[:, 0] - first_row

        # A row's segments end at its cuts and at its end. Cuts are in order, and are inside their rows.
        row_ends = np.cumsum(counts)
        cut_ends = (row_ends - counts)[cut_rows] + cuts[:, 1]
        ends = np.concatenate((cut_ends, row_ends))
        order = np.argsort(ends)
        ends = ends[order]
        row = np.concatenate((cut_rows, np.arange(rows)))[order]
        snapshot = np.concatenate((cuts[:, 2], np.full(rows, -1)))[order]
        starts = np.concatenate(([0], ends))
        chunks_of = -(-np.diff(starts) // DEVICE_CHUNK_TOKENS)
        first_chunk = np.cumsum(chunks_of) - chunks_of
        segment = np.repeat(np.arange(len(ends)), chunks_of)
        number = np.arange(len(segment)) - first_chunk[segment]
        before = starts[:-1] - (row_ends - counts)[row]
        row_segments = np.searchsorted(row, np.arange(rows + 1))

        chunks, segments = np.stack((segment, number), 1), np.stack((row, before, snapshot), 1)
        shape = TableShape(rows, len(ends), len(segment), len(cuts))
        parts = (starts, chunks, segments, row_segments)
        padded = [np.resize(part, size) for part, size in zip(parts, shape.sizes, strict=True)]
        return np.concatenate(padded), shape

    @cached_property
    def _counts(self) -> Indices:
        return np.asarray(self.lengths, dtype=np.int64)

    @cached_property
    def _starts(self) -> Indices:
        return np.cumsum(self._counts) - self._counts

    @cached_property
    def _row_of_token(self) -> Indices:
        return np.repeat(np.arange(self.rows), self._counts)

    def _find_grid(self, members: npt.NDArray[np.bool_]) -> ChunkGrid:
        counts = self._counts
        longest = int(counts[members].max())
        chunk = min(self.chunk_tokens, 1 << (longest - 1).bit_length())
        chunks_of_row = np.where(members, -(-counts // chunk), 0)
        order = np.argsort(-chunks_of_row, kind="stable")[: np.count_nonzero(members)]
        per_row = chunks_of_row[order]
        active = np.count_nonzero(per_row > np.arange(per_row[0])[:, None], axis=1)
        first_chunk = np.cumsum(active) - active  # of each chunk number

        # For each chunk in the grid's order: its number within the row, and the row.
        number = np.repeat(np.arange(len(active)), active)
        row = order[np.arange(len(number)) - first_chunk[number]]
        position = number[:, None] * chunk + np.arange(chunk)
        last = counts[row][:, None] - 1
        padding = position > last
        source = self._starts[row][:, None] + np.minimum(position, last)

        tokens = np.flatnonzero(members[self._row_of_token])
        row_of_token = self._row_of_token[tokens]
        rank = np.zeros_like(counts)
        rank[order] = np.arange(len(order))
        within = tokens - self._starts[row_of_token]
        places = (first_chunk[within // chunk] + rank[row_of_token]) * chunk + within % chunk
        return ChunkGrid(
            rows=None if np.array_equal(order, np.arange(self.rows)) else self._tensor(order),
            chunk_tokens=chunk,
            active_rows=tuple(int(count) for count in active),
            source=self._tensor(source.ravel()),
            padding=self._tensor(padding[..., None]) if padding.any() else None,
            future=self._tensor(np.triu(np.ones((chunk, chunk), dtype=np.bool_), 1)),
            tokens=None if len(tokens) == self.tokens else self._tensor(tokens),
            places=self._tensor(places),
        )

    def _find_edges(self, tail: int) -> ConvolutionEdges:
        near = np.minimum(self._counts, tail)  # tokens of a row that its head, or its tail, has
        row = np.repeat(np.arange(self.rows), near)
        first = np.cumsum(near) - near  # of each row, among the head tokens, and likewise among the tail's
        within = np.arange(len(row)) - first[row]
        heads = self._starts[row] + within
        endings = self._starts[row] + (self._counts - near)[row] + within
        window_heads = self.rows * tail
        window_endings = window_heads + len(heads)

        # Counted from the oldest carried entry, a row is its carried tail followed by its tokens.
        entry = within + np.arange(tail + 1)[:, None]
        taps = np.where(entry < tail, row * tail + entry, window_heads + first[row] + entry - tail)
        every_row = np.arange(self.rows)[:, None]
        entry = self._counts[:, None] + np.arange(tail)
        tails = np.where(
            entry < tail,
            every_row * tail + entry,
            window_endings + (first + near - self._counts)[:, None] + entry - tail,
        )
        return ConvolutionEdges(
            tokens=self._tensor(np.concatenate((heads, endings))),
            heads=self._tensor(heads),
            taps=self._tensor(taps.ravel()),
            tails=self._tensor(tails.ravel()),
        )

    def _tensor(self, values: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Tensor:
        return to_device(torch.from_numpy(np.ascontiguousarray(values)), self.device)
