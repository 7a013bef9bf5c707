# SPDX-License-Identifier: Apache-2.0
"""What a place of objects is, and which kinds there are."""
# An object is read in ranges, and written whole: at every moment a name is the old object, the new
# one, or none. Guarantees, held by `penstock.testing.blobs.BlobsContract`:
#     Ranges come in the order asked for, whole, or there is an error.
#     A place may be pickled, and be used in forked and spawned processes, and by several threads:
#     connections are made anew in each process, and no secret is pickled or shown.

from __future__ import annotations

import abc
import re
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from penstock.optional import call_registered

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Blob(NamedTuple):
    """An object as it is at a moment.

    Attributes:
        name: Below its place; parts are separated by "/".
        size_bytes: Its size.
        version: Another text if its contents are others.
    """

    name: str
    size_bytes: int
    version: str


class ByteRange(NamedTuple):
    """Bytes of an object.

    Attributes:
        name: The object's.
        start: The first byte.
        stop: Behind the last byte; None is the object's end.
        version: As `Blob.version`; an object that is another by now is an error. "" takes any.
    """

    name: str
    start: int = 0
    stop: int | None = None
    version: str = ""


class Blobs(abc.ABC):
    """A place of objects.

    Concurrency:
        Any thread. It pickles, and goes on in the other process with connections of its own.
    """

    @property
    @abc.abstractmethod
    def address(self) -> str:
        """Where it lies, without any secret."""

    @abc.abstractmethod
    def list(self, prefix: str = "", *, at_most: int | None = None) -> Sequence[Blob]:
        """Return the objects whose names begin with `prefix`, by name.

        Args:
            prefix: Of names.
            at_most: Look at no more objects than some so many; None looks at all.

        Raises:
            StoreError: the place cannot be read, or has no lists, as a web server.
        """

    @abc.abstractmethod
    def stat(self, name: str) -> Blob:
        """Return one object.

        Raises:
            BlobNotFound: there is none of this name.
            StoreError: it cannot be read.
        """

    @abc.abstractmethod
    def read(self, ranges: Sequence[ByteRange]) -> Sequence[memoryview]:
        """Return bytes of objects, in the order asked for; all are read at the same time.

        Raises:
            BlobNotFound: there is no object of a name.
            StoreError: one cannot be read, is shorter, or is another version; nothing is returned.
        """

    @abc.abstractmethod
    def write(self, name: str, data: bytes | memoryview, *, replaces: str | None = None) -> None:
        """Put an object in its place, whole.

        Args:
            name: The object's.
            data: Its contents.
            replaces: The version that has to be there; "" for none. None takes any.

        Raises:
            BlobChanged: something else is there than `replaces`.
            StoreError: it cannot be written; then what was there is as it was.
        """

    @abc.abstractmethod
    def delete(self, name: str) -> None:
        """Take an object away; one that is not there is no error."""

    def close(self) -> None:  # noqa: B027 - a folder holds nothing
        """Give back what this process holds. May be called again, and the place used again."""

    def __enter__(self) -> Self:
        """Return the place, to be closed at the end of the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close it."""
        self.close()

    def __repr__(self) -> str:
        """Return kind and address."""
        return f"<{type(self).__name__} {self.address}>"


_kinds: dict[str, Callable[..., Blobs] | str] = {}
_SCHEME: Final = re.compile(r"([a-z][a-z0-9+.-]*)://", re.IGNORECASE)


def register_blobs(scheme: str, kind: Callable[..., Blobs] | str) -> None:
    """Make places known whose addresses begin with `SCHEME://`.

    Args:
        scheme: The word. A kind of this name is replaced.
        kind: Called with an address and the options of `open_blobs`; or where it is found, as
            "package.module:name", to be imported at first use.
    """
    _kinds[scheme.lower()] = kind


for _scheme in ("s3", "gs", "az", "http", "https"):
    register_blobs(_scheme, "penstock.blobs.objects:ObjectBlobs")


def is_remote(address: str) -> bool:
    """Return whether an address is that of a kind that `register_blobs` has made known."""
    found = _SCHEME.match(address)
    return found is not None and found[1].lower() in _kinds


def open_blobs(address: str, **options: Any) -> Blobs:  # noqa: ANN401
    """Return the place at an address; nothing is opened before it is used.

    Args:
        address: `s3://BUCKET/PREFIX`, `gs://`, `az://`, `http(s)://HOST/PATH`, or a folder.
        options: Of that kind of place.

    Raises:
        ConfigError: the address or an option does not fit.
        MissingExtraError: what it needs is not installed; the message names the extra.
    """
    kind: Callable[..., Blobs] | str = "penstock.blobs.folder:FolderBlobs"
    if is_remote(address):
        kind = _kinds[address.partition(":")[0].lower()]
    blobs: Blobs = call_registered(kind, address, options, "object storage", f"{address} has")
    return blobs
