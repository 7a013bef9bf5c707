# SPDX-License-Identifier: Apache-2.0
"""The page docs/troubleshooting.md, in sections to print.

It needs no extra: that one is missing is among what it explains.
"""

from __future__ import annotations

import builtins
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
_OWN: Final = "an-exception-of-your-own-code"
_LINK: Final = re.compile(r"\[([^\]]+)\]\(([^)\s]+)\)")
_USE: Final = "penstock explain NAME says what to do."
# Python's own errors are the user's code's, mostly, whatever else the page says of them.
_BUILTINS: Final = {
    name.casefold()
    for name, value in vars(builtins).items()
    if isinstance(value, type) and issubclass(value, Exception)
}
_BULLET: Final = re.compile(r"[-*] |\d+\. ")


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
            it. Of other words the sections are listed that have them. None lists all.

    Raises:
        ConfigError: there is no such section, and none has these words; the message has the
            nearest name.
        PenstockError: the page is not there.
    """
    sections = sections_of(find_page().read_text(encoding="utf-8"))
    width = min(shutil.get_terminal_size().columns, _MAX_WIDTH)
    if name is None:
        return _listed(sections, width)
    wanted = name.strip().lstrip("#").casefold()
    short = wanted.removeprefix("penstock.errors.").removeprefix("penstock.")
    for section in sections:
        if short in (section.title.casefold(), section.anchor):
            return f"{section.title}\n\n{_rendered(section.text, width)}"
    if found := _search(short, sections):
        # Perhaps the text of an error, with the address that was typed in it.
        typed = without_password(name)
        lines = [f"Nothing is called {typed!r} here. Sections that have it:", ""]
        for section in found:
            lines += _entry(section, width)
        return "\n".join([*lines, "", _USE])
    raise ConfigError(f"nothing is called {name!r} here. {_advice(short, sections)}")


def _search(wanted: str, sections: list[Section]) -> list[Section]:
    """Return the sections that have the words: in their titles first, then in their texts.

    If none has all of them, those that have the one that is in the fewest.
    """
    words = [word for word in re.findall(r"[\w./-]+", wanted) if len(word) > 1]
    if not words:
        return []
    texts = {section: f"{section.title}\n{section.text}".casefold() for section in sections}
    titles = {section: f"{section.title} {section.anchor}".casefold() for section in sections}
    found = [section for section in sections if _has_all(titles[section], words)]
    if wanted in _BUILTINS:
        found += [section for section in sections if section.anchor == _OWN]
    found += [section for section in sections if wanted in texts[section]]
    found += [section for section in sections if _has_all(texts[section], words)]
    if not found:
        having = [[s for s in sections if _has_all(texts[s], [word])] for word in words]
        found = min(filter(None, having), key=len, default=[])
    return list(dict.fromkeys(found))[:_MAX_FOUND]


def _has_all(text: str, words: list[str]) -> bool:
    """Return whether words of the text begin with each of `words`."""
    return all(re.search(rf"(?<!\w){re.escape(word)}", text) for word in words)


def _advice(wanted: str, sections: list[Section]) -> str:
    names = {section.anchor: _name(section) for section in sections}
    near = difflib.get_close_matches(wanted, names, 3, _NEAR)
    if not near:
        return "`penstock explain` lists what there is."
    return f"Did you mean {' or '.join(names[anchor] for anchor in near)}?"


def completed(incomplete: str) -> list[str]:
    """Return the names that may be typed and begin so, for the Tab key."""
    try:
        sections = sections_of(find_page().read_text(encoding="utf-8"))
    except PenstockError:  # this is no place to say that the page is not there
        return []
    begun = incomplete.casefold()
    return [name for name in map(_name, sections) if name.casefold().startswith(begun)]


def _name(section: Section) -> str:
    """What to type for it: the class, or the anchor of a symptom."""
    return section.title if section.title.isidentifier() else section.anchor


def _listed(sections: list[Section], width: int) -> str:
    lines: list[str] = []
    group = None
    for section in sections:
        if section.group != group:
            group = section.group
            lines += ["", group] if lines else [group]
        lines += _entry(section, width)
    return "\n".join([*lines, "", _USE])


def _entry(section: Section, width: int) -> list[str]:
    return [f"  {_name(section)}", *_wrapped(section.summary, width, "      ", "      ")]


def _rendered(text: str, width: int) -> str:
    """Return Markdown as plain text: paragraphs and bullets wrapped, code as it is."""
    lines: list[str] = []
    for number, part in enumerate(re.split(r"^```.*\n?", text, flags=re.MULTILINE)):
        if number % 2:
            lines += ["", *(f"    {line}".rstrip() for line in part.splitlines())]
            continue
        is_list = False
        for block in re.split(r"\n\s*\n|\n(?=[-*] |\d+\. )", part.strip()):
            if not block:  # between one piece of code and the next
                continue
            bullet = _BULLET.match(block)
            if not (bullet and is_list):
                lines.append("")
            is_list = bullet is not None
            lines += _wrapped(_plain(block), width, "", " " * len(bullet[0] if bullet else ""))
    return "\n".join(lines).strip("\n")


def _wrapped(text: str, width: int, first: str, other: str) -> list[str]:
    flowing = " ".join(text.split())
    return textwrap.wrap(
        flowing,
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
