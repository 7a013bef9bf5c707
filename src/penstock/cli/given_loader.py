# SPDX-License-Identifier: Apache-2.0
"""A loader that a command was given: its class and its arguments, to make others like it."""

from __future__ import annotations

import inspect
from typing import Any, Final, NamedTuple

from penstock.cli.loadable import is_iterable
from penstock.errors import ConfigError

__all__ = ["GivenLoader"]

# Those that a command decides, and those that `_batching` derives.
_NOT_KEPT: Final = (
    "dataset", "num_workers", "prefetch_factor", "persistent_workers", "backend", "batch_size",
    "drop_last", "shuffle", "sampler", "batch_sampler",
)  # fmt: skip
_DEFAULT_COLLATES: Final = ("default_collate", "default_convert")


class GivenLoader(NamedTuple):
    """What a loader was made with.

    Attributes:
        kind: Its class; of a subclass of the user's, the class of torch or Penstock below it, whose
            arguments are known.
        dataset: Of the loader.
        arguments: By name, without those that are as by default, and without workers.
        batch_size: Samples in a batch; 1 if a batch sampler does not say.
    """

    kind: Any
    dataset: Any
    arguments: dict[str, Any]
    batch_size: int

    @classmethod
    def of(cls, loader: Any, batch_size: int | None = None) -> GivenLoader:  # noqa: ANN401
        """Return what a loader was made with.

        Args:
            loader: Of torch or Penstock.
            batch_size: Another one than its own.

        Raises:
            ConfigError: it is neither torch's nor Penstock's, or has no batch size to change.
        """
        kind = next((k for k in type(loader).__mro__ if _is_known(k)), None)
        if kind is None:
            raise ConfigError(
                f"a loader of type {type(loader).__qualname__} cannot be made anew: its arguments "
                "are not known. Name its dataset."
            )
        arguments = _batching(loader)
        if batch_size is not None:
            if arguments.get("batch_size") is None:
                raise ConfigError(
                    "--batch-size: the loader has a batch sampler, or batch_size=None."
                )
            arguments["batch_size"] = batch_size
        for name, parameter in inspect.signature(kind).parameters.items():
            value = getattr(loader, name, parameter.default)
            is_default = value is parameter.default or value == parameter.default
            if name not in _NOT_KEPT and not is_default and not _is_default_collate(name, value):
                arguments[name] = value
        size = arguments.get("batch_size") or getattr(loader.batch_sampler, "batch_size", None) or 1
        return cls(kind, loader.dataset, arguments, size)

    @property
    def takes_backend(self) -> bool:
        """Whether workers may be threads."""
        return "backend" in inspect.signature(self.kind).parameters

    @property
    def import_line(self) -> str:
        """The import of its class."""
        return f"from {self.kind.__module__.rpartition('.')[0]} import {self.kind.__name__}"


def _is_known(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in ("torch", "penstock") and hasattr(kind, "__iter__")


def _is_default_collate(name: str, value: Any) -> bool:  # noqa: ANN401
    return name == "collate_fn" and getattr(value, "__name__", "") in _DEFAULT_COLLATES


def _batching(loader: Any) -> dict[str, Any]:  # noqa: ANN401
    """Return the arguments that decide which samples make a batch."""
    if loader.batch_size is None and loader.batch_sampler is not None:
        return {"batch_sampler": loader.batch_sampler}
    arguments: dict[str, Any] = {"batch_size": loader.batch_size}
    sampler = loader.sampler
    name = type(sampler).__name__
    is_shuffle = name == "RandomSampler" and not getattr(sampler, "replacement", False)
    if is_shuffle and getattr(sampler, "num_samples", None) == len(loader.dataset):
        arguments["shuffle"] = True
    elif name != "SequentialSampler" and not is_iterable(loader.dataset):
        arguments["sampler"] = sampler
    if loader.drop_last:
        arguments["drop_last"] = True
    return arguments
