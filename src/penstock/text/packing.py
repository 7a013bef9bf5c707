# SPDX-License-Identifier: Apache-2.0
"""`pack_tokens`: a corpus of texts, or of token IDs, into a `TokenFile`.

    this process: Corpus ──▶ workers: parse, tokenize ──▶ this process: TokenWriter

A chunk of the corpus is what a worker is asked for, so the loader keeps their order, and reads no
further ahead than its workers need. A tokenizer is slower by far than one process can decompress.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple

import numpy as np

from penstock.data.dataset import Dataset
from penstock.errors import ConfigError, StoreError
from penstock.loader import Loader
from penstock.opening import MAX_TREE_BYTES, read_annotation
from penstock.optional import missing_extra
from penstock.system_limits import cores_by_affinity
from penstock.text.corpus import Corpus, CorpusPlace
from penstock.text.token_file import why_no_ids
from penstock.text.token_writer import TokenWriter
from penstock.worker_info import get_worker_info

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

    from penstock.text.corpus import Chunk

_FEW_BYTES: Final = 4 << 20  # are tokenized sooner than workers are started
_MOST_LISTED: Final = 10_000
_ENCODE_TEXTS: Final = 64  # at a time: more keeps more of a tokenizer's results in memory


@dataclass(frozen=True, slots=True)
class PackedTokens:
    """What was packed.

    Attributes:
        path: Of the folder.
        num_documents: Documents in it.
        num_tokens: Tokens in it.
        num_resumed: Documents that an interrupted run had packed.
        num_empty: Documents without a token, which are not in it.
        num_left_out: Records that are no document, with `on_error="skip"`.
        left_out: The last 10,000 of those of this run: where each is, and why.
        wall_s: Seconds it took.
    """

    path: str
    num_documents: int
    num_tokens: int
    num_resumed: int
    num_empty: int
    num_left_out: int
    left_out: tuple[tuple[str, str], ...]
    wall_s: float


class _Position(NamedTuple):
    """Where a run is, for the journal: with what the file does not say."""

    source: int = 0
    num_records: int = 0
    num_empty: int = 0
    num_left_out: int = 0


def pack_tokens(
    src: str | Path,
    dst: str | Path,
    tokenizer: str | Path | None = None,
    *,
    text_key: str | None = None,
    append_token: str | None = None,
    num_workers: int | None = None,
    resume: bool = False,
    overwrite: bool = False,
    on_error: Literal["raise", "skip"] = "raise",
    progress: Callable[[int, int, int], object] | None = None,
) -> PackedTokens:
    """Pack a corpus into a folder that `TokenFile` reads; it is there when it is complete.

    Args:
        src: See `Corpus`.
        dst: Of the folder.
        tokenizer: A `tokenizer.json` of Hugging Face's library. Its special tokens are not added,
            and its truncation and padding are off. None: the corpus has token IDs.
        text_key: Of the texts, "text" if None; of the IDs, "input_ids".
        append_token: Token at the end of each document: its text, as "</s>", or its number.
        num_workers: Processes that tokenize; None takes the usable cores, and none at all for a
            small corpus. The file is the same for any number.
        resume: Whether to go on where an interrupted run with the same arguments stopped.
        overwrite: Whether a folder of tokens that is at `dst` is replaced.
        on_error: Whether a record that is no document ends it, or is left out.
        progress: Called with bytes of the corpus read, bytes of it in all, and tokens made.

    Raises:
        ConfigError: arguments that do not fit each other, or the corpus.
        StoreError: the corpus is cut off, or a record is no document, named with its file and line;
            or `dst` is something that may not be replaced.
        MissingExtraError: a library is not installed; the message names the extra.
    """
    began_s = time.monotonic()
    encoder = Encoder(tokenizer, text_key, append_token)
    corpus = Corpus(src, encoder.key)
    facts = json.dumps([corpus.fingerprint, encoder.digest, encoder.key, encoder.end_token])
    what = hashlib.sha256(facts.encode()).hexdigest()
    left_out: deque[tuple[str, str]] = deque(maxlen=_MOST_LISTED)
    writer = TokenWriter(
        dst,
        encoder.dtype,
        tokenizer_digest=encoder.digest,
        what=what,
        resume=resume,
        overwrite=overwrite,
    )
    try:
        num_resumed = writer.written.num_documents
        at = _Position(*writer.written.position)
        if not writer.finished:
            for made in _loader(corpus, encoder, at, num_workers):
                left_out += made["bad"]
                if made["bad"] and on_error == "raise":
                    where, why = made["bad"][0]
                    raise StoreError(
                        f"{where}: {why}. Leave such records out: --skip-bad (on_error='skip' in "
                        "Python), with --resume from here on. Or correct it, and pack anew."
                    )
                at = _Position(
                    *CorpusPlace(*made["end"]),
                    num_empty=at.num_empty + made["num_empty"],
                    num_left_out=at.num_left_out + len(made["bad"]),
                )
                writer.put(made["values"], made["lengths"], at)
                if progress is not None:
                    progress(made["num_bytes"], corpus.size_bytes, writer.written.num_tokens)
            writer.finish()
    finally:
        writer.close()
    return PackedTokens(
        path=str(dst),
        num_documents=writer.written.num_documents,
        num_tokens=writer.written.num_tokens,
        num_resumed=num_resumed,
        num_empty=at.num_empty,
        num_left_out=at.num_left_out,
        left_out=tuple(left_out),
        wall_s=time.monotonic() - began_s,
    )


def _loader(
    corpus: Corpus, encoder: Encoder, at: _Position, num_workers: int | None
) -> Loader[dict[str, Any]]:
    if num_workers is None:
        num_workers = 0 if corpus.size_bytes < _FEW_BYTES else int(cores_by_affinity())
    chunks: Any = corpus.chunks(CorpusPlace(at.source, at.num_records))
    return Loader(encoder, batch_size=None, sampler=chunks, num_workers=num_workers)


class Encoder(Dataset[dict[str, Any]]):
    """Makes tokens of a chunk, which is its key.

    Attributes:
        key: Of the texts, or token IDs, in a record.
        dtype: Of the tokens.
        end_token: Appended to each document; None: nothing is.
        digest: SHA-256 of the tokenizer's file; None without one.
    """

    is_drawless = True

    def __init__(
        self, tokenizer: str | Path | None, key: str | None, append_token: str | None
    ) -> None:
        """Read the tokenizer's file; arguments are those of `pack_tokens`."""
        self._data: bytes | None = None
        self._tokenizer: Any = None
        self.digest: str | None = None
        self.dtype: np.dtype[Any] = np.dtype("<u4")
        if tokenizer is not None:
            self._data = read_annotation(tokenizer, MAX_TREE_BYTES)
            self._tokenizer = _tokenizer_of(tokenizer, self._data)
            self.digest = hashlib.sha256(self._data).hexdigest()
            if max(self._tokenizer.get_vocab().values(), default=0) < 1 << 16:
                self.dtype = np.dtype("<u2")
        self.key = key or ("input_ids" if tokenizer is None else "text")
        self.end_token = None if append_token is None else self._id_of(append_token)

    def _id_of(self, token: str) -> int:
        found = None if self._tokenizer is None else self._tokenizer.token_to_id(token)
        if found is None and token.isascii() and token.isdigit():
            found = int(token)
        if found is None or found > np.iinfo(self.dtype).max:
            where = (
                "a number without --tokenizer" if self._tokenizer is None else "in the tokenizer"
            )
            raise ConfigError(f"--append-token {token!r} is no token: it has to be {where}.")
        return int(found)

    def __getitem__(self, chunk: Chunk) -> dict[str, Any]:
        """Return the tokens of a chunk, lengths of its documents, and what is not among them."""
        texts: list[Any] = []
        bad: list[tuple[str, str]] = []
        for where, record in chunk.named():
            try:
                texts.append(self._found(record, is_line=chunk.is_lines))
            except (ValueError, RecursionError) as error:
                bad.append((where, " ".join(str(error).split())))
        found = [np.asarray(ids, self.dtype) for ids in self._tokens(texts)]
        documents = [ids for ids in found if len(ids)]
        lengths = np.fromiter(map(len, documents), np.int64, len(documents))
        values = np.concatenate([*documents, np.empty(0, self.dtype)])
        if self.end_token is not None:
            values = np.insert(values, np.cumsum(lengths), self.end_token)
            lengths += 1
        return {
            "values": values,
            "lengths": lengths,
            "num_empty": len(found) - len(documents),
            "bad": bad,
            "end": list(chunk.end),
            "num_bytes": chunk.num_bytes,
        }

    def _found(self, record: Any, *, is_line: bool) -> Any:  # noqa: ANN401
        """Return the text of a record, or its IDs as an array; ValueError if it has none."""
        if is_line:
            record = json.loads(record.decode("utf-8"))
            if not isinstance(record, dict):
                raise ValueError(f"it is JSON, but a {type(record).__name__} and no object")
            if self.key not in record:
                keys = ", ".join(list(record)[:8])
                raise ValueError(f"it has no {self.key!r}, but {keys or 'nothing'}: --text-key")
            record = record[self.key]
        elif isinstance(record, bytes):
            record = record.decode("utf-8")
        if self._data is None:
            ids = np.asarray(record)
            if why := why_no_ids(ids, self.dtype):
                raise ValueError(f"{self.key!r} {why}")
            return ids
        if not isinstance(record, str):
            raise ValueError(f"{self.key!r} is no text, but {type(record).__name__}")
        record.encode("utf-8")  # JSON can have halves of surrogate pairs, which are no text
        return record

    def _tokens(self, documents: list[Any]) -> Iterator[Sequence[int]]:
        if self._data is None:
            yield from documents
            return
        if self._tokenizer is None:
            self._tokenizer = _tokenizer_of("the tokenizer", self._data)
        if get_worker_info() is not None:  # the other cores have workers of their own
            os.environ["TOKENIZERS_PARALLELISM"] = "false"
        for first in range(0, len(documents), _ENCODE_TEXTS):
            texts = documents[first : first + _ENCODE_TEXTS]
            for encoding in self._tokenizer.encode_batch_fast(texts, add_special_tokens=False):
                yield encoding.ids

    def __getstate__(self) -> dict[str, Any]:
        """Return all but the tokenizer, which its file makes anew."""
        return {**self.__dict__, "_tokenizer": None}


def _tokenizer_of(path: str | Path, data: bytes) -> Any:  # noqa: ANN401
    try:
        from tokenizers import Tokenizer  # type: ignore[import-not-found, unused-ignore]
    except ModuleNotFoundError as error:
        raise missing_extra(error, "--tokenizer") from error
    try:
        tokenizer = Tokenizer.from_buffer(data)
    except Exception as error:  # the library has no class of its own for it
        raise ConfigError(
            f"{path} is no tokenizer: {error}. Give the tokenizer.json of Hugging Face's library; "
            "`tokenizer.save_pretrained` of a fast tokenizer writes one."
        ) from error
    tokenizer.no_truncation()
    tokenizer.no_padding()
    return tokenizer
