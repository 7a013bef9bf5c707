# SPDX-License-Identifier: Apache-2.0
"""Hosts that are network namespaces of this machine, on a switch whose cables can be pulled.

Each host has an interface, an address and a loopback of its own, and no way to another host but
the switch: a bridge in a namespace of its own. `Hosts.cut` takes a host's port out of the bridge.
Its packets then vanish both ways, as with a broken cable somewhere behind the host: its own
interface, addresses and routes stay as they are, and no one is noted. Files and shared memory are
the machine's, so each Ray node gets a folder and an object store of its own.

Needs root and iproute2, nothing else: `tc`'s netem is missing from some kernels.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from types import TracebackType

RAY = Path(sys.executable).with_name("ray")
GCS_PORT = 6379  # the namespace's own, so no one else has it
STORE_BYTES = 150 * 2**20
START_S = 90.0  # on an idle machine with 2 cores a node takes 2 to 3 s

ENVIRONMENT = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_AUTH_MODE": "disabled",  # no token file of the user's
}
_numbers = itertools.count()


@functools.cache
def why_not() -> str | None:
    """Say why hosts cannot be had here, or None where they can."""
    if os.geteuid() != 0:
        return f"network namespaces need root, this is user {os.geteuid()}"
    if shutil.which("ip") is None:
        return "network namespaces need the command `ip` of iproute2 (make network-deps)"
    try:
        with Hosts("a") as hosts:
            _ip("netns", "exec", hosts["a"].namespace, "true")
    except subprocess.CalledProcessError as error:
        return f"`{' '.join(error.cmd)}` failed: {error.stderr.strip()}"
    return None


@dataclass
class Host:
    """One namespace with one address, and the Ray node on it if there is one."""

    name: str
    namespace: str
    address: str
    node: subprocess.Popen[str] | None = None
    words: threading.Thread | None = None  # reads what the node prints
    folders: list[str] = field(default_factory=list)

    def pids(self) -> list[int]:
        return [int(pid) for pid in _ip("netns", "pids", self.namespace).split()]


class Hosts:
    """Hosts by name on one switch, with a Ray head on the first when asked for.

    Nothing is left of them afterwards: no process, namespace, interface or file.
    """

    def __init__(self, *names: str, env: Mapping[str, str] | None = None) -> None:
        self._prefix = f"penstock-{os.getpid()}-{next(_numbers)}"
        self._switch = f"{self._prefix}-switch"
        self._hosts = {
            name: Host(name, f"{self._prefix}-{name}", f"10.83.0.{number}")
            for number, name in enumerate(names, 1)
        }
        # What another cluster of this process has set is not for these.
        inherited = {k: value for k, value in os.environ.items() if not k.startswith("RAY_")}
        self.env = {**inherited, **ENVIRONMENT, **(env or {})}
        self._head: Host | None = None

    def __enter__(self) -> Hosts:
        try:
            _ip("netns", "add", self._switch)
            _ip("-n", self._switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
            _ip("-n", self._switch, "link", "set", "bridge", "up")
            for host in self._hosts.values():
                self._connect(host)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for host in self._hosts.values():
            self.kill(host.name)
        for namespace in (*(host.namespace for host in self._hosts.values()), self._switch):
            if (Path("/run/netns") / namespace).exists():
                _ip("netns", "del", namespace)  # its end of each cable goes with it

    def __getitem__(self, name: str) -> Host:
        return self._hosts[name]

    # The cables.

    def cut(self, name: str) -> None:
        """Let every packet from and to the host vanish."""
        _ip("-n", self._switch, "link", "set", f"to-{name}", "nomaster")

    def restore(self, name: str) -> None:
        _ip("-n", self._switch, "link", "set", f"to-{name}", "master", "bridge")

    # Ray's nodes.

    @property
    def ray_address(self) -> str:
        assert self._head is not None, "no Ray head was started"
        return f"{self._head.address}:{GCS_PORT}"

    def start_head(self, name: str, *, num_cpus: int = 0) -> None:
        self._head = self._hosts[name]
        self._start_node(
            self._head,
            "--head",
            f"--port={GCS_PORT}",
            f"--num-cpus={num_cpus}",
            "--include-dashboard=false",
        )

    def start_node(
        self, name: str, *, num_cpus: int, resources: Mapping[str, float] | None = None
    ) -> None:
        """Start a Ray node, also on a host whose last one was killed or gave up."""
        self._start_node(
            self._hosts[name],
            f"--address={self.ray_address}",
            f"--num-cpus={num_cpus}",
            f"--resources={json.dumps(dict(resources or {}))}",
        )

    def kill(self, name: str) -> None:
        """End every process on the host at once, as a power failure does. The link stays."""
        host = self._hosts[name]
        # Those that start while others are killed are found by the next look.
        while (Path("/run/netns") / host.namespace).exists() and (pids := host.pids()):
            _kill(pids)
        if host.node is not None:
            host.node.wait()
            if host.words is not None:
                host.words.join()  # before its file is closed
            assert host.node.stdout is not None
            host.node.stdout.close()
            host.node = host.words = None
        for folder in host.folders:
            shutil.rmtree(folder, ignore_errors=True)
        host.folders.clear()

    def popen(
        self, name: str, command: Sequence[str], *, pass_fds: Sequence[int] = ()
    ) -> subprocess.Popen[str]:
        """Start a program on the host; `ip netns exec` becomes it, so its pid is the program's."""
        return subprocess.Popen(
            ["ip", "netns", "exec", self._hosts[name].namespace, *command],
            env=self.env,
            pass_fds=pass_fds,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            text=True,
            start_new_session=True,  # a Ctrl-C in the terminal is pytest's, which then closes us
        )

    def _start_node(self, host: Host, *arguments: str) -> None:
        if host.node is not None:  # it gave up by itself: clear what is left of it
            self.kill(host.name)
        # Ray's sockets lie in it, and the path of a socket has to be short.
        folder = tempfile.mkdtemp(prefix="penstock-")
        host.folders.append(folder)
        host.node = self.popen(
            host.name,
            [
                str(RAY),
                "start",
                *arguments,
                f"--node-ip-address={host.address}",
                f"--temp-dir={folder}",
                f"--object-store-memory={STORE_BYTES}",
                "--disable-usage-stats",
                "--block",
            ],
        )
        host.words = _wait_for_line(host.node, "Ray runtime started")

    def _connect(self, host: Host) -> None:
        port = f"to-{host.name}"
        _ip("netns", "add", host.namespace)
        # Made inside the namespaces: no name that another test could have taken, nothing left.
        _ip(
            *("link", "add", port, "netns", self._switch, "type", "veth"),
            *("peer", "name", "eth0", "netns", host.namespace),
        )
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        _ip("-n", self._switch, "link", "set", port, "master", "bridge")
        _ip("-n", self._switch, "link", "set", port, "up")


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
    return done.stdout


def _kill(pids: Sequence[int]) -> None:
    """End the processes and wait until they are gone, whosever children they are."""
    descriptors = []
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            descriptors.append(os.pidfd_open(pid))
    for descriptor in descriptors:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    for descriptor in descriptors:
        select.select([descriptor], [], [])  # readable once it has ended
        os.close(descriptor)


def _wait_for_line(process: subprocess.Popen[str], text: str) -> threading.Thread:
    """Read what the process prints until a line has the text; return what reads the rest."""
    assert process.stdout is not None
    alarm = threading.Timer(START_S, process.kill)
    alarm.start()
    seen = []
    for line in process.stdout:
        seen.append(line)
        if text in line:
            break
    else:
        alarm.cancel()
        raise RuntimeError(
            f"`{' '.join(map(str, process.args))}` did not say {text!r}:\n{''.join(seen)}"
        )
    alarm.cancel()
    rest = threading.Thread(target=collections.deque, args=(process.stdout, 0), daemon=True)
    rest.start()
    return rest
