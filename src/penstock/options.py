# SPDX-License-Identifier: Apache-2.0
"""A loader's arguments about how it runs, checked once, and the plan that follows from them."""

from __future__ import annotations

import multiprocessing
import threading
from dataclasses import KW_ONLY, InitVar, dataclass, field
from typing import TYPE_CHECKING, Any, Final

from penstock.engine.backends import BACKENDS, traits_of
from penstock.engine.plan import Plan, WorkerSpec
from penstock.errors import ConfigError
from penstock.faults import FaultPolicy, policy_of
from penstock.indices import covers
from penstock.insight.budgets import Limits
from penstock.randomness.keys import checked_count

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from multiprocessing.context import BaseContext

    from penstock.distributed import Rank
    from penstock.engine.backends.ray.cluster import RayOptions
    from penstock.engine.plan import Framework
    from penstock.transport.page_lock import PageLock

__all__ = ["LoaderOptions", "plan_of"]

_MODES: Final = ("auto", "light", "full")


@dataclass(frozen=True)
class LoaderOptions:
    """Arguments of both loaders about how they run; see `penstock.Loader`.

    Attributes:
        is_iterable: Whether the dataset is iterable.
        backend: Name of the backend; "thread" also where the context's processes are threads.
        context: Context that `multiprocessing_context` means.
        faults: Policy that `on_error` means.
        limits: Budgets of cores and memory.
        backend_options: Options of the backend; see `penstock.engine.plan.Plan`.

    Raises:
        ConfigError: an argument is out of its range, or contradicts another.
        MissingExtraError: the backend needs a package that is not installed.
        TypeError: an argument is of the wrong type.
    """

    dataset: InitVar[object]
    _: KW_ONLY
    is_iterable: bool
    num_workers: Any = 0
    timeout: float = 0
    multiprocessing_context: str | BaseContext | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    seed: int | None = None
    global_rng: bool = True
    on_error: str | FaultPolicy = "raise"
    backend: str = "process"
    cpu_budget: float | None = None
    memory_budget: int | None = None
    progress: bool | str = False
    monitor: str = "auto"
    ray_options: Mapping[str, Any] | None = None
    address: str | None = None
    context: BaseContext | None = field(init=False)
    faults: FaultPolicy = field(init=False)
    limits: Limits = field(init=False)
    backend_options: RayOptions | None = field(init=False)

    def __post_init__(self, dataset: object) -> None:
        """Check the arguments, and set the attributes that follow from them."""
        if self.seed is not None:
            checked_count("seed", self.seed)
        elif not self.global_rng:
            raise ConfigError(
                "global_rng=False says that seed= is for penstock.sample_rng() alone, and there is "
                "no seed: give one"
            )
        found = vars(self)  # the class is frozen
        found["faults"] = policy_of(self.on_error)
        for name, names in (("backend", tuple(BACKENDS)), ("monitor", _MODES)):
            if found[name] not in names:
                raise ConfigError(f"{name} must be one of {names}, got {found[name]!r}")
        found["backend"] = self._meant_backend()
        self._check_auto(dataset)
        found["limits"] = Limits(self.cpu_budget, self.memory_budget)
        if not isinstance(self.progress, bool | str):
            raise TypeError(
                f"progress must be True, False, or the bar's name, got {self.progress!r}"
            )
        self._check_workers(1 if self.is_auto else self.num_workers)
        found["backend_options"] = self._checked_ray()
        found["context"] = self._meant_context()

    def _checked_ray(self) -> RayOptions | None:
        if self.backend != "ray" and self.ray_options is None and self.address is None:
            return None
        from penstock.engine.backends.ray.cluster import check_actor_options, checked_options

        ray = checked_options(self.backend, self.ray_options, self.address)
        if ray is not None and self.num_workers > 0:  # else none of Ray is needed
            check_actor_options(ray)
        return ray

    @property
    def is_auto(self) -> bool:
        """Whether the number of workers is chosen while the loader runs."""
        return bool(self.num_workers == "auto")

    def _meant_backend(self) -> str:
        """Return the backend: a context whose processes are threads asks for threads.

        torch's loader starts whatever `context.Process` is, and MONAI's `ThreadDataLoader` lets
        that be a thread.
        """
        traits, context = traits_of(self.backend), self.multiprocessing_context
        process = getattr(context, "Process", None)
        is_thread = isinstance(process, type) and issubclass(process, threading.Thread)
        if is_thread and traits.is_local:
            return "thread"
        if context is not None and not traits.has_start_method:
            raise ConfigError(
                f"multiprocessing_context={context!r} says how worker processes start, got "
                f"backend={self.backend!r}; leave one of the two out"
            )
        return self.backend

    def _check_auto(self, dataset: object) -> None:
        if self.is_auto and self.is_iterable:
            raise ConfigError(
                'num_workers="auto" needs a map-style dataset: what each worker reads of '
                f"{type(dataset).__name__}, an iterable one, depends on their number, so it cannot "
                "change while training runs. Give a number; `penstock tune` finds it."
            )
        if self.is_auto and not traits_of(self.backend).is_local:
            raise ConfigError(
                'num_workers="auto" counts the cores and the memory of this machine, and '
                f'backend="{self.backend}" starts workers on others. Give a number: a worker takes '
                "one core of the cluster, unless ray_options says otherwise."
            )
        if not self.is_auto and (self.cpu_budget is not None or self.memory_budget is not None):
            raise ConfigError(
                'cpu_budget and memory_budget are limits of num_workers="auto", got num_workers='
                f"{self.num_workers!r}"
            )

    def _check_workers(self, num_workers: Any) -> None:  # noqa: ANN401 - whatever the user gave
        timeout, prefetch_factor = self.timeout, self.prefetch_factor
        if not hasattr(num_workers, "__index__"):  # numpy's integers are welcome
            raise TypeError(f'num_workers must be an int or "auto", got {num_workers!r}')
        if num_workers < 0:
            raise ConfigError(
                f"num_workers option should be non-negative, got {num_workers}; use num_workers=0 "
                "to load in this process"
            )
        try:
            is_timeout = timeout >= 0
        except TypeError:
            raise TypeError(f"timeout must be a number of seconds, got {timeout!r}") from None
        if not is_timeout:
            raise ConfigError(
                f"timeout option should be non-negative, got {timeout}; it is in seconds, and 0 "
                "waits for ever"
            )
        if prefetch_factor is not None and num_workers == 0:
            raise ConfigError(
                "prefetch_factor option could only be specified in multiprocessing, got "
                f"{prefetch_factor} with num_workers=0; let num_workers > 0, or leave "
                "prefetch_factor None"
            )
        if prefetch_factor is not None and prefetch_factor < 1:
            raise ConfigError(
                f"prefetch_factor option should be at least 1, got {prefetch_factor}; it counts "
                "batches per worker"
            )
        if num_workers > 0:
            return
        if self.persistent_workers:
            raise ConfigError(
                "persistent_workers option needs num_workers > 0, got num_workers=0; leave it "
                "False or add workers"
            )
        if timeout > 0:
            raise ConfigError(
                f"timeout={timeout} needs workers to wait for, got num_workers=0; let num_workers "
                "> 0, or timeout=0"
            )

    def _meant_context(self) -> BaseContext | None:
        context = self.multiprocessing_context
        if not isinstance(context, str):
            return context
        methods = multiprocessing.get_all_start_methods()
        if context not in methods:
            raise ConfigError(
                f"multiprocessing_context option should specify a valid start method in {methods}, "
                f"got {context!r}"
            )
        return multiprocessing.get_context(context)


def plan_of(
    loader: Any,  # noqa: ANN401 - of either kind
    base_seed: int,
    *,
    collate_fn: Callable[[Any], Any] | None,
    global_rng: bool,
    rank: Rank,
    framework: Framework | None = None,
    page_lock: PageLock | None = None,
) -> Plan:
    """Return the plan of an iterator, by the loader's options and its present attributes.

    Args:
        loader: Loader of the iterator.
        base_seed: Base seed of the workers; see `Plan`.
        collate_fn: Collate function; see `WorkerSpec`, also for those below.
        global_rng: Whether the seed also decides what the global generators give.
        rank: Rank of this process among those that share an iterable.
        framework: Framework whose tensors the default collate makes.
        page_lock: Lock of the slots; see `Plan`.
    """
    options, monitor = loader._options, loader._monitor
    spec = WorkerSpec(
        dataset=loader.dataset,
        is_iterable=options.is_iterable,
        is_batched=loader.batch_sampler is not None,
        collate_fn=collate_fn,
        drop_last=loader.drop_last,
        worker_init_fn=loader.worker_init_fn,
        framework=framework,
        seed=loader._seed,
        global_rng=global_rng,
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
