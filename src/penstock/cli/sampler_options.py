# SPDX-License-Identifier: Apache-2.0
"""The sampler that options of `penstock stats` choose."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from penstock.cli.list_options import option_of
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from penstock.data.ragged import RaggedArray
    from penstock.sampling.samplers import IndexSampler

__all__ = ["SamplerChoice", "SamplerKind"]


class SamplerKind(StrEnum):
    """Samplers that the command line knows."""

    natural = "natural"
    balanced = "balanced"
    effective = "effective"
    repeat_factor = "repeat-factor"
    class_aware = "class-aware"


# What each takes, with its defaults.
_OPTIONS_OF: Final[dict[SamplerKind, dict[str, Any]]] = {
    SamplerKind.natural: {},
    SamplerKind.balanced: {"alpha": 1.0, "num_samples": None, "exact": False, "seed": 0},
    SamplerKind.effective: {"beta": 0.999, "num_samples": None, "exact": False, "seed": 0},
    SamplerKind.repeat_factor: {"threshold": None, "num_samples": None, "seed": 0},
    SamplerKind.class_aware: {"num_samples": None, "seed": 0},
}
_WORDS: Final = ("oversample", "undersample")
_MOST_DIGITS: Final = 9  # the indices of a billion samples take 8 GB


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

    @property
    def options(self) -> dict[str, Any]:
        """Those that were given."""
        values = {name: getattr(self, name) for name in (f.name for f in fields(self)[1:])}
        # 0 is an option's value as any other.
        return {n: value for n, value in values.items() if value is not None and value is not False}

    @property
    def settings(self) -> dict[str, Any]:
        """All that the sampler takes: those that were given, and its defaults."""
        settings = {**_OPTIONS_OF[self.kind or SamplerKind.natural], **self.options}
        if self.num_samples in _WORDS:
            settings["exact"] = True  # as these sizes are by themselves
        elif self.num_samples is not None:
            settings["num_samples"] = int(self.num_samples)
        return {name: value for name, value in settings.items() if value is not None}

    def check(self) -> None:
        """Raise `ConfigError` if an option is for another sampler, or one is missing."""
        for name in self.options:
            if self.kind is None:
                raise ConfigError(f"{option_of(name)} is for a sampler: say which, with --sampler.")
            if name not in _OPTIONS_OF[self.kind]:
                takers = [str(taker) for taker, names in _OPTIONS_OF.items() if name in names]
                taken = ", ".join(map(option_of, _OPTIONS_OF[self.kind])) or "no options"
                raise ConfigError(
                    f"{option_of(name)} is for --sampler {' or '.join(takers)}; {self.kind} takes "
                    f"{taken}."
                )
        if self.kind == SamplerKind.repeat_factor and self.threshold is None:
            raise ConfigError(
                "--sampler repeat-factor needs --threshold: the share of the images, 0 to "
                "1, from which on a class is not repeated. LVIS has 0.001, where classes "
                "are many."
            )
        given = "1" if self.num_samples is None else self.num_samples
        is_number = given.isascii() and given.isdigit() and len(given) <= _MOST_DIGITS
        words = _WORDS if self.kind in (SamplerKind.balanced, SamplerKind.effective) else ()
        if not (is_number and int(given)) and given not in words:
            also = "".join(f', or "{word}"' for word in words)
            raise ConfigError(
                f"--num-samples of --sampler {self.kind} is a number from 1 to "
                f"{10**_MOST_DIGITS - 1:,}{also}, but got {given!r:.40}."
            )

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

        match self.kind:
            case SamplerKind.balanced:
                return ClassBalancedSampler(labels, **self.settings)
            case SamplerKind.effective:
                return ClassBalancedSampler(labels, alpha="effective", **self.settings)
            case SamplerKind.class_aware:
                return ClassBalancedSampler(labels, samples_per_class=1, **self.settings)
            case SamplerKind.repeat_factor:
                return RepeatFactorSampler(labels, **self.settings)
        return SequentialSampler(labels)
