# SPDX-License-Identifier: Apache-2.0
"""The options of `penstock stats` that choose a sampler, and the sampler that they mean."""

from __future__ import annotations

import math
import os
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.errors import ConfigError
from penstock.lines import amount

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.data.ragged import RaggedArray
    from penstock.sampling.samplers import IndexSampler

__all__ = [
    "Alpha",
    "Beta",
    "Exact",
    "NumSamples",
    "SamplerChoice",
    "SamplerKind",
    "SamplerName",
    "Seed",
    "Threshold",
]


class SamplerKind(StrEnum):
    """Samplers that the command line knows."""

    natural = "natural"
    balanced = "balanced"
    effective = "effective"
    repeat_factor = "repeat-factor"
    class_aware = "class-aware"


SamplerName = Annotated[
    SamplerKind | None,
    typer.Option(
        "--sampler",
        help="Show the balance of classes before and after it. Labels are enough; only samples of "
        "a module:name that does not know its labels are read.",
    ),
]
Alpha = Annotated[
    float | None,
    typer.Option(
        min=0,
        metavar="A",
        help="Of balanced: 0 is natural, 0.5 the square root, 1 equal.",
        show_default="1",
    ),
]
Beta = Annotated[
    float | None,
    typer.Option(
        min=0, max=1, metavar="B", help="Of effective: below 1; near 1 is equal.",
        show_default="0.999",
    ),
]  # fmt: skip
Threshold = Annotated[
    float | None,
    typer.Option(
        min=0,
        max=1,
        metavar="T",
        help="Of repeat-factor, 0.5 for 50 %: images of a class that a smaller share of all images "
        "has are repeated.",
    ),
]
NumSamples = Annotated[
    str | None,
    typer.Option(
        metavar="N",
        help='Samples in an epoch; of balanced and effective also "oversample", "undersample".',
        show_default="as the sampler has it",
    ),
]
Exact = Annotated[
    bool, typer.Option("--exact", help="Of balanced, effective: exact counts, not by chance.")
]
Seed = Annotated[
    int | None,
    typer.Option(min=0, metavar="N", help="Of the sampler's draws.", show_default="0"),
]

_OPTIONS_OF: Final[dict[SamplerKind, tuple[str, ...]]] = {
    SamplerKind.natural: (),
    SamplerKind.balanced: ("alpha", "num_samples", "exact", "seed"),
    SamplerKind.effective: ("beta", "num_samples", "exact", "seed"),
    SamplerKind.repeat_factor: ("threshold", "num_samples", "seed"),
    SamplerKind.class_aware: ("num_samples", "seed"),
}
_DEFAULTS: Final[dict[str, Any]] = {"alpha": 1.0, "beta": 0.999, "exact": False, "seed": 0}
_WORDS: Final = ("oversample", "undersample")
_WITH_WORDS: Final = (SamplerKind.balanced, SamplerKind.effective)


@dataclass(frozen=True, slots=True)
class SamplerChoice:
    """What the options say; None where one was not given.

    Example:
        >>> choice = SamplerChoice(SamplerKind.balanced, alpha=0.5)
        >>> choice.check()
        >>> str(choice)
        'balanced, alpha 0.5, seed 0'
        >>> SamplerChoice(SamplerKind.natural, beta=0.9).check()
        Traceback (most recent call last):
        penstock.errors.ConfigError: --beta is for --sampler effective; natural takes no ...
    """

    kind: SamplerKind | None = None
    alpha: float | None = None
    beta: float | None = None
    threshold: float | None = None
    num_samples: str | None = None
    exact: bool = False
    seed: int | None = None

    def check(self) -> None:
        """Raise `ConfigError` if an option is for another sampler, or one is missing."""
        options = self.options
        if self.kind is None:
            if options:
                option = _spelled(next(iter(options)))
                raise ConfigError(f"{option} is for a sampler: say which, with --sampler.")
            return
        for name in options:
            if name not in _OPTIONS_OF[self.kind]:
                raise ConfigError(_misplaced(name, self.kind))
        if self.kind == SamplerKind.repeat_factor and self.threshold is None:
            raise ConfigError(
                "--sampler repeat-factor needs --threshold: the share of the images, 0 to "
                "1, from which on a class is not repeated. LVIS has 0.001, where classes "
                "are many."
            )
        self._check_num_samples(self.kind)

    def _check_num_samples(self, kind: SamplerKind) -> None:
        given = self.num_samples
        if given is None:
            return
        if given.isascii() and given.isdigit() and given.strip("0"):
            _check_memory(given)
            return
        words = _WORDS if kind in _WITH_WORDS else ()
        if given in words:
            return
        also = "".join(f', or "{word}"' for word in words)
        raise ConfigError(
            f"--num-samples of --sampler {kind} is a number, at least 1{also}, but got {given!r}."
        )

    @property
    def options(self) -> dict[str, Any]:
        """Those that were given."""
        values = asdict(self)
        del values["kind"]
        # 0 is an option's value as any other.
        return {n: value for n, value in values.items() if value is not None and value is not False}

    @property
    def settings(self) -> dict[str, Any]:
        """All that the sampler takes: those that were given, and its defaults."""
        names = () if self.kind is None else _OPTIONS_OF[self.kind]
        of_kind = {name: _DEFAULTS[name] for name in names if name in _DEFAULTS}
        settings = {**of_kind, **self.options}
        if self.num_samples is not None and self.num_samples.isdigit():
            settings["num_samples"] = int(self.num_samples)
        elif self.num_samples is not None:
            settings["exact"] = True  # as these sizes are by themselves
        return {name: settings[name] for name in names if name in settings}

    def __str__(self) -> str:
        """Return it in a few words."""
        words = [str(self.kind)]
        for name, value in self.settings.items():
            said = f"{value:g}" if isinstance(value, float) else value
            if name != "exact":
                words.append(f"{name.replace('_', ' ')} {said}")
            elif value:
                words.append("exact")
        return ", ".join(words)

    def sampler_of(self, labels: NDArray[Any] | RaggedArray) -> IndexSampler:
        """Return the sampler for these labels.

        Raises:
            ConfigError: an option is out of range, or there is nothing to balance.
        """
        from penstock.sampling.class_balanced import ClassBalancedSampler
        from penstock.sampling.repeat_factor import RepeatFactorSampler
        from penstock.sampling.samplers import SequentialSampler

        if self.kind in (None, SamplerKind.natural):
            return SequentialSampler(labels)
        options = self.settings
        if self.kind == SamplerKind.repeat_factor:
            return RepeatFactorSampler(labels, **options)
        if self.kind == SamplerKind.class_aware:
            options["samples_per_class"] = 1
        if self.kind == SamplerKind.effective:
            options["alpha"] = "effective"
        return ClassBalancedSampler(labels, **options)


def _check_memory(num_samples: str) -> None:
    """Raise where the indices of an epoch would not fit the machine's memory."""
    if not hasattr(os, "sysconf"):  # as on Windows
        return
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    num_bytes = 8 * int(num_samples) if len(num_samples) < 20 else math.inf
    if num_bytes > most:
        raise ConfigError(
            f"--num-samples {num_samples}: the indices of such an epoch take {amount(num_bytes)}, "
            f"and this machine has {amount(most)} of memory. Give a smaller number."
        )


def _misplaced(name: str, kind: SamplerKind) -> str:
    takers = [str(taker) for taker, names in _OPTIONS_OF.items() if name in names]
    taken = ", ".join(map(_spelled, _OPTIONS_OF[kind])) or "no options"
    return f"{_spelled(name)} is for --sampler {' or '.join(takers)}; {kind} takes {taken}."


def _spelled(name: str) -> str:
    return f"--{name.replace('_', '-')}"
