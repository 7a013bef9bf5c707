# SPDX-License-Identifier: Apache-2.0
"""A transform that can be none is refused when the dataset is made, not when it is read."""

from __future__ import annotations

from penstock.errors import ConfigError

__all__ = ["check_transform"]


def check_transform(name: str, transform: object) -> None:
    """Raise if a transform cannot be called.

    Args:
        name: Of the argument.
        transform: What was given; None is no transform.

    Raises:
        ConfigError: it is not callable.

    Example:
        >>> check_transform("transform", [str.upper])
        Traceback (most recent call last):
        penstock.errors.ConfigError: transform is a list, which cannot be called: join ...
    """
    if transform is None or callable(transform):
        return
    what = f"{name} is a {type(transform).__name__}, which cannot be called"
    if isinstance(transform, (list, tuple)):
        raise ConfigError(f"{what}: join several by penstock.vision.Compose.")
    raise ConfigError(f"{what}: it takes a sample and returns one.")
