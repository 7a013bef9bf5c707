# SPDX-License-Identifier: Apache-2.0
"""Tokenized documents: files of tokens, lengths of documents, and batches of packed rows.

`penstock pack corpus.jsonl tokens:OUT --tokenizer FILE` makes a `TokenFile`.
`penstock.sampling.PackingSampler` decides which documents share a row, and `PackedCollate` makes
the batch.
"""

from penstock.text.lengths import lengths_of
from penstock.text.packed_collate import PackedCollate
from penstock.text.token_file import TokenFile

__all__ = ["PackedCollate", "TokenFile", "lengths_of"]
