# SPDX-License-Identifier: Apache-2.0
"""A finding of `penstock doctor`: one row of what it prints."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["Finding", "Status"]

Status = Literal["ok", "advice", "problem"]


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it.

    Attributes:
        topic: Heading that it stands under.
        name: What was looked at, in a word or two.
        found: What was found, in a sentence or less.
        remedy: What to do; there is one if and only if `status` is not "ok".
        status: "problem" if a loader will not work, "advice" if it may be slow or fail later.
        values: The same as numbers and names, for programs; JSON can have them.
    """

    topic: str
    name: str
    found: str
    remedy: str = ""
    status: Status = "ok"
    values: Mapping[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check that there is a remedy where one is needed."""
        assert bool(self.remedy) == (self.status != "ok"), self
