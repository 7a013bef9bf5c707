# SPDX-License-Identifier: Apache-2.0
"""Write token files of the prose and the code that Python ships, and a tokenizer for them.

python texts.py build/texts

Prose: the topics of Python's language reference, as `help()` shows them, and the docstrings of the
standard library. Code: its functions and methods, without docstrings. Every tenth topic and file is
for validation.
"""

from __future__ import annotations

import argparse
import ast
import sysconfig
from pathlib import Path
from pydoc_data.topics import topics
from typing import TYPE_CHECKING, Final

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from penstock.text import TokenFile

if TYPE_CHECKING:
    from collections.abc import Iterator

    Texts = dict[str, list[str]]

END: Final = "</s>"  # of every document
SPLITS: Final = ("prose-train", "prose-val", "code-train", "code-val")
_SKIPPED: Final = {"site-packages", "dist-packages", "test", "tests", "encodings", "pydoc_data"}
_FUNCTION: Final = (ast.FunctionDef, ast.AsyncFunctionDef)


def collect(num_files: int | None) -> Texts:
    """Return the documents of each split; of the library, those of so many files."""
    found: Texts = {name: [] for name in SPLITS}
    for number, text in enumerate(topics.values()):
        found["prose-val" if number % 10 == 0 else "prose-train"].append(text.strip())
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [
        path
        for path in sorted(library.rglob("*.py"))
        if not _SKIPPED.intersection(path.relative_to(library).parts)
    ]
    for number, path in enumerate(files[:num_files]):
        split = "val" if number % 10 == 0 else "train"
        try:
            source = path.read_text("utf-8")
            documents = list(split_up(source))
        except (SyntaxError, UnicodeDecodeError):  # templates, and examples of bad files
            continue
        for kind, text in documents:
            found[f"{kind}-{split}"].append(text)
    return found


def split_up(source: str) -> Iterator[tuple[str, str]]:
    """Yield the docstrings, as "prose", and the functions and methods without them, as "code"."""
    lines = source.splitlines(keepends=True)
    module = ast.parse(source)
    classes = [node for node in module.body if isinstance(node, ast.ClassDef)]
    functions = [n for scope in (module, *classes) for n in scope.body if isinstance(n, _FUNCTION)]
    for node in (module, *classes, *functions):
        if text := ast.get_docstring(node):
            yield "prose", text
    for node in functions:
        skipped = node.body[0] if ast.get_docstring(node) is not None else None
        before = skipped.lineno - 1 if skipped else node.end_lineno
        after = skipped.end_lineno if skipped else node.end_lineno
        yield "code", "".join(lines[node.lineno - 1 : before] + lines[after : node.end_lineno])


def train_tokenizer(texts: Texts, vocabulary_size: int) -> Tokenizer:
    """Train byte pair encoding on what is there to train on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary_size,
        special_tokens=[END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    documents = texts["prose-train"] + texts["code-train"]
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="a folder; texts of an earlier run are replaced")
    parser.add_argument("--vocabulary-size", type=int, default=2048)
    parser.add_argument("--num-files", type=int, help="of the standard library; all by default")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    texts = collect(args.num_files)
    tokenizer = train_tokenizer(texts, args.vocabulary_size)
    tokenizer.save(str(args.out / "tokenizer.json"))
    end = tokenizer.token_to_id(END)
    for name, documents in texts.items():
        ids = [[*found.ids, end] for found in tokenizer.encode_batch(documents)]
        TokenFile.write(args.out / name, ids, np.uint16, overwrite=True)
        print(f"{name:11} {len(ids):6,} documents, {sum(map(len, ids)):9,} tokens")


if __name__ == "__main__":
    main()
