# SPDX-License-Identifier: Apache-2.0
"""What programs for torch's loader ask and give where workers are threads."""

from __future__ import annotations

import queue
import threading
from multiprocessing.context import SpawnContext
from typing import TYPE_CHECKING, Any

import pytest
import torch
import torch.utils.data as theirs
from tests.torch.datasets_for_tests import Rows
from torch.utils.data import get_worker_info  # by its name, as programs have it

import penstock
import penstock.torch as ours
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class Calls(theirs.Dataset[Any]):
    """Sample i is `make(i)`."""

    def __init__(self, make: Callable[[int], Any], length: int = 12) -> None:
        self.make = make
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Any:
        return self.make(index)


def as_made(samples: list[Any]) -> list[Any]:
    return samples


def threads_over(dataset: Any, num_workers: int = 2, **options: Any) -> ours.DataLoader[Any]:
    options = {"collate_fn": as_made, "batch_size": 2, **options}
    return ours.DataLoader(dataset, num_workers=num_workers, backend="thread", **options)


def said(loader: Any) -> list[Any]:
    return [sample for batch in loader for sample in batch]


# Who am I


def test_torchs_function_answers_in_each_thread_and_the_main_process_is_no_worker() -> None:
    dataset = Calls(lambda index: (get_worker_info(), threading.current_thread().name))
    seen = []
    for batch in threads_over(dataset, num_workers=3):
        assert get_worker_info() is None
        seen += batch
    assert {name for _, name in seen} == {f"penstock-{info.id}" for info, _ in seen}
    assert {type(info) for info, _ in seen} == {theirs._utils.worker.WorkerInfo}
    assert {info.num_workers for info, _ in seen} == {3}
    assert len({info.seed - info.id for info, _ in seen}) == 1
    assert all(info.dataset is dataset for info, _ in seen)
    assert get_worker_info() is None


def test_ours_is_torchs_function() -> None:
    assert ours.get_worker_info is theirs.get_worker_info is get_worker_info


class DealtOut(theirs.IterableDataset[int]):
    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return iter(range(first, 12, step))


def test_a_stream_that_asks_torch_for_its_share_is_dealt_out() -> None:
    assert sorted(said(threads_over(DealtOut()))) == list(range(12))


def _own_id(_: int) -> int | None:
    info = get_worker_info()
    return None if info is None else info.id + 100 * info.num_workers


def test_a_process_worker_that_is_forked_afterwards_has_torchs_answer() -> None:
    said(threads_over(Calls(_own_id)))
    for module in (ours, theirs):
        loader = module.DataLoader(
            Calls(_own_id, 4), 1, num_workers=2, collate_fn=as_made, multiprocessing_context="fork"
        )
        assert said(loader) == [200, 201, 200, 201]


def test_torchs_collate_in_a_thread_makes_no_shared_memory() -> None:
    def collate(samples: list[Any]) -> Any:
        assert get_worker_info() is not None
        return theirs.default_collate(samples)

    batches = list(threads_over(Calls(lambda index: torch.full((3,), index)), collate_fn=collate))
    assert [batch.shape for batch in batches] == [(2, 3)] * 6
    assert not any(batch.is_shared() for batch in batches)


def test_the_numpy_loaders_processes_stay_unknown_to_torch() -> None:
    said(threads_over(Calls(_own_id)))

    def ask(_: int) -> bool:
        return get_worker_info() is None and penstock.get_worker_info() is not None

    loader = penstock.Loader(
        Calls(ask, 4), 1, num_workers=1, collate_fn=as_made, multiprocessing_context="fork"
    )
    assert said(loader) == [True] * 4


# A context whose processes are threads


class ProcessThread(threading.Thread):
    """A thread with what torch's loader asks of a process."""

    @property
    def pid(self) -> int:
        return id(self)


class ThreadQueue(queue.Queue[Any]):
    def close(self) -> None:
        pass

    def cancel_join_thread(self) -> None:
        pass


class ThreadContext(SpawnContext):
    _name = "threads"
    Process = ProcessThread  # type: ignore[assignment]
    Queue = ThreadQueue  # type: ignore[assignment]


def where(index: int) -> tuple[int, str]:
    return index, threading.current_thread().name


@pytest.mark.parametrize("options", [{}, {"backend": "process"}, {"backend": "thread"}])
@pytest.mark.parametrize("make", [ours.DataLoader, penstock.Loader])
def test_a_context_whose_processes_are_threads_gets_threads(make: Any, options: Any) -> None:
    context = ThreadContext()
    loader = make(
        Calls(where), 2, num_workers=2, multiprocessing_context=context, collate_fn=as_made,
        **options,
    )  # fmt: skip
    assert loader.multiprocessing_context is context
    assert loader.backend == "thread"
    samples = said(loader)
    assert [index for index, _ in samples] == list(range(12))
    assert {name for _, name in samples} == {"penstock-0", "penstock-1"}
    assert loader.stats().backend == "thread"


@pytest.mark.parametrize("make", [ours.DataLoader, penstock.Loader])
def test_rays_actors_and_true_start_methods_are_still_not_mixed(make: Any) -> None:
    for backend, context in (("ray", ThreadContext()), ("thread", SpawnContext())):
        with pytest.raises(ConfigError, match="leave one of the two out"):
            make(Rows(), num_workers=1, backend=backend, multiprocessing_context=context)


def test_torchs_collate_is_as_it_was_after_threads():
    # Another one in its place lets torch's worker processes send what cannot be sent, and hang.
    registry = dict(theirs._utils.collate.default_collate_fn_map)
    list(ours.DataLoader(range(4), num_workers=1, backend="thread"))
    assert theirs._utils.collate.default_collate_fn_map == registry
    assert registry[torch.Tensor] is theirs._utils.collate.collate_tensor_fn
