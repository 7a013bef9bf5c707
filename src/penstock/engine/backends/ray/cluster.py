# SPDX-License-Identifier: Apache-2.0
"""The connection to a Ray cluster, its resources, and what Ray says of a loader's options.

There is one connection per process, made at first need, or the user's own.

Guarantees:
    What Ray raises on connecting becomes a ConfigError with the cause and what to do.
    No text shows `runtime_env`, which may hold tokens.
Assumptions:
    The user's `ray.shutdown()`, or Ray's own at exit, ends the connection. Other loaders of this
    process may use it, so nothing here ends one that has been made.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING

from penstock.errors import ConfigError, MissingExtraError
from penstock.forks import at_fork
from penstock.optional import install_command
from penstock.redact import without_password

if TYPE_CHECKING:
    from types import ModuleType

    from penstock.options import Ray

_lock = threading.Lock()
_forked_while_connected = False


def _load_ray() -> ModuleType:
    """Return the module `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module("ray")
    except ImportError as error:
        raise MissingExtraError(
            'backend="ray" needs Ray, which cannot be imported here '
            f"({error}). Install it with: {install_command('ray')}"
        ) from error


def check_actor_options(options: Ray) -> None:
    """Raise if Ray does not take the options for an actor; needs no connection.

    Raises:
        ConfigError: it does not; the message names the option.
        MissingExtraError: Ray is not installed.
    """

    class Unstarted:  # no actor of it is made
        pass

    ray = _load_ray()
    for key, value in options.actor.items():
        try:
            ray.remote(Unstarted).options(**{key: value})
        except Exception as error:  # its ValueError or TypeError, or an error in its validator
            # `runtime_env` may hold tokens, and what Ray says of it may quote them.
            said = "" if key == "runtime_env" else f": {type(error).__name__}: {error}"
            raise ConfigError(
                f"Ray {ray.__version__} does not take Ray({key}=) for an actor{said}"
            ) from None


def connect(options: Ray) -> ModuleType:
    """Return `ray`, connected: by the connection there is, else by one to `options.address`.

    With address None, Ray honours RAY_ADDRESS, then takes a cluster that `ray start` started on
    this machine, then starts one of its own, which ends with this process.

    Raises:
        ConfigError: the address cannot be reached, or is another cluster's than this process is
            connected to; the versions of Ray or Python differ; Ray Client; a process forked from a
            connected one.
        MissingExtraError: Ray is not installed.

    Concurrency:
        Any thread; the first connects.
    """
    ray = _load_ray()
    with _lock:
        if _forked_while_connected:
            raise ConfigError(
                f"this process ({os.getpid()}) was forked from one that was connected to Ray, and "
                'the connection does not survive a fork. Start it by "spawn" or "forkserver", or '
                "connect to Ray only after the fork."
            )
        if ray.is_initialized():
            _check_same_cluster(ray, options.address)
        else:
            _init(ray, options.address)
    return ray


def _note_fork() -> None:
    """In a child: Ray's threads were not copied, so any call of it would wait for ever."""
    global _lock, _forked_while_connected
    _lock = threading.Lock()  # another thread of the parent may have held it
    ray = sys.modules.get("ray")
    if ray is not None and ray.is_initialized():
        _forked_while_connected = True


at_fork(after_in_child=_note_fork)


def survived_forks() -> bool:
    """Return whether this process was not forked from one that was connected to Ray."""
    return not _forked_while_connected


def _refuse_client(address: str) -> None:
    if "://" in address:
        raise ConfigError(
            f"address {without_password(address)!r} is that of a Ray Client server, which has no "
            "object store here and copies everything through one proxy: it is no way for batches. "
            "Run the main process on a node of the cluster, by `ray job submit` or after "
            '`ray start --address=...` on its machine, and give address="auto".'
        )


def _check_same_cluster(ray: ModuleType, address: str | None) -> None:
    if ray.util.client.ray.is_connected():
        _refuse_client("ray://")
    if address in (None, "auto", "local"):  # any connection will do
        return
    _refuse_client(address)
    connected = ray.get_runtime_context().gcs_address
    here = ray.util.get_node_ip_address()
    if _resolved(address, here) != _resolved(connected, here):
        raise ConfigError(
            f"this process is connected to the Ray cluster at {connected}, got address="
            f"{without_password(address)!r}. A process has one cluster: leave address out, or call "
            "ray.shutdown() first."
        )


def _resolved(address: str, here: str) -> str:
    """Return an address with the machine's IP in place of its name; `here` is this machine's."""
    host, _, port = address.rpartition(":")
    with contextlib.suppress(OSError):
        host = socket.gethostbyname(host)
    return f"{here if host.startswith('127.') else host}:{port}"


def _init(ray: ModuleType, address: str | None) -> None:
    # As Ray does; its own note of a cluster on this machine is none of Ray Client's.
    meant = os.environ.get("RAY_ADDRESS", "") if address in (None, "auto") else str(address)
    _refuse_client(meant)
    on_sigterm = signal.getsignal(signal.SIGTERM)
    try:
        # The dashboard is for one that is started here; a cluster's own stays as it is.
        ray.init(address=address, include_dashboard=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        ray.shutdown()  # what was half made; it says nothing where there is none
        said = f"address={address!r}: {type(error).__name__}: {' '.join(str(error).split())}"
        raise ConfigError(f"Ray cannot be used, {without_password(said)}") from error
    finally:
        # Keep the user's handler of SIGTERM, which Ray replaces by its own.
        if callable(on_sigterm) and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, on_sigterm)


def what_is_free(ray: ModuleType, options: Ray) -> str:
    """Return in a sentence what a worker asks for, what the cluster has of it, and what is free."""
    asked = {key: value for key, value in options.actor.items() if key != "runtime_env"}
    has, left = (
        ", ".join(f"{found[name]:g} {name}" for name in sorted(found) if ":" not in name)
        for found in (ray.cluster_resources(), ray.available_resources())
    )
    return f"each asks for {asked}; the cluster has {has}; free are {left}."
