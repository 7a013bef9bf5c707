# SPDX-License-Identifier: Apache-2.0
"""A sampler that raises in mid-epoch: `next` raises it, and goes on, as torch's loader does."""

from __future__ import annotations

from typing import Any

import pytest
import torch.utils.data as theirs

import penstock.torch as ours


class Calls:
    """An iterator that raises at some of its calls, and can go on."""

    def __init__(self, items: list[Any], fails_at: tuple[int, ...]) -> None:
        self.items, self.fails_at, self.num_calls = iter(items), fails_at, 0

    def __iter__(self) -> Calls:
        return self

    def __next__(self) -> Any:
        self.num_calls += 1
        if self.num_calls - 1 in self.fails_at:
            raise KeyError(f"call {self.num_calls - 1}")
        return next(self.items)


class Failing:
    """A sampler, or batch sampler, whose iterator does so."""

    def __init__(self, items: list[Any], fails_at: tuple[int, ...]) -> None:
        self.items, self.fails_at = items, fails_at

    def __iter__(self) -> Any:
        return Calls(self.items, self.fails_at)

    def __len__(self) -> int:
        return len(self.items)


class FailingGenerator(Failing):
    """The same as a generator, which ends with what it raises."""

    def __iter__(self) -> Any:
        yield from Calls(self.items, self.fails_at)


def batches_of(kind: type[Failing]) -> Any:
    def options(*fails_at: int) -> dict[str, Any]:
        batches = [[2 * k, 2 * k + 1] for k in range(12)]
        return {"batch_sampler": kind(batches, fails_at)}

    return options


def samples_of(kind: type[Failing], batch_size: int | None) -> Any:
    def options(*fails_at: int) -> dict[str, Any]:
        return {"sampler": kind(list(range(12)), fails_at), "batch_size": batch_size}

    return options


SAMPLERS = {
    "batches": batches_of(Failing),
    "batches of a generator": batches_of(FailingGenerator),
    "samples": samples_of(Failing, None),
    "batched samples": samples_of(Failing, 2),
}


def said(loader: Any, num_epochs: int = 2) -> list[object]:
    """Return what a loop sees that catches errors and asks again."""
    seen: list[object] = []
    for _ in range(num_epochs):
        try:
            batches = iter(loader)
        except KeyError as error:
            seen.append(repr(error))
            continue
        while True:
            try:
                seen.append(repr(next(batches)))
            except StopIteration:
                seen.append("end")
                break
            except KeyError as error:
                seen.append(repr(error))
    return seen


@pytest.mark.parametrize("options", SAMPLERS.values(), ids=SAMPLERS)
@pytest.mark.parametrize("fails_at", [(0,), (9,), (4, 5), (6, 7, 8, 9)], ids=str)
@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_loader_goes_on_after_an_error_of_the_sampler_as_torch_does(
    options: Any, fails_at: tuple[int, ...], num_workers: int
) -> None:
    workers = {"num_workers": num_workers, "persistent_workers": num_workers > 0}
    expected = said(theirs.DataLoader(range(40), **options(*fails_at), **workers))
    for backend in ("process", "thread") if num_workers else ("process",):
        loader = ours.DataLoader(range(40), **options(*fails_at), **workers, backend=backend)
        assert said(loader) == expected


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_state_saved_after_an_error_of_the_sampler_goes_on_behind_it(num_workers: int) -> None:
    def loader(*fails_at: int) -> Any:
        return ours.DataLoader(range(40), **SAMPLERS["batches"](*fails_at), num_workers=num_workers)

    whole = [batch.tolist() for batch in loader()]
    failing = loader(6)
    batches = iter(failing)
    for _ in range(6 if num_workers == 0 else 2):  # 4 are drawn ahead
        next(batches)
    with pytest.raises(KeyError):
        next(batches)
    last = next(batches).tolist()
    state = failing.state_dict()
    batches.close()
    mended = loader()  # the sampler is repaired before the run goes on
    mended.load_state_dict(state)
    assert [batch.tolist() for batch in mended] == whole[whole.index(last) + 1 :]
