# SPDX-License-Identifier: Apache-2.0
"""What a loader was told about Ray, the connection to its cluster, and what that has.

There is one connection per process, made at first need, or the user's own.

Guarantees:
    What Ray raises on connecting becomes a ConfigError with the cause and what to do.
    No text shows a value of `ray_options` other than amounts: `runtime_env` may hold tokens.
Assumptions:
    Whoever connects disconnects: the user's `ray.shutdown()`, or Ray's own at exit. Other loaders
    of this process may use the connection, so nothing here ends one that has been made.
"""

from __future__ import annotations

import contextlib
import ipaddress
import math
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.errors import ConfigError, MissingExtraError
from penstock.optional import install_command
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import ModuleType

__all__ = [
    "RayOptions", "check_actor_options", "checked_options", "connect", "is_node_dead",
    "what_is_free",
]  # fmt: skip

_NUM_CPUS: Final = 1
# Of what `Actor.options` takes: what the engine decides, which counts on each of these.
_OURS: Final = {
    "name": "workers are numbered, not named",
    "namespace": "workers are numbered, not named",
    "get_if_exists": "workers are numbered, not named",
    "lifetime": "workers live as long as their loader",
    "max_restarts": "dead workers are replaced as on_error says",
    "max_task_retries": "dead workers are replaced as on_error says",
    "max_concurrency": "a worker makes one batch at a time",
    "concurrency_groups": "a worker makes one batch at a time",
    "max_pending_calls": "prefetch_factor says how many batches are under way",
    "allow_out_of_order_execution": "a worker makes its batches in order",
    "enable_tensor_transport": "batches come through Ray's object store",
}
_QUANTITIES: Final = ("num_cpus", "num_gpus", "memory", "object_store_memory")
_MAPPINGS: Final = ("resources", "runtime_env", "label_selector")
_TEXTS: Final = ("accelerator_type",)
_ANY: Final = (None, "auto", "local")  # addresses that any connection satisfies
# To the cluster's port. Ray by itself asks for up to a minute before it says that nobody answers.
_PATIENCE_S: Final = 10.0
_BINDING: Final = ("scheduling_strategy", "label_selector", "accelerator_type")
_VERSIONS: Final = re.compile(r"Ray: (\S+)\s+Python: (\S+)")

_lock = threading.Lock()
_forked_while_connected = False


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where the cluster is, and what each worker asks of it.

    Attributes:
        address: Of the cluster; None leaves it to Ray.
        actor: For Ray's `Actor.options`, "num_cpus" always among them. It may hold tokens
            (`runtime_env`), so no text shows its values.
    """

    address: str | None = None
    actor: Mapping[str, Any] = field(default_factory=dict, repr=False)


def checked_options(
    backend: str, ray_options: Mapping[str, Any] | None, address: str | None
) -> RayOptions | None:
    """Return what the arguments of a loader mean; None for another backend than "ray".

    Args:
        backend: As given.
        ray_options: As given: options of Ray's `Actor.options`.
        address: As given.

    Raises:
        ConfigError: an argument without `backend="ray"`, an option that is Penstock's to decide, or
            a value that cannot be meant.
        TypeError: what is no mapping, or no text.
    """
    if backend != "ray":
        for name, value in (("ray_options", ray_options), ("address", address)):
            if value is not None:
                raise ConfigError(
                    f'{name} is for workers that are Ray actors, backend="ray", got '
                    f"backend={backend!r}; leave one of the two out"
                )
        return None
    _check_address(address)
    if not isinstance(ray_options, Mapping | None):
        raise TypeError(
            "ray_options is a mapping of option names to values, as {'num_cpus': 2}, got "
            f"{type(ray_options).__name__}"
        )
    given = dict(ray_options or {})
    for key, value in given.items():
        if not isinstance(key, str):
            raise TypeError(f"keys of ray_options are texts, got {key!r}")
        if key in _OURS:
            raise ConfigError(
                f"ray_options may not hold {key!r}, which the loader decides: {_OURS[key]}"
            )
        _check_value(key, value)
    return RayOptions(address, {"num_cpus": _NUM_CPUS, **given})


def _check_address(address: object) -> None:
    if address is not None and not isinstance(address, str):
        raise TypeError(
            'address is a text, as "auto", "local" or "10.0.0.1:6379", got '
            f"{type(address).__name__}"
        )
    if address == "":
        raise ConfigError('address is empty; leave it out, or give "auto", "local" or "host:port"')


def _check_value(key: str, value: object) -> None:
    """Raise for what cannot be meant; what Ray alone knows, it is asked when it is loaded."""
    if value is None:  # Ray's word for its own default
        return
    if key in _QUANTITIES:
        _check_quantity(f"ray_options[{key!r}]", value)
    elif key in _TEXTS and not isinstance(value, str):
        raise TypeError(f"ray_options[{key!r}] is a text, got {type(value).__name__}")
    elif key in _MAPPINGS:
        if not isinstance(value, Mapping):
            raise TypeError(f"ray_options[{key!r}] is a mapping, got {type(value).__name__}")
        if key == "resources":
            for name, quantity in value.items():
                _check_quantity(f"ray_options['resources'][{name!r}]", quantity)


def _check_quantity(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is a number, got {type(value).__name__}")
    if not (math.isfinite(value) and value >= 0):
        raise ConfigError(f"{name} is a number from 0 on, got {value!r}")


def _load_ray() -> ModuleType:
    """Return the module `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError(
            'backend="ray" needs Ray, which cannot be imported here '
            f"({error}). Install it with: {install_command('ray')}"
        ) from error
    module: ModuleType = ray
    return module


def check_actor_options(options: RayOptions) -> None:
    """Raise if Ray does not take the options for an actor; needs no connection.

    Raises:
        ConfigError: it does not; the message names the option.
        MissingExtraError: Ray is not installed.
    """
    ray = _load_ray()
    if _refusal(ray, options.actor) is None:
        return
    for key, value in options.actor.items():
        refusal = _refusal(ray, {key: value})
        if refusal is not None:
            # `runtime_env` may hold tokens, and what Ray says of it may quote them.
            said = "" if key == "runtime_env" else f": {refusal}"
            raise ConfigError(
                f"Ray {ray.__version__} does not take ray_options[{key!r}] for an actor{said}"
            ) from None
    raise ConfigError(
        f"Ray {ray.__version__} does not take these ray_options together for an actor: "
        f"{', '.join(options.actor)}"
    )


def _refusal(ray: ModuleType, actor: Mapping[str, Any]) -> str | None:
    class Nobody:
        pass

    try:
        ray.remote(Nobody).options(**actor)
    except Exception as error:  # Ray's ValueError or TypeError, or what its validator trips over
        return f"{type(error).__name__}: {error}"
    return None


def connect(options: RayOptions) -> ModuleType:
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
        _refuse_forked()
        if ray.is_initialized():
            if ray.util.client.ray.is_connected():
                raise _no_client("this process is connected through Ray Client")
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


os.register_at_fork(after_in_child=_note_fork)


def _refuse_forked() -> None:
    if _forked_while_connected:
        raise ConfigError(
            f"this process ({os.getpid()}) was forked from one that was connected to Ray, and the "
            'connection does not survive a fork. Start it by "spawn" or "forkserver", or connect '
            "to Ray only after the fork."
        )


def _no_client(what: str) -> ConfigError:
    return ConfigError(
        f"{what}, which has no object store here and copies everything through one proxy: it is no "
        "way for batches. Run the main process on a node of the cluster, by `ray job "
        'submit` or after `ray start --address=...` on its machine, and give address="auto".'
    )


def _check_same_cluster(ray: ModuleType, address: str | None) -> None:
    if address is None or address in _ANY:
        return
    connected = ray.get_runtime_context().gcs_address
    if "://" in address:
        raise _no_client(f"address {without_password(address)!r} is that of a Ray Client server")
    if not _is_same(address, connected, ray.util.get_node_ip_address()):
        raise ConfigError(
            f"this process is connected to the Ray cluster at {connected}, got address="
            f"{without_password(address)!r}. A process has one cluster: leave address out, or call "
            "ray.shutdown() first."
        )


def _is_same(address: str, connected: str, here: str) -> bool:
    """Whether two addresses, which may name a host in two ways, are those of one cluster."""
    if address == connected:
        return True
    host, port = _host_and_port(address)
    other_host, other_port = _host_and_port(connected)
    return port == other_port and not _ips(host, here).isdisjoint(_ips(other_host, here))


def _ips(host: str, here: str) -> set[str]:
    try:
        found = {str(snapshot[4][0]) for snapshot in socket.getaddrinfo(host, None)}
    except OSError:
        return {host}
    is_here = any(ipaddress.ip_address(ip.partition("%")[0]).is_loopback for ip in found)
    return found | {here} if is_here else found


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        raise ConfigError(
            f"{without_password(address)!r} is no address of a Ray cluster; give "
            '"host:port", as "10.0.0.1:6379", "auto" or "local"'
        )
    return host.strip("[]"), int(port)


def _init(ray: ModuleType, address: str | None) -> None:
    meant = address
    if address in (None, "auto"):
        meant = os.environ.get("RAY_ADDRESS") or address  # as Ray does
    if meant is not None and "://" in meant:
        raise _no_client(f"address {without_password(meant)!r} is that of a Ray Client server")
    if meant is not None and meant not in _ANY:
        _knock(meant)
    elif meant != "local":
        _knock_at_noted(ray)
    try:
        with _users_sigterm():
            # The dashboard is for one that is started here; a cluster's own stays as it is.
            ray.init(address=address, include_dashboard=False, logging_level="WARNING")
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        ray.shutdown()  # what was half made; it says nothing where there is none
        raise _notified(error, meant) from error


def _knock_at_noted(ray: ModuleType) -> None:
    """See whether the cluster is there that this machine has a note of; Ray tries for minutes."""
    noted = ray._private.utils.read_ray_address()
    if not noted:
        return
    try:
        _knock(noted)
    except ConfigError as error:
        raise ConfigError(
            "this machine has a note (ray_current_cluster in Ray's temporary folder, /tmp/ray) of "
            f"a Ray cluster at {noted}, where nothing answers: it has ended without `ray stop`. "
            'Delete that file, start the cluster, name another address, or give address="local".'
        ) from error


def _knock(address: str) -> None:
    try:
        socket.create_connection(_host_and_port(address), timeout=_PATIENCE_S).close()
    except OSError as error:
        raise ConfigError(
            f"no Ray cluster can be reached at {without_password(address)}: {error}. The address "
            "is that of its head node, with the port of `ray start --head` (6379 unless told)."
        ) from error


@contextlib.contextmanager
def _users_sigterm() -> Iterator[None]:
    """Keep what the user does on SIGTERM: Ray puts a handler of its own in its place."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        is_ours_to_set = threading.current_thread() is threading.main_thread()
        if is_ours_to_set and callable(before):
            signal.signal(signal.SIGTERM, before)


def _notified(error: BaseException, address: str | None) -> ConfigError:
    where = "started here" if address in (None, "local") else f"at {without_password(str(address))}"
    versions = _VERSIONS.findall(_chain(error)) if "ersion mismatch" in _chain(error) else []
    if len(versions) == 2:
        (theirs, their_python), (ours, our_python) = versions
        wanted = [f"ray=={theirs}"] if theirs != ours else []
        wanted += [f"Python {their_python}"] if their_python != our_python else []
        return ConfigError(
            f"the Ray cluster {where} runs Ray {theirs} on Python {their_python}, this process Ray "
            f"{ours} on Python {our_python}; they have to be the same. Use {' and '.join(wanted)} "
            "here, or start the cluster with the versions of here."
        )
    if address == "auto":
        return ConfigError(
            'address="auto" looks for a Ray cluster on this machine, and none was found: '
            f"{_first_line(error)}. Start one with `ray start`, name its address, or leave address "
            "out to have one started."
        )
    return ConfigError(
        f"the Ray cluster {where} cannot be used: {type(error).__name__}: {_first_line(error)}"
    )


def _chain(error: BaseException | None) -> str:
    said = []
    while error is not None:
        said.append(str(error))
        error = error.__cause__
    return "\n".join(said)


def _first_line(error: BaseException) -> str:
    return without_password(str(error).strip().partition("\n")[0].rstrip("."))


def is_node_dead(ray: ModuleType, node_id: str) -> bool:
    """Return whether the cluster has given up the node.

    Args:
        ray: The module, connected.
        node_id: In hexadecimal, as `ray.get_runtime_context().get_node_id()` tells it.
    """
    return any(node["NodeID"] == node_id and not node["Alive"] for node in ray.nodes())


def what_is_free(ray: ModuleType, options: RayOptions) -> str:
    """Return in a sentence what a worker asks for, what the cluster has of it, and what is free.

    Args:
        ray: The module, connected.
        options: Of workers that wait for a place.
    """
    total, free = ray.cluster_resources(), ray.available_resources()
    wanted = _amounts(options.actor)
    names = [*wanted, *(name for name in ("CPU",) if name not in wanted)]
    asked = ", ".join(_amount(name, amount) for name, amount in wanted.items())
    has = ", ".join(_amount(name, total.get(name, 0)) for name in names)
    left = ", ".join(_amount(name, free.get(name, 0)) for name in names)
    bound = [key for key in _BINDING if options.actor.get(key) is not None]
    by = f", and {' and '.join(bound)} may bind it to a machine" if bound else ""
    return f"each asks for {asked or 'nothing'}{by}; the cluster has {has}; free are {left}."


def _amounts(actor: Mapping[str, Any]) -> dict[str, float]:
    """Return what an actor with these options takes, by Ray's names of resources."""
    named = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
    amounts = {name: actor.get(option) for name, option in named.items()}
    amounts.update(actor.get("resources") or {})
    if (kind := actor.get("accelerator_type")) is not None:
        amounts[f"accelerator_type:{kind}"] = 0.001  # as Ray itself asks for one
    return {name: amount for name, amount in amounts.items() if amount}


def _amount(name: str, amount: float) -> str:
    if name in ("memory", "object_store_memory"):
        return f"{amount / 2**30:.2f} GiB of memory"
    return f"{amount:g} {name}"
