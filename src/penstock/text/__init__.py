# SPDX-License-Identifier: Apache-2.0
"""Documents of tokens: files of them, their lengths, and batches of rows packed with them.

`penstock.sampling.PackingSampler` decides which documents share a row; `penstock pack corpus.jsonl
tokens:OUT --tokenizer FILE` makes a `TokenFile`.
"""

from penstock.text.lengths import lengths_of
from penstock.text.packed_collate import PackedCollate
from penstock.text.token_file import TokenFile

__all__ = ["PackedCollate", "TokenFile", "lengths_of"]
