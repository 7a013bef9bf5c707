# SPDX-License-Identifier: Apache-2.0
"""Arguments that several commands have."""

from __future__ import annotations

from typing import Annotated, Final

import typer

__all__ = ["SOURCE_HELP", "ImageField", "KeyField", "LabelField"]

SOURCE_HELP: Final = (
    "A folder, a store's address, or module:name of a dataset, or of a function or class that "
    "makes one; it is run."
)

# Fields of MongoDB's documents and columns of tables are one option with two names.
ImageField = Annotated[
    str | None,
    typer.Option(
        "--image-field",
        "--image-column",
        metavar="NAME",
        help="Field (MongoDB) or column (Parquet, Arrow) of images.",
    ),
]
LabelField = Annotated[
    str | None,
    typer.Option(
        "--label-field",
        "--label-column",
        metavar="NAME",
        help="Field (MongoDB) or column (Parquet, Arrow) of classes.",
    ),
]
KeyField = Annotated[
    str | None,
    typer.Option(
        "--key-field",
        "--key-column",
        metavar="NAME",
        help="Field (MongoDB) or column (Parquet, Arrow) of keys.",
    ),
]
