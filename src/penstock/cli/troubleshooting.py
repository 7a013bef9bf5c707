# SPDX-License-Identifier: Apache-2.0
"""The page docs/troubleshooting.md, in sections to print.

It needs no extra: that one is missing is among what it explains.
"""

from __future__ import annotations

import difflib
import posixpath
import re
import shutil
import textwrap
from pathlib import Path
from typing import Final, NamedTuple

import penstock
from penstock.errors import ConfigError, PenstockError
from penstock.redact import without_password

__all__ = ["Section", "completed", "explained", "find_page", "sections_of"]

_NAME: Final = "troubleshooting.md"
_MAX_WIDTH: Final = 100
_MAX_FOUND: Final = 8  # sections that a search lists
_NEAR: Final = 0.8  # of a name: WorkerDead is near WorkerDied, RuntimeError not near TransportError
_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_BULLET: Final = r"[-*] |\d+\. "
_USE: Final = "penstock explain NAME says what to do."


class Section(NamedTuple):
    """What the page says of one error, or of one symptom.

    Attributes:
        group: The heading above, as "Errors".
        title: Its own heading.
        text: What is below it, in Markdown.
    """

    group: str
    title: str
    text: str

    @property
    def anchor(self) -> str:
        """What follows the # in a link to it, as sites and repositories make it of a heading."""
        kept = re.sub(r"[^\w\- ]", "", self.title.lower())
        return kept.strip().replace(" ", "-")

    @property
    def name(self) -> str:
        """What to type for it: the class, or the anchor of a symptom."""
        return self.title if self.title.isidentifier() else self.anchor

    @property
    def summary(self) -> str:
        """The first sentence."""
        paragraph = " ".join(self.text.strip().partition("\n\n")[0].split())
        return _plain(re.split(r"(?<=\.) ", paragraph, maxsplit=1)[0])


def find_page() -> Path:
    """Return where the page lies: inside the package, or in the checkout that is imported from.

    Raises:
        PenstockError: it is at neither place.
    """
    package = Path(penstock.__file__).resolve().parent
    places = [package / _NAME]
    if package.parent.name == "src":
        places.append(package.parents[1] / "docs" / _NAME)
    for place in places:
        if place.is_file():
            return place
    looked = " or ".join(map(str, places))
    raise PenstockError(
        f"the page of explanations is not there: no {looked}. Every wheel has it: reinstall "
        f"Penstock, or read docs/{_NAME} in its source."
    )


def sections_of(page: str) -> list[Section]:
    r"""Return the sections of a page's text: what is below each heading of the third level.

    Example:
        >>> text = "# Page\n## Errors\n### WorkerDied\nA worker ended. Why?\n"
        >>> [(s.group, s.anchor, s.summary) for s in sections_of(text)]
        [('Errors', 'workerdied', 'A worker ended.')]
    """
    sections = []
    group = title = ""
    lines: list[str] = []
    is_code = False
    for line in [*page.splitlines(), "## "]:
        is_code ^= line.startswith("```")
        heading = None if is_code else re.match(r"(##|###) (.*)", line)
        if heading is None:
            lines.append(line)
            continue
        if title:
            sections.append(Section(group, title, "\n".join(lines).strip()))
        lines = []
        title = heading[2].strip() if heading[1] == "###" else ""
        group = group if title else heading[2].strip()
    return sections


def explained(name: str | None = None) -> str:
    """Return what the page says of `name` as plain text, or a list of all that it explains.

    Args:
        name: A title or an anchor, of any case; also a class with its module, as a traceback has
            it. Of other words the sections are listed that have most of them. None lists all.

    Raises:
        ConfigError: there is no such section, and none has one of these words; the message has the
            nearest name.
        PenstockError: the page is not there.
    """
    sections = sections_of(find_page().read_text(encoding="utf-8"))
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    if name is None:
        groups = dict.fromkeys(section.group for section in sections)
        return "\n\n".join([*(_listed(group, sections, width) for group in groups), _USE])
    wanted = name.strip().lstrip("#").casefold()
    wanted = wanted.removeprefix("penstock.errors.").removeprefix("penstock.")
    for section in sections:
        if wanted in (section.title.casefold(), section.anchor):
            return f"{section.title}\n\n{_rendered(section.text, width)}"
    if found := _search(wanted, sections):
        # Perhaps the text of an error, with the address that was typed in it.
        said = f"Nothing is called {without_password(name)!r} here. Sections that have it:"
        entries = "\n".join(_entry(section, width) for section in found)
        return f"{said}\n\n{entries}\n\n{_USE}"
    names = {section.anchor: section.name for section in sections}
    near = [names[anchor] for anchor in difflib.get_close_matches(wanted, names, 3, _NEAR)]
    advice = f"Did you mean {' or '.join(near)}?" if near else "`penstock explain` lists all."
    raise ConfigError(f"nothing is called {name!r} here. {advice}")


def _search(wanted: str, sections: list[Section]) -> list[Section]:
    """Return the sections that have most of the words, those with words in their titles first."""
    words = re.findall(r"[\w./-]{2,}", wanted)
    counts = {s: _count(f"{s.title} {s.anchor} {s.text}", words) for s in sections}
    most = max(counts.values())
    found = [section for section in sections if most and counts[section] == most]
    found.sort(key=lambda section: -_count(f"{section.title} {section.anchor}", words))
    return found[:_MAX_FOUND]


def _count(text: str, words: list[str]) -> int:
    """Return how many of the words the words of a text begin with."""
    return sum(bool(re.search(rf"(?<!\w){re.escape(w)}", text, re.IGNORECASE)) for w in words)


def completed(incomplete: str) -> list[str]:
    """Return the names that may be typed and begin so, for the Tab key."""
    try:
        sections = sections_of(find_page().read_text(encoding="utf-8"))
    except PenstockError:  # this is no place to say that the page is not there
        return []
    begun = incomplete.casefold()
    return [section.name for section in sections if section.name.casefold().startswith(begun)]


def _listed(group: str, sections: list[Section], width: int) -> str:
    return "\n".join([group, *(_entry(each, width) for each in sections if each.group == group)])


def _entry(section: Section, width: int) -> str:
    return f"  {section.name}\n{_wrapped(section.summary, width, ' ' * 6, ' ' * 6)}"


def _rendered(text: str, width: int) -> str:
    """Return Markdown as plain text: paragraphs and bullets wrapped, code as it is."""
    blocks = []
    for block in re.split(r"(^```.*?^```$)|\n\s*\n", text, flags=re.DOTALL | re.MULTILINE):
        if block is None or not block.strip():
            continue
        if block.startswith("```"):
            blocks.append(textwrap.indent("\n".join(block.splitlines()[1:-1]), "    "))
            continue
        items = []
        for item in re.split(rf"\n(?={_BULLET})", _plain(block.strip("\n"))):
            bullet = re.match(_BULLET, item)
            items.append(_wrapped(item, width, "", " " * (bullet.end() if bullet else 0)))
        blocks.append("\n".join(items))
    return "\n\n".join(blocks)


def _wrapped(text: str, width: int, first: str, other: str) -> str:
    return textwrap.fill(
        " ".join(text.split()),
        width,
        initial_indent=first,
        subsequent_indent=other,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _plain(text: str) -> str:
    return _LINK.sub(_link, text).replace("**", "")


def _link(link: re.Match[str]) -> str:
    words, target = link[1], link[2]
    if target.startswith("#"):
        return f"{words} (`penstock explain {target[1:]}`)"
    if not re.match(r"\w+:", target):
        target = posixpath.normpath(posixpath.join("docs", target))
    return words if words == target else f"{words} ({target})"
