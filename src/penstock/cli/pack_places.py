# SPDX-License-Identifier: Apache-2.0
"""Places that `penstock pack` refuses to write to."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Final

from penstock.errors import ConfigError

if TYPE_CHECKING:
    from penstock.stores.registry import Address

__all__ = ["check_places"]

_USER: Final = re.compile(r"//[^/@]*@")


def check_places(src: str, dst: str, *, num_shards: int) -> None:
    """Refuse a destination that would take the source with it, or something else that is there.

    Raises:
        ConfigError: so it is.
    """
    from penstock.cli.sources import names_a_dataset, parse

    target = parse(dst)
    if not names_a_dataset(src):
        _check_apart(parse(src), target)
    path = Path(target.place)
    if target.kind != "lmdb" or not path.exists():
        return
    if num_shards == 1 and path.is_dir():
        raise ConfigError(f"{path} is a folder: name a file for DST, or give --shards.")
    if num_shards > 1 and not path.is_dir():
        raise ConfigError(f"{path} is a file; --shards makes a folder. Name another DST.")
    if num_shards > 1:
        from penstock.stores.lmdb.store import is_shard

        others = sorted(e.name for e in path.iterdir() if not is_shard(e.name))
        if others:
            raise ConfigError(
                f"{path} is a folder with other things in it ({others[0]}), which the new store "
                "would replace. Name another DST."
            )


def _check_apart(source: Address, target: Address) -> None:
    if (source.kind == "mongodb") != (target.kind == "mongodb"):
        return
    if source.kind == "mongodb":
        places = [_USER.sub("//", a.place).partition("?")[0] for a in (source, target)]
        if places[0] == places[1]:
            raise ConfigError(f"SRC and DST are the same collection, {places[0]}.")
        return
    one, other = (Path(os.path.realpath(address.place)) for address in (source, target))
    if one == other:
        raise ConfigError(
            f"SRC and DST are the same place, {target.place}. Pack into another one, and rename "
            "that when you have looked at it."
        )
    if one.is_relative_to(other) and other.is_dir():
        raise ConfigError(f"DST ({target.place}) would replace the folder that SRC lies in.")
    if other.is_relative_to(one):
        raise ConfigError(f"DST ({target.place}) would be in the folder SRC, and a part of it.")
