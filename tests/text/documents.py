"""Documents of tokens, and files of them in other projects' layouts."""

from __future__ import annotations

import struct

import numpy as np

MEGATRON_CODES = {"uint8": 1, "int8": 2, "int16": 3, "int32": 4, "int64": 5, "uint16": 8}


def some_documents(count=50, longest=40, largest=60_000, seed=0):
    generator = np.random.default_rng(seed)
    sizes = generator.integers(1, longest + 1, count)
    return [generator.integers(0, largest, size) for size in sizes]


def write_megatron(prefix, documents, dtype="uint16", sequences_per_document=1, modes=b""):
    """The layout of MMapIndexedDataset, version 1; documents are cut into sequences."""
    parts = [np.array_split(document, sequences_per_document) for document in documents]
    sequences = [np.asarray(part, dtype) for document in parts for part in document]
    lengths = np.array([len(part) for part in sequences], "<i4")
    pointers = np.cumsum([0, *lengths[:-1]]) * np.dtype(dtype).itemsize if len(lengths) else []
    bounds = np.arange(len(documents) + 1) * sequences_per_document
    prefix.with_suffix(".bin").write_bytes(b"".join(part.tobytes() for part in sequences))
    prefix.with_suffix(".idx").write_bytes(
        b"MMIDIDX\x00\x00"
        + struct.pack("<QBQQ", 1, MEGATRON_CODES[dtype], len(lengths), len(bounds))
        + lengths.tobytes()
        + np.asarray(pointers, "<i8").tobytes()
        + np.asarray(bounds, "<i8").tobytes()
        + modes
    )
    return prefix.with_suffix(".bin")


def write_datatrove(path, documents, dtype="uint16"):
    """The layout of datatrove's DocumentTokenizer: tokens, and where each document ends."""
    path.write_bytes(b"".join(np.asarray(document, dtype).tobytes() for document in documents))
    ends = np.cumsum([len(document) for document in documents])
    path.with_name(f"{path.name}.index").write_bytes(np.asarray(ends, "<u8").tobytes())
    return path
