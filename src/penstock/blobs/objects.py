# SPDX-License-Identifier: Apache-2.0
"""`ObjectBlobs`: object storage and web servers, by obstore."""

from __future__ import annotations

import atexit
import re
from typing import TYPE_CHECKING, Any, Final

import obstore  # noqa: F401 - missed now rather than by another process

from penstock.blobs.blobs import Blob, Blobs
from penstock.blobs.errors import checked_name
from penstock.blobs.fetcher import Fetcher
from penstock.blobs.place import Place
from penstock.errors import ConfigError
from penstock.redact import is_secret_name
from penstock.sharing import Lease, Pool
from penstock.worker_info import get_thread_info, info_unasked

if TYPE_CHECKING:
    import contextlib
    from collections.abc import Sequence

    from penstock.blobs.blobs import ByteRange

_ADDRESS: Final = re.compile(r"([a-z][a-z0-9]*)://([^/@?#\s]+)(/[^?#]*)?")
_callers: Pool[Any] = Pool(lambda caller: caller.close(), is_local=False)
atexit.register(_callers.close_all)


class ObjectBlobs(Blobs):
    """Objects of S3 and what speaks its language, Google Cloud Storage, Azure; of a web server.

    Credentials are found by obstore where each of these keeps them: in the environment, in files of
    its tools, or with the machine. They are never part of this object.

    Concurrency:
        Any thread and process. A worker process of a loader has connections of its own; any other
        process has them in a process that is started at its first read (see
        `penstock.blobs.fetcher`), so that it may be forked.
    """

    def __init__(
        self,
        address: str,
        *,
        endpoint: str | None = None,
        region: str | None = None,
        anonymous: bool = False,
        timeout_s: float = 60.0,
        **unknown: Any,  # noqa: ANN401
    ) -> None:
        """Name the place; nothing is sent before it is used.

        Args:
            address: `s3://BUCKET/PREFIX`, `gs://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`,
                `http://HOST/PATH` or `https://HOST/PATH`.
            endpoint: Of another server with that API, as `https://minio.example:9000`; for Azure
                with the account, as `http://127.0.0.1:10000/devstoreaccount1`.
            region: The bucket's.
            anonymous: Whether to sign no request, as for a public bucket.
            timeout_s: Seconds after which a request that fails is repeated no more.
            unknown: Refused.

        Raises:
            ConfigError: the address is of another form or holds a secret, or an option is one.
        """
        for given in (address, endpoint):
            if (
                given is not None and _ADDRESS.fullmatch(given) is None
            ):  # not shown: it may hold one
                raise ConfigError(
                    f"an address of {given.partition(':')[0]!r} has the form s3://BUCKET/PREFIX or "
                    "https://HOST/PATH, without a user, a password or a query. Credentials are "
                    "taken from the environment."
                )
        for name in unknown:
            if is_secret_name(name):
                raise ConfigError(
                    f"{name} is no option: credentials are taken from the environment, so that "
                    "they get into no pickle and no message."
                )
            raise TypeError(f"unexpected keyword argument {name!r}")
        self.place = Place(address.rstrip("/"), endpoint, region, anonymous, float(timeout_s))
        self._lease: Lease[Any] | None = None

    @property
    def address(self) -> str:
        """As it was given."""
        return self.place.address

    def __getstate__(self) -> dict[str, Any]:
        """Leave connections behind."""
        return {**self.__dict__, "_lease": None}

    def _call(self, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        with self.caller() as caller:
            return caller.call(self.place, method, *arguments)

    def caller(self) -> contextlib.AbstractContextManager[Any]:
        """Return what calls object storage for this process: a fetcher, in a worker a client."""
        lease = self._lease
        if lease is None or not lease.is_usable:
            lease = self._lease = _callers.acquire("", _caller)
        return lease.using()

    def list(self, prefix: str = "", *, at_most: int | None = None) -> Sequence[Blob]:
        """Return the objects; a web server has no lists."""
        objects: Sequence[Blob] = self._call("list", prefix, at_most)
        return objects

    def stat(self, name: str) -> Blob:
        """Return one object."""
        blob: Blob = self._call("stat", checked_name(name))
        return blob

    def read(self, ranges: Sequence[ByteRange]) -> Sequence[memoryview]:
        """Return bytes of objects; near ones are fetched by one request."""
        for one in ranges:
            checked_name(one.name)
        views: Sequence[memoryview] = self._call("read", list(ranges)) if ranges else []
        return views

    def write(self, name: str, data: bytes | memoryview, *, replaces: str | None = None) -> None:
        """Put an object in its place; the server compares versions."""
        self._call("write", checked_name(name), data, replaces)

    def delete(self, name: str) -> None:
        """Take an object away."""
        self._call("delete", checked_name(name))

    def close(self) -> None:
        """Close the connections, unless another place of this process uses them as well."""
        lease, self._lease = self._lease, None
        if lease is not None:
            lease.close()


def _caller() -> Any:  # noqa: ANN401
    """Return what calls object storage for this process."""
    if info_unasked() is not None and get_thread_info() is None:  # nothing is forked from a worker
        from penstock.blobs.client import Client

        return Client()
    return Fetcher()
