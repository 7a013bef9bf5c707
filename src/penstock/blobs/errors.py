# SPDX-License-Identifier: Apache-2.0
"""What is said of an object that cannot be read, wherever it lies."""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.errors import ConfigError, StoreError

if TYPE_CHECKING:
    from penstock.blobs.blobs import ByteRange


class BlobNotFound(StoreError):
    """There is no object of a name."""


class BlobChanged(StoreError):
    """An object is another one than the one that was to be replaced."""


def replaced(name: str, address: str) -> BlobChanged:
    """Return the error of an object that somebody else has written, to be raised."""
    return BlobChanged(f"{name!r} in {address} was written by somebody else in the meantime.")


def not_found(name: str, address: str) -> BlobNotFound:
    """Return the error of an object that is not there, to be raised."""
    return BlobNotFound(f"there is no object {name!r} in {address}.")


def checked_name(name: str) -> str:
    """Return a name of an object, which leads out of no folder."""
    if not name or name.startswith("/") or "\0" in name or ".." in name.split("/"):
        raise ConfigError(f"{name!r} is no name of an object: parts separated by '/', none '..'.")
    return name


def changed_since(name: str, address: str) -> StoreError:
    """Return the error of another version, to be raised."""
    return StoreError(
        f"{name!r} in {address} is another object than the one that was listed: it was replaced in "
        "the meantime. Open the store anew."
    )


def cut_off(wanted: ByteRange, address: str, num_bytes: int) -> StoreError:
    """Return the error of an object that is shorter than it should be, to be raised."""
    stop = "its end" if wanted.stop is None else f"{wanted.stop:,}"
    return StoreError(
        f"{wanted.name!r} in {address} is cut off: of bytes {wanted.start:,} to {stop} there are "
        f"only {num_bytes:,}. It was replaced by a shorter one, or copied in part."
    )
