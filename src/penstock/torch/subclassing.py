# SPDX-License-Identifier: Apache-2.0
"""What the loader does for classes that derive from it, as they derive from torch's."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any, Final

import torch.utils.data

_TORCHS: Final = frozenset(inspect.signature(torch.utils.data.DataLoader).parameters)


class Readable:
    """A property that a subclass may hide by assigning an attribute of its name to itself.

    Subclasses of torch's loader have had attributes called `epoch` or `seed` before us.
    """

    def __init__(self, base: Any) -> None:  # noqa: ANN401 - mypy sees what a property returns
        """Take the property of the base class."""
        self._get = base.fget
        self.__doc__ = base.__doc__

    def __get__(self, loader: Any, owner: type) -> Any:  # noqa: ANN401
        """Return what `get` says of the loader."""
        return self if loader is None else self._get(loader)


class _NamedOnceBound(inspect.Signature):
    """The signature of an `__init__(..., **kwargs)` that names more once `self` is given.

    Lightning asks a loader's `__init__` what it may be given; and the function itself, before
    `self` is given, what its arguments and their defaults are called in the record of a call.
    """

    __slots__ = ("bound",)
    bound: inspect.Signature  # still with `self`

    def replace(self, **changes: Any) -> inspect.Signature:  # type: ignore[override]  # noqa: ANN401
        """Return another signature: `inspect.signature` takes `self` away by this."""
        own = list(self.parameters.values())
        if list(changes.get("parameters", ())) == own[1:]:
            return self.bound.replace(parameters=list(self.bound.parameters.values())[1:])
        return inspect.Signature(own, return_annotation=self.return_annotation).replace(**changes)


@functools.cache  # asked for at every assignment
def added_arguments(loader_class: type) -> dict[str, inspect.Parameter]:
    """Return the arguments of a loader's class, by name, that torch's loader does not have."""
    parameters = inspect.signature(loader_class).parameters
    return {name: parameters[name] for name in parameters if name not in _TORCHS}


def name_keywords(subclass: type, loader_class: type) -> None:
    """Let the signature of a subclass's `__init__(..., **kwargs)` name what it passes on.

    Lightning makes a loader anew with those of its attributes that are arguments of its `__init__`.
    For `**kwargs` it takes the names of torch's own arguments, so ours would be left out in
    silence. A class between the two that takes no `**kwargs` passes on only what it names.
    """
    init = vars(subclass).get("__init__")
    if not isinstance(init, FunctionType):
        return
    added = added_arguments(loader_class)
    mro = subclass.__mro__
    for cls in mro[: mro.index(loader_class)]:
        if isinstance(between := vars(cls).get("__init__"), FunctionType):
            found = inspect.signature(between).parameters
            if not any(p.kind is p.VAR_KEYWORD for p in found.values()):
                added = {name: p for name, p in added.items() if name in found}
    signature = inspect.signature(init)
    *parameters, last = signature.parameters.values()
    if last.kind is last.VAR_KEYWORD:
        more = [p for name, p in added.items() if name not in signature.parameters]
        named = _NamedOnceBound([*parameters, last], return_annotation=signature.return_annotation)
        named.bound = signature.replace(parameters=[*parameters, *more, last])
        init.__signature__ = named  # type: ignore[attr-defined]  # which inspect looks for
