# SPDX-License-Identifier: Apache-2.0
"""The client of object storage in one process: obstore, on the event loop of a thread.

A process that has used it must not be forked: its threads do not go along, and a child would wait
for them. `penstock.blobs.fetcher` is for processes that may be.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import os
import re
import threading
import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

import obstore
from obstore import exceptions
from obstore.store import from_url

from penstock.blobs.blobs import Blob
from penstock.blobs.errors import changed_since, cut_off, not_found, replaced
from penstock.blobs.requests import parts_of, plan_requests
from penstock.errors import StoreError, StoreUnreachable
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Sequence

    from penstock.blobs.blobs import ByteRange
    from penstock.blobs.place import Place

_MOST_AT_ONCE: Final = 128  # requests of a process
_MOST_TIMES: Final = 4  # a body that ends early is asked for; statuses are the library's
_FIRST_PAUSE_S: Final = 0.1
_CONNECT: Final = timedelta(seconds=5)
_ENDPOINTS: Final = {
    "s3": ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT"),
    "gs": ("GOOGLE_BASE_URL",),
    "az": ("AZURE_STORAGE_ENDPOINT", "AZURE_ENDPOINT"),
}
# What obstore says where the environment has no credentials, and the machine none either; or where
# they have not the form of any.
_NO_CREDENTIALS: Final = re.compile(
    r"/latest/api/token|source: (TokenRequest|MissingAccount|InvalidAccessKey|\w+Credentials)\b"
)
_STATUS: Final = re.compile(r"status code: (\d{3}[ \w]*)")
_CODE: Final = re.compile(r"<Code>(\w{1,60})</Code>")
_REFUSED: Final = ("401", "403")
_NO_LISTS: Final = ("404", "405", "501")
_NO_BUCKET: Final = re.compile(r"NoSuchBucket|ContainerNotFound|bucket does not exist")
# What obstore says of a request that got no answer, without address and headers.
_NO_ANSWER: Final = re.compile(
    r"(error sending request|error decoding response body|request or response body error|"
    r"connection \w+|dns error|timed? ?out)",
    re.IGNORECASE,
)
_CREDENTIALS: Final = {
    "s3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY (and AWS_SESSION_TOKEN)",
    "gs": "GOOGLE_APPLICATION_CREDENTIALS, the path of a file",
    "az": "AZURE_STORAGE_ACCOUNT_NAME and AZURE_STORAGE_ACCOUNT_KEY",
}


class Sessions:
    """What can be asked of object storage, on one event loop. All is read at the same time."""

    def __init__(self) -> None:
        """Begin without a connection."""
        self._stores: dict[Place, Any] = {}
        self._slots = asyncio.Semaphore(_MOST_AT_ONCE)

    def _store(self, place: Place) -> Any:  # noqa: ANN401
        store = self._stores.get(place)
        if store is None:
            store = self._stores[place] = _opened(place)
        return store

    async def read(self, place: Place, ranges: Sequence[ByteRange]) -> list[memoryview]:
        """Return bytes of objects."""
        requests, places = plan_requests(ranges)
        answers = await asyncio.gather(
            *(self.read_one(place, request) for request in requests), return_exceptions=True
        )
        views = []
        for wanted, (number, start) in zip(ranges, places, strict=True):
            answer = answers[number]
            if isinstance(answer, BaseException):
                raise answer
            stop = len(answer) if wanted.stop is None else start + wanted.stop - wanted.start
            if stop > len(answer):  # it was read to its end with another
                raise cut_off(wanted, place.address, max(0, len(answer) - start))
            views.append(answer[start:stop])
        return views

    async def read_one(self, place: Place, request: ByteRange) -> memoryview:
        """Return the bytes of one request, by several if it is a long one."""
        if request.start == request.stop:
            return memoryview(b"")
        parts = [self._answer(place, part) for part in parts_of(request)]
        if len(parts) == 1:
            return await parts[0]
        return memoryview(b"".join(await asyncio.gather(*parts)))

    async def _answer(self, place: Place, request: ByteRange) -> memoryview:
        name, start, stop, version = request
        options: Any = {}
        if stop is not None:
            options["range"] = (start, stop)
        elif start:
            options["range"] = {"offset": start}
        result, data = await self._repeated(place, name, options)
        if version and _blob(result.meta, name).version != version:
            raise changed_since(name, place.address)
        if len(data) != (result.meta["size"] if stop is None else stop) - start:
            raise cut_off(request, place.address, len(data))
        return data

    async def _repeated(self, place: Place, name: str, options: Any) -> tuple[Any, memoryview]:  # noqa: ANN401
        """Return obstore's result and its bytes; asked again if the answer breaks off."""
        end_s = time.monotonic() + place.timeout_s
        for number in itertools.count(1):
            async with self._slots:
                try:
                    result = await obstore.get_async(self._store(place), name, options=options)
                    return result, memoryview(await result.bytes_async())
                except Exception as error:
                    # What has a status, the library has asked for again and again itself.
                    is_broken = isinstance(error, exceptions.GenericError)
                    is_last = number == _MOST_TIMES or time.monotonic() > end_s
                    if not is_broken or is_last or _STATUS.search(str(error)):
                        raise _failure(error, place, name) from None
            await asyncio.sleep(_FIRST_PAUSE_S * 2**number)
        raise AssertionError("unreachable")

    async def stat(self, place: Place, name: str) -> Blob:
        """Return one object."""
        try:
            return _blob(await obstore.head_async(self._store(place), name), name)
        except Exception as error:
            raise _failure(error, place, name) from None

    async def list(self, place: Place, prefix: str, at_most: int | None) -> list[Blob]:
        """Return the objects whose names begin with `prefix`, by name."""
        # A prefix of the library's ends at a "/".
        folder = prefix.rpartition("/")[0]
        found = []
        try:
            async for batch in obstore.list(self._store(place), prefix=folder or None):
                found += [_blob(meta, meta["path"]) for meta in batch]
                if at_most is not None and len(found) >= at_most:
                    break
        except Exception as error:
            status = _STATUS.search(str(error))
            if place.address.startswith("http") and status and status[1][:3] in _NO_LISTS:
                raise StoreError(
                    f"{place.address} is on a web server, which lists no objects: name them, as "
                    "tar:https://HOST/{000..015}.tar, or pack them with `penstock pack` and copy "
                    "the store there."
                ) from None
            raise _failure(error, place, prefix) from None
        return sorted(blob for blob in found if blob.name.startswith(prefix))

    async def write(
        self, place: Place, name: str, data: bytes | memoryview, replaces: str | None
    ) -> None:
        """Put an object in its place."""
        if place.address.startswith("http"):
            raise StoreError(f"{place.address} is on a web server, and cannot be written to.")
        mode: Any = {"e_tag": replaces} if replaces else "overwrite"
        mode = "create" if replaces == "" else mode
        try:
            if replaces and place.address.startswith("gs:"):
                mode["version"] = await self._number(place, name, replaces)
            await obstore.put_async(self._store(place), name, data, mode=mode)
        except (exceptions.PreconditionError, exceptions.AlreadyExistsError):
            raise replaced(name, place.address) from None
        except Exception as error:
            raise _failure(error, place, name) from None

    async def _number(self, place: Place, name: str, version: str) -> str | None:
        """Return the number of an object, which Google compares at a write instead of the ETag."""
        with contextlib.suppress(FileNotFoundError):
            meta = await obstore.head_async(self._store(place), name)
            if _blob(meta, name).version == version:
                return meta["version"]
        raise replaced(name, place.address)

    async def delete(self, place: Place, name: str) -> None:
        """Take an object away."""
        try:
            await obstore.delete_async(self._store(place), name)
        except FileNotFoundError:  # so it is gone
            pass
        except Exception as error:
            raise _failure(error, place, name) from None


class Client:
    """Has sessions on the event loop of a thread; may be called by any other thread."""

    def __init__(self) -> None:
        """Start the thread."""
        self._sessions = Sessions()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="penstock-objects", daemon=True
        )
        self._thread.start()

    def call(self, place: Place, method: str, *arguments: Any) -> Any:  # noqa: ANN401
        """Return what a method of `Sessions` returns."""
        made = asyncio.run_coroutine_threadsafe(
            getattr(self._sessions, method)(place, *arguments), self._loop
        )
        try:
            return made.result()
        except BaseException:
            made.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _endpoint(place: Place) -> str:
    """Return where a server other than the cloud's own is; else ""."""
    names = _ENDPOINTS.get(place.address.partition(":")[0], ())
    return (names and place.endpoint) or next(filter(None, map(os.environ.get, names)), "")


def _opened(place: Place) -> Any:  # noqa: ANN401
    """Return obstore's client; it connects at its first request."""
    timeout = timedelta(seconds=place.timeout_s)
    scheme = place.address.partition(":")[0]
    own: dict[str, Any] = {}
    options: dict[str, Any] = {"timeout": timeout, "connect_timeout": min(timeout, _CONNECT)}
    if scheme == "http" or _endpoint(place).startswith("http:"):
        options["allow_http"] = True
    if scheme not in ("http", "https"):
        own = {"skip_signature": True} if place.anonymous else {}
        name = "base_url" if scheme == "gs" else "endpoint"
        own |= {name: place.endpoint} if place.endpoint else {}
        own |= {"region": place.region} if place.region else {}
    return from_url(  # type: ignore[call-overload]
        place.address,
        client_options=options,
        retry_config={"retry_timeout": timeout},
        **own,
    )


def _blob(meta: Any, name: str) -> Blob:  # noqa: ANN401
    size_bytes, etag = meta["size"], meta["e_tag"]
    if etag and not etag.endswith('"'):  # Azure's lists have it without
        etag = f'"{etag}"'
    return Blob(name, size_bytes, etag or f"{meta['last_modified']:%Y%m%dT%H%M%S}-{size_bytes}")


def _failure(error: Exception, place: Place, name: str) -> Exception:
    """Return what to say of an error. Its own text is left out: it may hold keys and signatures."""
    text, scheme = str(error).partition("Debug source")[0], place.address.partition(":")[0]
    status = _STATUS.search(text)
    said = f" ({status[1].strip()})" if status else ""
    code = _CODE.search(text)
    said = said.replace(")", f", {code[1]})") if said and code else said
    what = f"{name!r} in {place.address}" if name else place.address
    if isinstance(error, StoreError):
        return error
    if _NO_BUCKET.search(text):
        return StoreError(f"there is no such bucket: {place.address}{said}.")
    if isinstance(error, FileNotFoundError):
        return not_found(name, place.address)
    has_none = _NO_CREDENTIALS.search(str(error))
    if has_none or (status and status[1][:3] in _REFUSED):
        if scheme not in _CREDENTIALS:
            return StoreError(f"the server refuses {what}{said}.")
        why = f"refuses {repr(name) if name else 'a list'}{said}"
        if code and code[1] == "RequestTimeTooSkewed":
            return StoreError(
                f"{place.address} {why}: the server's clock and this machine's "
                "differ too much for a signature. Set this machine's, by NTP."
            )
        why = "was given no credentials, or none that are whole" if has_none else why
        names = _CREDENTIALS[scheme]
        return StoreError(
            f"{place.address} {why}. Credentials are taken from the environment: {names}. A public "
            "bucket is opened with anonymous=True, by commands with the variable "
            # Not NAME=true, of which commands would mask the value as a secret.
            f"{names.partition('_')[0]}_SKIP_SIGNATURE, set to true."
        )
    if isinstance(error, exceptions.NotSupportedError) and "ange" in text:
        return StoreError(
            f"the server of {place.address} answers a request for a part of {name!r} with all of "
            "it: it serves no ranges. Copy the data to a server that does, or to this machine."
        )
    if isinstance(error, exceptions.NotSupportedError):
        return StoreError(f"the server of {place.address} does not do this ({name!r}).")
    if status:
        times = ", asked again and again" if status[1][0] == "5" or status[1][:3] == "429" else ""
        return StoreError(f"{what} cannot be read: the server says{said}{times}.")
    found = _NO_ANSWER.search(text)
    why = found[1] if found else type(error).__name__
    if "kind: Connect" in str(error):
        server = without_password(_endpoint(place))
        why = f"no connection to {server}" if server else "no connection"
    return StoreUnreachable(
        f"{what} did not come within {place.timeout_s:g} s or {_MOST_TIMES} attempts: {why}."
    )
