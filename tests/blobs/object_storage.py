# SPDX-License-Identifier: Apache-2.0
"""A server of objects on loopback: S3's requests, and plain HTTP, that does wrong when told to.

It does what S3 does with the requests of a client that reads, writes, lists and deletes: path-style
addresses, ranges, ETags, lists in pages, uploads in parts. It checks who asks, not the signature.
Google's requests are those of S3, but for the condition of a write; of Azure's it knows all but
uploads in parts.

Reference:
    Amazon S3 API, https://docs.aws.amazon.com/AmazonS3/latest/API/.
    Google Cloud Storage XML API, https://cloud.google.com/storage/docs/xml-api/reference-headers.
    Azure Blob Storage REST API, https://learn.microsoft.com/rest/api/storageservices/.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import re
import socket
import threading
import uuid
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape

import pytest

from penstock.blobs.blobs import open_blobs

KEY_ID, SECRET = "AKIAWHOSEEVER", "a secret of this test"
_PAGE = 3  # objects in a list; S3 has 1,000


class ObjectServer(http.server.ThreadingHTTPServer):
    """Serves `contents` by "bucket/name".

    Attributes:
        contents: Of a bucket called "bucket"; and of "data", which anybody may read.
        faults: What goes wrong with the next requests, one for each; "" is nothing.
        requests: That came: method, path, and range as "bytes=0-9".
        etag: A text that makes each ETag another one.
        barrier: Of requests of which none is answered before all have come; or None.
    """

    daemon_threads = False  # they are waited for
    request_queue_size = 128  # connections of several workers at once

    def __init__(self, contents=()):
        super().__init__(("127.0.0.1", 0), _Handler)
        self.contents = dict(contents)
        self.faults = []
        self.requests = []
        self.etag = ""
        self.barrier = None
        self.uploads = {}

    @property
    def endpoint(self):
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def ranges(self):
        return [asked for _, _, asked in self.requests]

    def wait_for_clients(self):
        """Return when the threads of all connections have ended."""
        for thread in list(self._threads):
            thread.join(10)  # a test that fails may leave a client

    def etag_of(self, data):
        return f'"{hashlib.md5(data + self.etag.encode()).hexdigest()}"'

    def head_of(self, data):
        """Return what says which version of an object it is; the number is Google's."""
        etag = self.etag_of(data)
        return {"ETag": etag, "x-goog-generation": str(int(etag[1:13], 16))}


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # head and body in one piece

    def log_message(self, *_):
        pass

    def _begin(self):
        """Return path and query, unless that is all that comes of this request."""
        address = urlsplit(self.path)
        path = unquote(address.path).removeprefix("/")
        self._body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.server.requests.append((self.command, path, self.headers.get("Range", "")))
        if self.server.barrier is not None:
            self.server.barrier.wait()
        self._fault = self.server.faults.pop(0) if self.server.faults else ""
        if self._fault == "reset":
            self._break_off()
        elif self._fault.isdigit():
            self._refuse(int(self._fault), "Bad")
        elif self._fault == "clock":
            self._refuse(403, "RequestTimeTooSkewed")
        elif path.startswith("bucket/") and KEY_ID not in self.headers.get("Authorization", ""):
            self._refuse(403, "AccessDenied")
        elif path.partition("/")[0] not in ("bucket", "data"):
            self._refuse(404, "NoSuchBucket")
        else:
            return path, parse_qs(address.query, keep_blank_values=True)
        return None, None

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        path, query = self._begin()
        if path is None:
            return
        if "list-type" in query or query.get("comp") == ["list"]:
            self._list(query)
            return
        whole, asked = self.server.contents.get(path), self.headers.get("Range", "")
        if whole is None:
            self._refuse(404, "NoSuchKey")
            return
        body, status, head = whole, 200, self.server.head_of(whole)
        if asked and self._fault != "whole":
            first, last = asked.removeprefix("bytes=").split("-")
            body = whole[int(first) : int(last) + 1 if last else None]
            status = 206
            head["Content-Range"] = f"bytes {first}-{int(first) + len(body) - 1}/{len(whole)}"
            if not body:
                self._refuse(416, "InvalidRange")
                return
        self._answer(status, body, **head)

    def _list(self, query):
        (prefix,) = query.get("prefix", [""])
        (after,) = query.get("continuation-token") or query.get("marker") or [""]
        names = sorted(name.partition("/")[2] for name in self.server.contents)
        names = [name for name in names if name.startswith(prefix) and name > after]
        page, rest = names[:_PAGE], names[_PAGE:]
        if "comp" in query:
            self._list_for_azure(page, page[-1] if rest else "")
            return
        items = "".join(
            f"<Contents><Key>{escape(name)}</Key><Size>{len(data)}</Size>"
            f"<LastModified>2026-01-02T03:04:05.000Z</LastModified>"
            f"<ETag>{escape(self.server.etag_of(data))}</ETag></Contents>"
            for name in page
            for data in [self.server.contents[f"bucket/{name}"]]
        )
        token = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if rest else ""
        self._answer_xml(
            f"<ListBucketResult><IsTruncated>{str(bool(rest)).lower()}</IsTruncated>{token}{items}"
            "</ListBucketResult>"
        )

    def _list_for_azure(self, page, marker):
        items = "".join(
            f"<Blob><Name>{escape(name)}</Name><Properties>"
            "<Last-Modified>Fri, 02 Jan 2026 03:04:05 GMT</Last-Modified>"
            f"<Content-Length>{len(data)}</Content-Length>"
            "<Content-Type>application/octet-stream</Content-Type>"
            f"<Etag>{self.server.etag_of(data)[1:-1]}</Etag></Properties></Blob>"
            for name in page
            for data in [self.server.contents[f"bucket/{name}"]]
        )
        self._answer_xml(
            f"<EnumerationResults><Blobs>{items}</Blobs><NextMarker>{escape(marker)}</NextMarker>"
            "</EnumerationResults>"
        )

    def do_PUT(self):
        path, query = self._begin()
        if path is None:
            return
        if "uploadId" in query:
            self.server.uploads[query["uploadId"][0]][int(query["partNumber"][0])] = self._body
        elif not self._fits(path):
            self._refuse(412, "PreconditionFailed")
            return
        else:
            self.server.contents[path] = self._body
        status = 201 if "x-ms-blob-type" in self.headers else 200
        self._answer(status, b"", **self.server.head_of(self._body))

    def _fits(self, path):
        there = self.server.contents.get(path)
        number = self.headers.get("x-goog-if-generation-match")
        if number is not None:
            head = {} if there is None else self.server.head_of(there)
            return number == head.get("x-goog-generation", "0")
        if self.headers.get("If-None-Match") == "*":
            return there is None
        wanted = self.headers.get("If-Match")
        return wanted is None or (there is not None and wanted == self.server.etag_of(there))

    def do_POST(self):
        path, query = self._begin()
        if path is None:
            return
        if "uploads" in query:
            name = uuid.uuid4().hex
            self.server.uploads[name] = {}
            self._answer_xml(
                f"<InitiateMultipartUploadResult><UploadId>{name}</UploadId>"
                "</InitiateMultipartUploadResult>"
            )
        elif query.get("comp") == ["batch"]:
            names = re.findall(r"^DELETE /bucket/(\S+)", self._body.decode(), re.MULTILINE)
            answers = []
            for number, name in enumerate(map(unquote, names)):
                gone = self.server.contents.pop(f"bucket/{name}", None)
                status = "404 Not Found" if gone is None else "202 Accepted"
                answers.append(
                    f"--x\r\nContent-Type: application/http\r\nContent-ID: {number}\r\n\r\n"
                    f"HTTP/1.1 {status}\r\nx-ms-request-id: 1\r\n\r\n"
                )
            text = "".join(answers) + "--x--\r\n"
            self._answer(202, text.encode(), **{"Content-Type": "multipart/mixed; boundary=x"})
        elif "delete" in query:
            names = re.findall(r"<Key>(.*?)</Key>", self._body.decode())
            for name in names:
                self.server.contents.pop(f"bucket/{name}", None)
            done = "".join(f"<Deleted><Key>{name}</Key></Deleted>" for name in names)
            self._answer_xml(f"<DeleteResult>{done}</DeleteResult>")
        else:
            parts = self.server.uploads.pop(query["uploadId"][0])
            data = self.server.contents[path] = b"".join(parts[n] for n in sorted(parts))
            self._answer_xml(
                f"<CompleteMultipartUploadResult><ETag>{escape(self.server.etag_of(data))}</ETag>"
                "</CompleteMultipartUploadResult>"
            )

    def do_DELETE(self):
        path, _ = self._begin()
        if path is not None:
            self.server.contents.pop(path, None)
            self._answer(204, b"")

    def _refuse(self, status, code):
        # S3 shows the key with which a wrong signature was made.
        text = f"<Error><Code>{code}</Code><AWSAccessKeyId>{KEY_ID}</AWSAccessKeyId></Error>"
        self._answer(status, text.encode())

    def _answer_xml(self, text):
        self._answer(200, text.encode(), **{"Content-Type": "application/xml"})

    def _answer(self, status, body, **head):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Last-Modified", "Fri, 02 Jan 2026 03:04:05 GMT")
        for name, value in head.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: len(body) // 2] if self._fault == "cut" else body)
        if self._fault == "cut":
            self.wfile.flush()
            self._break_off()

    def _break_off(self):
        self.connection.shutdown(socket.SHUT_RDWR)
        self.close_connection = True


def put(address, files):
    """Write objects, by name."""
    with open_blobs(str(address)) as blobs:
        for name, data in files.items():
            blobs.write(name, data)


@pytest.fixture(scope="session")
def object_server():
    """Return a server for all tests; each uses names of its own."""
    pytest.importorskip("obstore")
    server = ObjectServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def bucket(object_server, monkeypatch):
    """Return an address in the bucket where nothing lies; the environment has the credentials."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", KEY_ID)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", SECRET)
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", object_server.endpoint)
    monkeypatch.setenv("GOOGLE_BEARER_TOKEN", KEY_ID)
    monkeypatch.setenv("GOOGLE_BASE_URL", object_server.endpoint)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", KEY_ID)
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_KEY", base64.b64encode(SECRET.encode()).decode())
    monkeypatch.setenv("AZURE_STORAGE_ENDPOINT", object_server.endpoint)
    object_server.faults, object_server.requests, object_server.etag = [], [], ""
    yield f"s3://bucket/{uuid.uuid4().hex}"
    object_server.wait_for_clients()
    object_server.contents.clear()


@pytest.fixture
def website(object_server):
    """Return the address of a place that anybody may read, with two objects."""
    contents = {"data/a": bytes(range(250)) * 40, "data/b": b"some bytes"}
    object_server.contents.update(contents)
    object_server.faults, object_server.requests, object_server.etag = [], [], ""
    yield f"{object_server.endpoint}/data"
    object_server.wait_for_clients()
    object_server.contents.clear()


class InBucket:
    """Makes a contract's suite one of stores in a bucket, of addresses that begin with `kind`."""

    @pytest.fixture(autouse=True)
    def _bucket(self, bucket):
        self.bucket = bucket

    def place(self, tmp_path):
        return f"{self.kind}:{self.bucket}"
