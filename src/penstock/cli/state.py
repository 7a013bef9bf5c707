# SPDX-License-Identifier: Apache-2.0
"""`penstock state`: a saved state of a loader or sampler, in words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.errors import StateError
from penstock.lines import counted, printable, say
from penstock.opening import MAX_ANNOTATION_BYTES, open_file, read_file

if TYPE_CHECKING:
    from collections.abc import Iterator

_LOADER: Final = {"format", "seed", "epoch", "batches", "fingerprint"}
_SAMPLER: Final = {"format", "epoch", "position", "fingerprint"}


def state(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="JSON, or a checkpoint that torch.save wrote. Whatever else it holds is ignored.",
        ),
    ],
) -> None:
    """Say in words where a run was when its state was saved."""
    found = list(_states(_read(Path(file)), ""))
    if not found:
        raise StateError(
            f"{file} holds no state of a Penstock loader or sampler. Save what loader.state_dict() "
            "returns, alone or as a part of a checkpoint."
        )
    for place, each in found:
        for line in ([f"{place}:"] if place else []) + list(_lines(each)):
            say(printable(line))


def _read(file: Path) -> Any:  # noqa: ANN401
    try:
        with open_file(file) as opened:
            is_zip = opened.read(2) == b"PK"  # what torch.save writes
        if not is_zip:
            return json.loads(read_file(file, MAX_ANNOTATION_BYTES, remedy="save the state alone"))
    except OSError as error:
        raise StateError(f"cannot read {file}: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise StateError(f"{file} is neither JSON nor a checkpoint of torch: {error}.") from error
    import torch

    try:
        # Mapped: of weights, which may be more than the memory, nothing is read.
        return torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        raise StateError(
            f"torch cannot read {file} as plain data: it is damaged, or holds objects that may run "
            "code when they are loaded. Save the loader's state as JSON beside it."
        ) from error


def _states(tree: Any, place: str) -> Iterator[tuple[str, dict[str, Any]]]:  # noqa: ANN401
    """Yield the states in a tree of dicts and lists, and where each is."""
    if isinstance(tree, dict):
        is_state = tree.keys() >= _LOADER or tree.keys() >= _SAMPLER
        if is_state and isinstance(tree["fingerprint"], dict):
            yield place, tree
            return
        for key, part in tree.items():
            yield from _states(part, f"{place}.{key}" if place else str(key))
    elif isinstance(tree, (list, tuple)):
        for number, part in enumerate(tree):
            yield from _states(part, f"{place}[{number}]")


def _lines(state: dict[str, Any]) -> Iterator[str]:
    epoch, seed = state["epoch"], state.get("seed")
    if "batches" in state:
        samples = state.get("samples")
        of_all = "" if samples is None else f", {samples:,} samples of all ranks"
        yield f"epoch {epoch}, after {counted(state['batches'], 'batch')}{of_all}"
        yield (
            f"seed {seed}"
            if seed is not None
            else "no seed: a resumed run continues the order, but not the random numbers"
        )
    else:
        yield f"epoch {epoch}, after {counted(state['position'], 'item')} of all ranks"
    if failed := state.get("failed"):
        yield f"{failed[0]:,} of {failed[1]:,} samples failed in this epoch"
    if shares := state.get("shares"):
        yield f"a stream: the positions of {counted(len(shares), 'worker')}"
    yield from _settings(state["fingerprint"], "")
    if contents := state.get("contents"):
        yield f"contents of the data: {contents}"


def _settings(settings: dict[str, Any], place: str) -> Iterator[str]:
    for key, value in settings.items():
        if isinstance(value, dict):
            yield f"{place}{key}: {value.get('kind', '')}".rstrip()
            rest = {name: part for name, part in value.items() if name != "kind"}
            yield from _settings(rest, f"{place}    ")
        elif value is not None:
            yield f"{place}{key}: {f'{value:,}' if type(value) is int else value}"
