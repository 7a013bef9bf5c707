# SPDX-License-Identifier: Apache-2.0
"""A loader's arguments about how it runs, checked once, and the plan that follows from them."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.distributed import Rank, current_rank
from penstock.engine.backends import BACKENDS, traits_of
from penstock.engine.plan import Plan, WorkerSpec
from penstock.errors import ConfigError
from penstock.faults import FaultPolicy, policy_of
from penstock.indices import covers
from penstock.insight.budgets import Auto
from penstock.insight.monitor import AutoWorkers

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.context import BaseContext

    from penstock.engine.plan import Framework
    from penstock.transport.page_lock import PageLock

__all__ = ["Auto", "LoaderOptions", "Ray", "backend_name", "plan_of", "rank_of_shard"]

_MODES: Final = ("auto", "light", "full")
# The options of `Actor.options` that the engine decides, by on_error and prefetch_factor.
_DECIDED: Final = (
    "name", "lifetime", "max_restarts", "max_task_retries", "max_concurrency", "max_pending_calls",
)  # fmt: skip


@dataclass(frozen=True, init=False)
class Ray:
    """Workers that are Ray actors: a loader's `backend=`, with options.

    Attributes:
        address: Address of the cluster.
        actor: Options of Ray's `Actor.options`, always with "num_cpus". `repr` leaves them out, as
            `runtime_env` may hold tokens.

    Example:
        >>> Ray(address="auto", num_cpus=2, resources={"near": 1})
        Ray(address='auto')
    """

    address: str | None
    actor: Mapping[str, Any] = field(repr=False)

    def __init__(self, address: str | None = None, **actor: Any) -> None:  # noqa: ANN401
        """Set where the cluster is, and what each worker asks of it.

        Args:
            address: Address of the cluster, as "auto", "local" or "10.0.0.1:6379". None: the
                cluster that this process is connected to, or RAY_ADDRESS, or one that Ray starts.
            **actor: Options of Ray's `Actor.options`: num_cpus (1 unless given), num_gpus, memory,
                resources, scheduling_strategy, runtime_env. Ray checks them when a loader is made.

        Raises:
            ConfigError: an option that the loader decides.
        """
        for key in filter(actor.__contains__, _DECIDED):
            raise ConfigError(f"Ray may not hold {key!r}, which the loader decides: leave it out")
        vars(self).update(address=address, actor={"num_cpus": 1, **actor})


def backend_name(backend: Any) -> Any:  # noqa: ANN401 - what a user gave, perhaps a wrong type
    """Return the name in `BACKENDS` of a loader's argument `backend`."""
    return "ray" if isinstance(backend, Ray) else backend


@dataclass(frozen=True, kw_only=True)
class LoaderOptions:
    """Arguments of both loaders about how they run, checked; see `penstock.Loader`.

    Attributes:
        backend: Name of the backend; "thread" also where the context's processes are threads.
        given_backend: The same, or the `Ray` that was given.
        backend_options: Options of the backend; see `penstock.engine.plan.Plan`.
        context: Context that `multiprocessing_context` means.
        faults: Policy that `on_error` means.
        limits: Limits of "auto"; None where the number of workers is given.
    """

    is_iterable: bool
    num_workers: Any = 0
    timeout: float = 0
    multiprocessing_context: str | BaseContext | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    seed: int | None = None
    global_rng: bool = True
    on_error: str | FaultPolicy = "raise"
    backend: Any = "process"
    progress: bool | str = False
    monitor: str = "auto"
    given_backend: str | Ray = field(init=False)
    backend_options: Ray | None = field(init=False)
    context: BaseContext | None = field(init=False)
    faults: FaultPolicy = field(init=False)
    limits: Auto | None = field(init=False)

    def __post_init__(self) -> None:
        """Check the arguments, and set the attributes that follow from them."""
        if self.seed is None and not self.global_rng:
            raise ConfigError(
                "global_rng=False says that seed= is for penstock.sample_rng() alone, and there is "
                "no seed: give one"
            )
        found = vars(self)  # the class is frozen
        found["faults"] = policy_of(self.on_error)
        found["given_backend"] = self.backend
        found["backend"] = backend_name(self.backend)
        for name, names in (("backend", tuple(BACKENDS)), ("monitor", _MODES)):
            if found[name] not in names:
                raise ConfigError(f"{name} must be one of {names}, got {found[name]!r}")
        traits, context = traits_of(self.backend), self.multiprocessing_context
        methods = multiprocessing.get_all_start_methods()
        if isinstance(context, str) and context not in methods:
            raise ConfigError(
                f"multiprocessing_context option should specify a valid start method in {methods}, "
                f"got {context!r}"
            )
        # torch's loader starts whatever `context.Process` is: MONAI's gives threads.
        process = getattr(context, "Process", None)
        is_thread = isinstance(process, type) and issubclass(process, threading.Thread)
        if is_thread and traits.is_local:
            found["given_backend"] = found["backend"] = "thread"
        elif context is not None and not traits.has_start_method:
            raise ConfigError(
                f"multiprocessing_context={context!r} says how worker processes start, got "
                f"backend={self.backend!r}; leave one of the two out"
            )
        found["context"] = (
            multiprocessing.get_context(context) if isinstance(context, str) else context
        )
        found["limits"] = self._checked_auto()
        if self.limits is not None:
            found["num_workers"] = "auto"
        self._check_workers(1 if self.is_auto else self.num_workers)
        has_workers = self.is_auto or self.num_workers > 0
        if sys.platform == "win32" and has_workers and traits_of(self.backend).has_start_method:
            raise ConfigError(
                f'num_workers={self.num_workers} with backend="process" is not for Windows: worker '
                "processes are sent their memory over Unix sockets, which Python does not have "
                'there. Give backend="thread" or num_workers=0, or run the program in WSL2; see '
                "docs/guide/platforms.md."
            )
        found["backend_options"] = None
        if self.backend == "ray":
            ray = self.given_backend if isinstance(self.given_backend, Ray) else Ray()
            found["backend_options"] = ray
            if self.num_workers > 0:  # else none of Ray is needed
                from penstock.engine.backends.ray.cluster import check_actor_options

                check_actor_options(ray)

    @property
    def is_auto(self) -> bool:
        """Whether the number of workers is chosen while the loader runs."""
        return self.limits is not None

    def _checked_auto(self) -> Auto | None:
        """Return the limits that "auto", an `Auto` or another loader's number came with."""
        given: Any = self.num_workers
        if isinstance(given, AutoWorkers):
            given = given.limits
        elif isinstance(given, str) and given == "auto":
            given = Auto()
        if not isinstance(given, Auto):
            return None
        if self.is_iterable:
            raise ConfigError(
                'num_workers="auto" needs a map-style dataset: what each worker reads of an '
                "iterable one depends on their number. Give a number; `penstock tune` finds it."
            )
        if not traits_of(self.backend).is_local:
            raise ConfigError(
                'num_workers="auto" counts the cores and the memory of this machine, and '
                f'backend="{self.backend}" starts workers on others. Give a number.'
            )
        return given

    def _check_workers(self, num_workers: Any) -> None:  # noqa: ANN401 - whatever the user gave
        if not hasattr(num_workers, "__index__"):  # numpy's integers are welcome
            raise TypeError(f'num_workers must be an int, "auto" or an Auto, got {num_workers!r}')
        for name, value in (("num_workers", num_workers), ("timeout", self.timeout)):
            if not value >= 0:
                raise ConfigError(f"{name} option should be non-negative, got {value}")
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise ConfigError(
                f"prefetch_factor option should be at least 1, got {self.prefetch_factor}"
            )
        for name in ("prefetch_factor", "persistent_workers", "timeout"):
            value = getattr(self, name)
            if value and num_workers == 0:
                raise ConfigError(
                    f"{name} option needs num_workers > 0, got {name}={value} with num_workers=0"
                )


def rank_of_shard(seed: int | None) -> Rank:
    """Return which rank's share of a stream is read."""
    try:
        return current_rank()
    except ConfigError:
        if seed is None:
            return Rank(0, 1)  # torch does not read it; `shard` then has no ranks
        raise


def plan_of(
    loader: Any,  # noqa: ANN401 - of either kind
    base_seed: int,
    *,
    collate_fn: Callable[[Any], Any] | None,
    framework: Framework | None = None,
    page_lock: PageLock | None = None,
) -> Plan:
    """Return the plan of an iterator, by the loader's options and its present attributes."""
    options, monitor = loader._options, loader._monitor
    rank = rank_of_shard(loader._seed) if options.is_iterable else Rank(0, 1)
    spec = WorkerSpec(
        dataset=loader.dataset,
        is_iterable=options.is_iterable,
        is_batched=loader.batch_sampler is not None,
        collate_fn=collate_fn,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        framework=framework,
        seed=loader._seed,
        global_rng=options.global_rng,
        batch_size=loader.batch_size,
        rank=rank.rank,
        world_size=rank.world_size,
        faults=options.faults,
        covers_dataset=covers(loader.dataset, loader.sampler, loader.batch_sampler),
    )
    num_workers, prefetch_factor = monitor.workers_of(loader.num_workers, loader.prefetch_factor)
    return Plan(
        spec=spec,
        base_seed=base_seed,
        num_workers=num_workers,
        backend=options.backend,
        max_workers=monitor.max_workers,
        prefetch_factor=prefetch_factor,
        in_order=loader.in_order,
        timeout_s=loader.timeout,
        keep_workers=loader.persistent_workers,
        context=loader.multiprocessing_context,
        page_lock=page_lock,
        backend_options=options.backend_options,
    )
