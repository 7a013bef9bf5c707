# SPDX-License-Identifier: Apache-2.0
"""`TokenFile`: documents of tokens, mapped into memory."""

from __future__ import annotations

import operator
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from penstock.collate import check_shapes
from penstock.data.dataset import Dataset, counted_from_start
from penstock.data.ragged import RaggedArray
from penstock.errors import CollateError, ConfigError
from penstock.opening import fingerprint_of
from penstock.text.layouts import Mapped, check_tokens, open_tokens

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from numpy.typing import ArrayLike, DTypeLike, NDArray

    from penstock.data.dataset import Allocator


class TokenFile(Dataset["NDArray[np.int64]"]):
    """The documents of a tokenized corpus, by index: `tokens[i]` is document i.

    The file is mapped into memory. Opening it reads only the offsets of the documents; tokens are
    read as they are used. A sample is an int64 array of shape (tokens,), a copy of its own.

    Attributes:
        path: The folder, or the `.bin` or `.ds` file.
        max_tokens: As given.
        dtype: Type of the tokens in the file.
        num_tokens: Tokens in the file.
        tokenizer_digest: SHA-256 of the tokenizer's file, in hexadecimal; None if it is not known.

    Concurrency:
        Any thread or process. A forked worker shares the map. A pickle has the path, so a spawned
        worker opens the file again, and raises `StoreError` if it was changed since.

    Example:
        >>> TokenFile.write("/tmp/penstock-doc-tokens", [[5, 6, 7], [8], [9, 10]], overwrite=True)
        >>> tokens = TokenFile("/tmp/penstock-doc-tokens")
        >>> tokens[0], tokens.lengths, tokens.num_tokens
        (array([5, 6, 7]), array([3, 1, 2], dtype=int32), 6)
        >>> tokens.blocks(2)[1]
        array([7, 8])
        >>> pieces = TokenFile("/tmp/penstock-doc-tokens", max_tokens=2)
        >>> [piece.tolist() for piece in pieces], pieces.document_of(1)
        ([[5, 6], [7], [8], [9, 10]], (0, 2))
    """

    is_drawless = True  # reading draws no random number
    _shows = ("length", "path", "num_tokens")
    _shows_unless: ClassVar[dict[str, Any]] = {"max_tokens": None}

    def __init__(self, path: str | Path, max_tokens: int | None = None) -> None:
        """Open a file of tokens.

        Args:
            path: A folder that `penstock pack` or `write` made; the `.bin` file of Megatron-LM,
                with its `.idx` beside it; or the `.ds` file of datatrove, with its `.ds.index`.
            max_tokens: Longer documents are cut into pieces of this many tokens; the last piece
                may be shorter. Then an index is that of a piece, and an empty document has no
                piece. None: documents are whole.

        Raises:
            ConfigError: `max_tokens` is less than 1.
            StoreError: it is not a file of tokens, or it is damaged: a file is cut off, or its
                offsets do not ascend. The tokens themselves are not read: see `verify`.
        """
        if max_tokens is not None and operator.index(max_tokens) < 1:
            raise ConfigError(f"{max_tokens=}: a piece has 1 token or more; None keeps documents.")
        self.path = Path(path)
        self.max_tokens = max_tokens
        self._set(open_tokens(self.path))

    def _set(self, mapped: Mapped) -> None:
        self._mapped, self._files = mapped, mapped.files
        self._offsets = mapped.offsets
        if self.max_tokens is not None:
            self._offsets = _cut(mapped.offsets, self.max_tokens)
        self.dtype = mapped.tokens.dtype
        self.num_tokens = len(mapped.tokens)
        self.tokenizer_digest: str | None = mapped.header.get("tokenizer")

    @classmethod
    def write(
        cls,
        path: str | Path,
        documents: Iterable[ArrayLike],
        dtype: DTypeLike = np.uint32,
        *,
        overwrite: bool = False,
    ) -> None:
        """Write documents to a folder, which appears when it is complete.

        Args:
            path: The folder.
            documents: Each a list or array of token IDs. They are read once, one at a time.
            dtype: uint16 or uint32.
            overwrite: Whether a folder of tokens that is there may be replaced.

        Raises:
            ConfigError: the dtype is another one, or a document is not a list of token IDs that
                fit into it.
            StoreError: there is something at `path` that may not be replaced.
        """
        from penstock.text.token_writer import TokenWriter  # it needs what stores need

        writer = TokenWriter(path, dtype, overwrite=overwrite)
        try:
            for number, document in enumerate(documents):
                ids = np.asarray(document)
                if why := why_no_ids(ids, writer.dtype):
                    raise ConfigError(f"document {number} {why}.")
                writer.put(ids, np.array([len(ids)]))
            writer.finish()
        finally:
            writer.close()

    @property
    def lengths(self) -> NDArray[np.int32] | NDArray[np.int64]:
        """The number of tokens of each sample, shape (length,), a new array; no token is read.

        int32; or int64 if a document has more than 2^31 - 1 tokens.
        """
        lengths = np.diff(self._offsets)
        fits = not len(lengths) or lengths.max() <= np.iinfo(np.int32).max
        return lengths.astype(np.int32) if fits else lengths

    @property
    def fingerprint(self) -> str:
        """Identifies the samples; a loader warns if its state was saved with another one."""
        # In Penstock's own layout, a copy of the folder has the same fingerprint.
        sums = self._mapped.header.get("crc32") or fingerprint_of(self._files)
        return f"{sums} {self.max_tokens}"

    def document_of(self, index: int) -> tuple[int, int]:
        """Return the document that a sample is part of, and at which of its tokens it begins."""
        place = int(self._checked([index])[0])
        if self.max_tokens is None:
            return place, 0
        first = self._offsets[place]
        # Of the documents that begin here, all but the last are empty.
        document = int(np.searchsorted(self._mapped.offsets, first, side="right")) - 1
        return document, int(first - self._mapped.offsets[document])

    def blocks(self, length: int) -> TokenBlocks:
        """Return a dataset of all tokens one after the other, `length` at a time.

        Documents are joined and cut wherever a block ends. An incomplete last block is left out.
        `max_tokens` makes no difference.

        Raises:
            ConfigError: `length` is less than 1.
        """
        return TokenBlocks(self, length)

    def verify(self) -> None:
        """Read all tokens and compare their checksum.

        Raises:
            ConfigError: Megatron's and datatrove's files have no checksum.
            StoreError: the tokens are damaged.
        """
        if not self._mapped.header:
            raise ConfigError(f"{self.path} has no checksum: `penstock pack` writes one.")
        check_tokens(self._mapped)

    def __len__(self) -> int:
        """Return the number of documents, or of pieces."""
        return len(self._offsets) - 1

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return the tokens of one document or piece; a negative index counts from the end."""
        place = operator.index(index)
        if not -len(self) <= place < len(self):
            raise IndexError(f"index {place} is out of range for {len(self)} documents.")
        start, stop = self._offsets[place % len(self) :][:2].tolist()
        return self._mapped.tokens[start:stop].astype(np.int64)

    def __getitems__(self, indices: Sequence[int]) -> RaggedArray:
        """Return the samples at some indices, their tokens gathered into one array."""
        places = self._checked(indices)
        starts, stops = self._offsets[places], self._offsets[places + 1]
        offsets = np.append(0, np.cumsum(stops - starts))
        return RaggedArray(gathered(self._mapped.tokens, starts, stops), offsets)

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> NDArray[np.int64]:
        """Return samples of one length as int64 (batch, tokens).

        Raises:
            CollateError: their lengths differ. `PackedCollate` takes such samples.
        """
        places = self._checked(indices)
        starts, stops = self._offsets[places], self._offsets[places + 1]
        lengths = stops - starts
        try:
            check_shapes([(length,) for length in lengths.tolist()])
        except CollateError as error:
            error.name_samples(places.tolist())
            error.add_note("(lengths differ: give collate_fn=penstock.text.PackedCollate(...))")
            raise
        out = alloc((len(places), int(lengths[0])), np.int64)
        gathered(self._mapped.tokens, starts, stops, out.reshape(-1))
        return out

    def _checked(self, indices: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        return counted_from_start(
            np.asarray(indices, np.int64), len(self), f"{len(self)} documents"
        )

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the map."""
        return {"path": self.path, "max_tokens": self.max_tokens, "_files": self._files}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Open the file again."""
        self.__dict__.update(state)
        self._set(open_tokens(self.path, self._files))


class TokenBlocks(Dataset["NDArray[np.int64]"]):
    """All tokens of a `TokenFile`, in blocks of one length; `TokenFile.blocks` makes one."""

    is_drawless = True
    _shows = ("length", "block_length")

    def __init__(self, file: TokenFile, length: int) -> None:
        """See `TokenFile.blocks`."""
        if operator.index(length) < 1:
            raise ConfigError(f"blocks({length}): a block has 1 token or more.")
        self.file = file
        self.block_length = length

    @property
    def lengths(self) -> NDArray[np.int32]:
        """The number of tokens of each block."""
        return np.full(len(self), self.block_length, np.int32)

    @property
    def fingerprint(self) -> str:
        """What the blocks are made of: see `TokenFile.fingerprint`."""
        return f"{self.file.fingerprint} {self.block_length}"

    def __len__(self) -> int:
        """Return the number of whole blocks."""
        return self.file.num_tokens // self.block_length

    def __getitem__(self, index: int) -> NDArray[np.int64]:
        """Return one block, int64 of shape (length,), a copy of its own."""
        block: NDArray[np.int64] = self.get_batch(np.array([index]), np.empty)[0]
        return block

    def get_batch(self, indices: NDArray[np.int64], alloc: Allocator) -> NDArray[np.int64]:
        """Return blocks as int64 (batch, length)."""
        starts = counted_from_start(indices, len(self), f"{len(self)} blocks") * self.block_length
        out = alloc((len(starts), self.block_length), np.int64)
        tokens = self.file._mapped.tokens
        gathered(tokens, starts, starts + self.block_length, out.reshape(-1))
        return out


def gathered(
    tokens: NDArray[Any],
    starts: NDArray[np.int64],
    stops: NDArray[np.int64],
    out: NDArray[np.int64] | None = None,
) -> NDArray[np.int64]:
    """Return `tokens[start:stop]` of all pairs, one after the other, as int64."""
    # A slice takes 0.1 us. From 20 tokens on that is less than an index for each of them.
    pieces = [tokens[a:b] for a, b in zip(starts.tolist(), stops.tolist(), strict=True)]
    if not pieces:
        return np.empty(0, np.int64)
    if out is None:
        return np.concatenate(pieces, dtype=np.int64)
    return np.concatenate(pieces, out=out)


def why_no_ids(ids: NDArray[Any], dtype: np.dtype[Any]) -> str:
    """Return why an array is not a document of token IDs of this dtype; "" if it is one."""
    if ids.ndim != 1 or (len(ids) and ids.dtype.kind not in "iu"):
        return f"is an array of {ids.dtype}, shape {ids.shape}, not a list of token IDs"
    low, high = (ids.min(), ids.max()) if len(ids) else (0, 0)
    largest = np.iinfo(dtype).max
    if low >= 0 and high <= largest:
        return ""
    return f"has token IDs from {low} to {high}; {dtype} keeps 0 to {largest}"


def _cut(offsets: NDArray[np.int64], max_tokens: int) -> NDArray[np.int64]:
    """Return the offsets of pieces of at most so many tokens; `offsets` if nothing is cut."""
    lengths = np.diff(offsets)
    if not len(lengths) or (lengths.max() <= max_tokens and lengths.min() > 0):
        return offsets
    counts = -(-lengths // max_tokens)
    # Piece k of a document begins k * max_tokens behind it.
    numbers = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    return np.append(np.repeat(offsets[:-1], counts) + numbers * max_tokens, offsets[-1])
