# SPDX-License-Identifier: Apache-2.0
"""What a loader was told about Ray: where its cluster is, and what each worker asks for."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from penstock.errors import ConfigError

__all__ = ["RayOptions", "check_pool", "checked_options"]

_NUM_CPUS: Final = 1
# Of what `Actor.options` takes: what the engine decides, which counts on each of these.
_OURS: Final = {
    "name": "workers are numbered, not named",
    "namespace": "workers are numbered, not named",
    "get_if_exists": "workers are numbered, not named",
    "lifetime": "workers live as long as their loader; a pool's outlive it",
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


@dataclass(frozen=True, slots=True)
class RayOptions:
    """Where workers come from, and what each of them asks of the cluster.

    Attributes:
        address: Of the cluster; None leaves it to Ray.
        pool: Name of the shared pool whose workers are used; None: the loader starts its own.
        actor: For Ray's `Actor.options`, "num_cpus" always among them; empty with a pool, whose
            workers exist. It may hold tokens (`runtime_env`), so no text shows its values.
    """

    address: str | None = None
    pool: str | None = None
    actor: Mapping[str, Any] = field(default_factory=dict, repr=False)


def checked_options(
    backend: str, ray_options: Mapping[str, Any] | None, address: str | None
) -> RayOptions | None:
    """Return what the arguments of a loader mean; None for another backend than "ray".

    Args:
        backend: As given.
        ray_options: As given: "pool", or options of Ray's `Actor.options`.
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
    if ray_options is None:
        return RayOptions(address, None, {"num_cpus": _NUM_CPUS})
    if not isinstance(ray_options, Mapping):
        raise TypeError(
            "ray_options is a mapping of option names to values, as {'num_cpus': 2}, got "
            f"{type(ray_options).__name__}"
        )
    given = dict(ray_options)
    for key in given:
        if not isinstance(key, str):
            raise TypeError(f"keys of ray_options are texts, got {key!r}")
        if key in _OURS:
            raise ConfigError(
                f"ray_options may not hold {key!r}, which the loader decides: {_OURS[key]}"
            )
    if "pool" in given:
        return RayOptions(address, _checked_pool(given), {})
    for key, value in given.items():
        _check_value(key, value)
    return RayOptions(address, None, {"num_cpus": _NUM_CPUS, **given})


def check_pool(options: RayOptions | None, *, is_seeded: bool, is_auto: bool) -> None:
    """Raise if a loader cannot share workers with others.

    Raises:
        ConfigError: it has no seed, or a number of workers that changes.
    """
    if options is None or options.pool is None:
        return
    if not is_seeded:
        raise ConfigError(
            f"the workers of the pool {options.pool!r} and their global random generators serve "
            "several trainers in turn, so what samples draw has to be decided by a seed: give seed="
        )
    if is_auto:
        raise ConfigError(
            f'num_workers="auto" starts and ends workers, and those of the pool {options.pool!r} '
            "are there for all its trainers: give a number"
        )


def _check_address(address: object) -> None:
    if address is not None and not isinstance(address, str):
        raise TypeError(
            'address is a text, as "auto", "local" or "10.0.0.1:6379", got '
            f"{type(address).__name__}"
        )
    if address == "":
        raise ConfigError('address is empty; leave it out, or give "auto", "local" or "host:port"')


def _checked_pool(given: dict[str, Any]) -> str:
    pool = given.pop("pool")
    if not isinstance(pool, str):
        raise TypeError(f"ray_options['pool'] is the pool's name, got {type(pool).__name__}")
    if not pool.strip():
        raise ConfigError(f"ray_options['pool'] is the pool's name, got {pool!r}")
    if given:
        raise ConfigError(
            f"ray_options names the pool {pool!r}, whose workers have started with options of its "
            f"own, and also {', '.join(map(repr, given))}; give those to the pool"
        )
    return pool


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
