# SPDX-License-Identifier: Apache-2.0
"""The libraries that Penstock's extras need: what its metadata asks for, and what is installed."""

from __future__ import annotations

import contextlib
import inspect
import re
from importlib import metadata
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self

from penstock.cli.doctor.children import Child
from penstock.cli.doctor.finding import Finding
from penstock.optional import install_command

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from penstock.cli.doctor.children import Ended

__all__ = [
    "Extra",
    "Imports",
    "InstalledLibrary",
    "Requirement",
    "installed",
    "look_at_core",
    "look_at_extras",
    "parse_requirement",
    "user_extras",
]

_ENVIRONMENT: Final = "environment"
_EXTRAS: Final = "extras"
_IMPORT_LIMIT_S: Final = 120.0  # a network folder may take a minute to give torch's files

_REQUIREMENT: Final = re.compile(
    r"(?P<name>[A-Za-z0-9][\w.-]*)\s*(\[[^\]]*\])?\s*\(?(?P<bounds>[^;()]*)\)?\s*(;(?P<marker>.*))?"
)
_EXTRA: Final = re.compile(r"""extra\s*==\s*['"](?P<extra>[\w.-]+)['"]""")
_BOUND: Final = re.compile(r"\s*(>=|<=|==|!=|<|>)\s*(\d+(?:\.\d+)*)\s*")

# All of them write the folder cv2, and any of them will do.
_OPENCVS: Final = (
    "opencv-python-headless",
    "opencv-python",
    "opencv-contrib-python-headless",
    "opencv-contrib-python",
)


class Requirement(NamedTuple):
    """One line `Requires-Dist` of Penstock's metadata.

    Attributes:
        name: Of a distribution.
        bounds: Comparisons and versions, such as (">=", "2.6").
        extra: Extra that needs it; "" for all of Penstock.
    """

    name: str
    bounds: tuple[tuple[str, str], ...]
    extra: str

    def __str__(self) -> str:
        """Return it without its extra."""
        return self.name + ",".join(comparison + version for comparison, version in self.bounds)

    def allows(self, version: str) -> bool:
        """Return whether a version will do, by the numbers that it begins with.

        Example:
            >>> requirement = parse_requirement('torch>=2.6; extra == "torch"')
            >>> requirement.allows("2.13.0+cpu"), requirement.allows("2.5.1")
            (True, False)
        """
        return all(_holds(_numbers(version), *bound) for bound in self.bounds)


class InstalledLibrary(NamedTuple):
    """What is installed of a distribution.

    Attributes:
        name: Its name, or that of another one in its place.
        version: None if it is not installed.
        module: What is imported from it.
    """

    name: str
    version: str | None
    module: str


class Extra(NamedTuple):
    """An extra of Penstock, and what it needs."""

    name: str
    requirements: list[Requirement]


def parse_requirement(line: str) -> Requirement:
    """Return what a line of the metadata asks for.

    Penstock's own lines have no other marker that matters here than the extra.

    Example:
        >>> parse_requirement("opencv-python-headless>=4.9; extra == 'vision'")
        Requirement(name='opencv-python-headless', bounds=(('>=', '4.9'),), extra='vision')
    """
    match = _REQUIREMENT.fullmatch(line.strip())
    assert match is not None, line
    bounds = []
    for part in filter(None, (part.strip() for part in match["bounds"].split(","))):
        bound = _BOUND.fullmatch(part)
        assert bound is not None, line
        bounds.append((bound[1], bound[2]))
    extra = _EXTRA.search(match["marker"] or "")
    return Requirement(match["name"], tuple(bounds), extra["extra"] if extra else "")


def _holds(version: Sequence[int], comparison: str, bound: str) -> bool:
    wanted = _numbers(bound)
    length = max(len(version), len(wanted))
    one, other = (tuple(v) + (0,) * (length - len(v)) for v in (version, wanted))
    return {
        ">=": one >= other,
        "<=": one <= other,
        "==": one == other,
        "!=": one != other,
        "<": one < other,
        ">": one > other,
    }[comparison]


def _numbers(version: str) -> tuple[int, ...]:
    match = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, match[0].split("."))) if match else ()


def user_extras(requirements: Iterable[Requirement]) -> list[Extra]:
    """Return the extras that are part of the extra "all": not those for developing Penstock.

    Example:
        >>> lines = ["numpy>=1.26", "lmdb>=2.3; extra == 'all'", "lmdb>=2.3; extra == 'lmdb'"]
        >>> lines += ["ruff; extra == 'dev'"]
        >>> [extra.name for extra in user_extras(map(parse_requirement, lines))]
        ['lmdb']
    """
    extras: dict[str, list[Requirement]] = {}
    for requirement in requirements:
        if requirement.extra:
            extras.setdefault(requirement.extra, []).append(requirement)
    of_all = {requirement.name for requirement in extras.pop("all", ())}
    return [
        Extra(name, needed)
        for name, needed in sorted(extras.items())
        if {requirement.name for requirement in needed} <= of_all
    ]


def installed(name: str) -> InstalledLibrary:
    """Return what is installed of a distribution."""
    for other in _OPENCVS if name in _OPENCVS else (name,):
        try:
            found = metadata.distribution(other)
        except metadata.PackageNotFoundError:
            continue
        return InstalledLibrary(other, found.version, _module_of(found, other))
    return InstalledLibrary(name, None, "")


def _module_of(distribution: metadata.Distribution, name: str) -> str:
    """Return the module that a distribution is known by."""
    names = set((distribution.read_text("top_level.txt") or "").split())
    if not names:
        for file in distribution.files or ():
            if file.suffix in (".py", ".so", ".pyd"):
                first = file.parts[0]
                names.add(first if len(file.parts) > 1 else inspect.getmodulename(first) or "")
    as_module = re.sub(r"[-.]+", "_", name).lower()
    public = sorted(each for each in names if each.isidentifier() and not each.startswith("_"))
    return as_module if as_module in public or not public else public[0]


class Imports:
    """Libraries that are being imported, in a process of their own.

    One that ends its process or hangs is found out, and the next ones get another process.
    """

    def __init__(self, libraries: Iterable[InstalledLibrary]) -> None:
        """Start with importing them, one after the other."""
        self.device: dict[str, Any] | None = None  # what torch told of a GPU
        self._rest = [library.module for library in libraries]
        self._stack = contextlib.ExitStack()
        self._child = self._start() if self._rest else None

    def _start(self) -> Child:
        return self._stack.enter_context(Child("import", *self._rest, limit_s=_IMPORT_LIMIT_S))

    def reasons(self) -> dict[str, str]:
        """Wait, and return by module why it cannot be imported; "" if it can."""
        reasons: dict[str, str] = {}
        while self._child is not None:
            told = self._told(self._child.result())
            reasons |= told
            self._rest = [module for module in self._rest if module not in told]
            self._child = self._start() if self._rest else None
        return reasons

    def _told(self, ended: Ended) -> dict[str, str]:
        told: dict[str, str] = {}
        now = self._rest[0]  # where not even the process started
        for line in ended.lines:
            now = line.get("importing", now)
            if "failed" in line:
                told[line["failed"]] = line["reason"]
            elif "imported" in line:
                told[line["imported"]] = ""
            self.device = line.get("device", self.device)
        if now not in told or ended.how:  # the latter: as torch looked at its device
            how = ended.how or "exited with status 0"
            told[now] = f"its process {how}. {ended.last_words}".strip()
        return told

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def look_at_core(requirements: Iterable[Requirement]) -> Iterator[Finding]:
    """Yield what is installed of what all of Penstock needs. It has been imported already."""
    for requirement in requirements:
        if requirement.extra:
            continue
        library = installed(requirement.name)
        found = library.version or "not installed as a package"
        values = {"version": library.version}
        if library.version is None or requirement.allows(library.version):
            yield Finding(_ENVIRONMENT, requirement.name, found, values=values)
            continue
        remedy = f'Penstock needs {requirement}: pip install -U "{requirement}"'
        yield Finding(_ENVIRONMENT, requirement.name, found, remedy, "problem", values)


def look_at_extras(
    extras: Iterable[Extra], libraries: Mapping[str, InstalledLibrary], reasons: Mapping[str, str]
) -> Iterator[Finding]:
    """Yield for each extra whether its libraries are installed, new enough, and can be imported.

    Args:
        extras: Of Penstock.
        libraries: What is installed, by the name in a requirement.
        reasons: By module, why it cannot be imported; "" if it can.
    """
    for extra in extras:
        yield _look_at(extra, libraries, reasons)
    yield from _two_opencvs()


def _look_at(
    extra: Extra, libraries: Mapping[str, InstalledLibrary], reasons: Mapping[str, str]
) -> Finding:
    here = [(needed, libraries[needed.name]) for needed in extra.requirements]
    values = {"libraries": {library.name: library.version for _, library in here}}
    shown = ", ".join(f"{lib.name} {lib.version}" for _, lib in here if lib.version)
    broken = [lib for _, lib in here if lib.version and reasons.get(lib.module)]
    if broken:
        names = [library.name for library in broken]
        why = "; ".join(f"import {lib.module}: {reasons[lib.module]}" for lib in broken)
        remedy = (
            f"Install it anew (pip install --force-reinstall {' '.join(names)}), or repair what"
        )
        remedy += " it names."
        if "torch" in names:
            remedy += " Give pip the --index-url of torch's build (CPU, CUDA), or it takes another."
        return Finding(_EXTRAS, extra.name, f"{shown}; {why}", remedy, "problem", values)
    missing = [needed.name for needed, library in here if library.version is None]
    if missing:
        found = f"not installed ({', '.join(missing)} missing); if you want it: "
        found += install_command(extra.name)
        return Finding(_EXTRAS, extra.name, found, values=values)
    old = [needed for needed, lib in here if lib.version and not needed.allows(lib.version)]
    if old:
        remedy = f"Penstock needs {', '.join(map(str, old))}: {install_command(extra.name)} -U"
        return Finding(_EXTRAS, extra.name, shown, remedy, "advice", values)
    return Finding(_EXTRAS, extra.name, shown, values=values)


def _two_opencvs() -> Iterator[Finding]:
    versions = {}
    for name in _OPENCVS:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if len(set(versions.values())) > 1:
        yield Finding(
            _EXTRAS,
            "OpenCV",
            ", ".join(f"{name} {version}" for name, version in versions.items())
            + ": all of them write the same folder, cv2",
            f"Files of different versions lie in it: pip uninstall {' '.join(versions)}, then "
            "install one.",
            "advice",
            dict(versions),
        )
