# SPDX-License-Identifier: Apache-2.0
"""Replacement of torch's `DataLoader` under torch's own names, for unedited programs."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from typing import TYPE_CHECKING, Any, Final

import torch.utils.data
from torch.utils.data import IterableDataset

from penstock.engine.backends import traits_of
from penstock.options import backend_name
from penstock.torch.loader import DATAPIPES, DataLoader
from penstock.warn import warn_user

if TYPE_CHECKING:
    from collections.abc import Callable

_STOCK: Final = torch.utils.data.DataLoader
_PLACES: Final = (torch.utils.data, torch.utils.data.dataloader)
_INIT: Final[Callable[..., None]] = DataLoader.__init__
_SETTINGS: Final = frozenset({"num_workers", "backend", "seed", "on_error", "progress"})


def install(**defaults: Any) -> None:  # noqa: ANN401
    """Replace `torch.utils.data.DataLoader` by `penstock.torch.DataLoader` in this process.

    Modules imported afterwards find Penstock's class under torch's names. A module that has
    imported torch's class already keeps it; a warning names such modules. So call `install` before
    they are imported: in a notebook's first cell, or at the top of a conftest.py.

    Processes that are spawned or started as subprocesses keep torch's class, unless the program
    runs under `penstock run`. A second call changes the arguments below, nothing else.

    Args:
        **defaults: For loaders that are made without the argument: `num_workers`, `backend`,
            `seed`, `on_error`, `progress`. With a seed, batches differ from those that torch draws
            after `torch.manual_seed`.

    Raises:
        ConfigError: a setting is out of its range.
        TypeError: a setting is of the wrong type, or there is none of that name.

    Concurrency:
        Call it before other threads make loaders.

    Example:
        >>> import torch
        >>> install()
        >>> torch.utils.data.DataLoader.__module__
        'penstock.torch.loader'
        >>> uninstall()
        >>> torch.utils.data.DataLoader.__module__
        'torch.utils.data.dataloader'
    """
    if unknown := defaults.keys() - _SETTINGS:
        raise TypeError(f"install() takes {sorted(_SETTINGS)}, got {sorted(unknown)}")
    settings = {name: value for name, value in defaults.items() if value is not None}
    with warnings.catch_warnings():  # torch's about many workers is for the program's loaders
        warnings.simplefilter("ignore")
        _INIT(DataLoader.__new__(DataLoader), [0], **settings)  # which checks them
    _warn_of_earlier_imports()
    for place in _PLACES:
        vars(place)["DataLoader"] = DataLoader
    DataLoader.__init__ = _with(settings) if settings else _INIT  # type: ignore[method-assign]


def uninstall() -> None:
    """Undo `install`: put torch's class back under torch's names.

    Loaders made in between stay as they are.
    """
    for place in _PLACES:
        vars(place)["DataLoader"] = _STOCK
    DataLoader.__init__ = _INIT  # type: ignore[method-assign]


def _with(settings: dict[str, Any]) -> Callable[..., None]:
    """Return a constructor of `DataLoader` that adds the settings."""
    signature = inspect.signature(_INIT)

    @functools.wraps(_INIT)
    def init(self: DataLoader[Any], *args: Any, **kwargs: Any) -> None:  # noqa: ANN401
        try:
            given = signature.bind_partial(self, *args, **kwargs).arguments
        except TypeError:
            added = {}  # the constructor raises the error
        else:
            added = _missing(settings, given)
        _INIT(self, *args, **kwargs, **added)

    return init


def _missing(settings: dict[str, Any], given: dict[str, Any]) -> dict[str, Any]:
    """Return the settings that a loader with the arguments `given` lacks and can take."""
    dataset = given.get("dataset")
    if isinstance(dataset, DATAPIPES):
        return {}
    found = {name: value for name, value in settings.items() if name not in given}
    if given.get("generator") is not None:
        found.pop("seed", None)
    if given.get("multiprocessing_context") is not None:
        found.pop("backend", None)
    is_local = traits_of(backend_name((found | given).get("backend", "process"))).is_local
    is_auto = not hasattr(found.get("num_workers", 0), "__index__")  # numpy's are numbers
    if is_auto and (isinstance(dataset, IterableDataset) or not is_local):
        del found["num_workers"]  # "auto" needs workers on this machine, and no stream
    return found


def _warn_of_earlier_imports() -> None:
    early = sorted(
        name
        for name, module in list(sys.modules.items())
        if not name.startswith(("torch.", "penstock.", "__mp_main__"))
        and any(value is _STOCK for value in list(getattr(module, "__dict__", {}).values()))
    )
    if early:
        warn_user(
            f"{', '.join(early)} imported torch's DataLoader before penstock.torch.install() was "
            "called, so torch's class stays there. Call install() before importing these modules.",
        )
