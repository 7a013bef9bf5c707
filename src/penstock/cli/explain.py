# SPDX-License-Identifier: Apache-2.0
"""`penstock explain`: what docs/troubleshooting.md says of an error or a symptom."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.lines import say

with contextlib.suppress(ModuleNotFoundError):  # the command explains what to install
    import typer

_PAGE: Final = "troubleshooting.md"


class Section(NamedTuple):
    """A section of the page: the heading above it, its title, and its text in Markdown."""

    group: str
    title: str
    text: str

    @property
    def anchor(self) -> str:
        """What follows the # in a link to it, as sites and repositories make it of a heading."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")

    @property
    def summary(self) -> str:
        """The first sentence."""
        return " ".join(re.split(r"(?<=\.)\s", self.text, maxsplit=1)[0].split())


def sections_of(page: str) -> list[Section]:
    r"""Return the sections of a page: what is below each heading of the third level.

    Example:
        >>> text = "# Page\n## Errors\n### WorkerDied\nA worker ended. Why?\n"
        >>> [(s.group, s.anchor, s.summary) for s in sections_of(text)]
        [('Errors', 'workerdied', 'A worker ended.')]
    """
    sections, group = [], ""
    for part in re.split(r"^##", page, flags=re.MULTILINE)[1:]:
        title, _, text = part.partition("\n")
        if title.startswith("# "):
            sections.append(Section(group, title[2:].strip(), text.strip()))
        else:
            group = title.strip()
    return sections


def read_sections() -> list[Section]:
    """Return the sections of the page in the package, or in the checkout that is imported from."""
    package = Path(penstock.__file__).resolve().parent
    places = [package / _PAGE, package.parents[1] / "docs" / _PAGE]
    for place in places:
        if place.is_file():
            return sections_of(place.read_text(encoding="utf-8"))
    raise PenstockError(f"the page of explanations is not there: no {places[0]} or {places[1]}.")


def explain(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="An error, as WorkerDied, or a symptom, as first-batch-slow; other words are "
            'searched for, as "bus error". Without it, all are listed.',
        ),
    ] = None,
) -> None:
    """Say what an error means, its usual causes, and what to do."""
    sections = read_sections()
    wanted = (name or "").strip().lstrip("#").removeprefix("penstock.errors.").casefold()
    for section in sections:
        if wanted in (section.title.casefold(), section.anchor):
            say(section.title)
            for line in ["", *section.text.splitlines()]:
                say(line)
            return
    found = [each for each in sections if wanted in f"{each.title} {each.text}".casefold()]
    if not found:
        raise ConfigError(f"nothing is called {name!r} here. `penstock explain` lists all.")
    for section in found:
        say(f"{section.group}: {section.anchor}")
        say(f"    {section.summary}")
    say("penstock explain NAME says what to do.")
