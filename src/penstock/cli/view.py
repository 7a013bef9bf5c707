# SPDX-License-Identifier: Apache-2.0
"""`penstock view`: a contact sheet of the batch that training would get."""

from __future__ import annotations

import warnings
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import numpy as np
import typer

from penstock.cli import options
from penstock.cli.reasons import errors_in_code, reason_in_code, reason_of
from penstock.cli.terminal import check_output, write_output
from penstock.data.names import describe_sample
from penstock.errors import ConfigError, PenstockError
from penstock.lines import counted, say
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

_MOST_IMAGES: Final = 400  # more make a sheet that no viewer opens


@options.takes(list_columns=options.LIST_OPTIONS)
def view(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The PNG file to write.")
    ],
    src: Annotated[str | None, typer.Argument(metavar="SRC", help=options.ANY_SOURCE)] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Instead of SRC: a loader, or a function or class that makes one. Its batches are "
            "drawn as the model gets them.",
        ),
    ] = None,
    split: options.Split = None,
    num_images: Annotated[
        int, typer.Option("-n", "--num-images", min=1, max=_MOST_IMAGES, help="Images to show.")
    ] = 16,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Decides images and augmentation.", show_default="0")
    ] = None,
    transform: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A transform of samples, or its class."),
    ] = None,
    mosaic: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="PIXELS",
            help="Mosaic of 4, each image of this longer side, cut to it by "
            "RandomPerspective(PIXELS) as in training, unless --transform is given.",
        ),
    ] = None,
    bad_boxes: options.BadBoxesOption = None,
    columns: Annotated[int | None, typer.Option(min=1, help="Images in a row.")] = None,
    tile: Annotated[int, typer.Option(min=32, max=4096, help="Width of an image in pixels.")] = 360,
    *,
    list_columns: dict[str, Any],
) -> None:
    """Draw a batch, augmented, with its boxes and landmarks.

    A contact sheet is written, as PNG. The batch is the first one that `Loader(dataset,
    batch_size=N, shuffle=True, seed=SEED)` gives, with the same random augmentation: what training
    would see. With --loader it is what your own loader gives, from its first batch on. A sample
    that cannot be read has a line on stdout: its name, a tab, and the reason. The exit status is
    then 1.
    """
    import cv2

    from penstock.vision.drawing import contact_sheet

    if (src is None) == (loader is None):
        raise ConfigError("name SRC or --loader MODULE:NAME, one of the two.")
    check_output("--output", output)
    if output.suffix.lower() != ".png":
        raise ConfigError(f"--output {output}: a contact sheet is PNG; name a file so, as a.png.")
    if src is not None:
        policy = bad_boxes.value if bad_boxes else "fix"
        given = {"split": split, "columns": list_columns, "bad_boxes": policy}
        shown, names, failed = _samples_of(src, given, transform, mosaic, num_images, seed or 0)
    else:
        of_dataset = {
            "split": split, "seed": seed, "transform": transform, "mosaic": mosaic,
            "bad_boxes": bad_boxes, **list_columns,
        }  # fmt: skip
        used = [options.option_of(name) for name, value in of_dataset.items() if value is not None]
        if used:
            raise ConfigError(f"{used[0]} is not for --loader, which makes its batches itself.")
        (shown, names), failed = _samples_of_loader(str(loader), num_images), []
    if not shown:
        raise ConfigError(f"no image can be shown: {': '.join(failed[0])}")
    sheet = contact_sheet(shown, tuple(names), columns=columns, tile_px=tile)
    is_encoded, data = cv2.imencode(".png", sheet[..., ::-1])
    assert is_encoded
    write_output("--output", output, data.tobytes())
    for name, reason in failed:
        say(name, without_password(reason))
    lost = f" and {len(failed)} that cannot be read" if failed else ""
    say(f"{output}: {counted(len(shown), 'image')}{lost}, {sheet.shape[1]} x {sheet.shape[0]}")
    if failed:
        raise typer.Exit(1)


def _samples_of(
    src: str,
    given: dict[str, Any],
    transform: str | None,
    mosaic_px: int | None,
    num_images: int,
    seed: int,
) -> tuple[list[Any], Sequence[str], list[tuple[str, str]]]:
    """Return the first samples that training would get, names of classes, and bad samples."""
    from penstock.cli.sources import dataset_named, names_code
    from penstock.faults import FaultPolicy
    from penstock.loader import Loader

    change = None if transform is None else _transform_named(transform)
    with errors_in_code(src, is_code=names_code(src)), dataset_named(src, **given) as dataset:
        names = getattr(dataset, "class_names", None) or getattr(dataset, "classes", None) or ()
        if not len(dataset):
            raise ConfigError(f"{without_password(src)} has no samples.")
        if mosaic_px is not None:
            from penstock.vision import Mosaic, RandomPerspective

            dataset = Mosaic(dataset, mosaic_px, transform=change or RandomPerspective(mosaic_px))
        elif change is not None:
            dataset = _Transformed(dataset, change)
        loader: Loader[list[Any]] = Loader(
            dataset, num_images, shuffle=True, seed=seed, collate_fn=list,
            on_error=FaultPolicy("skip", max_failures=None),
        )  # fmt: skip
        with warnings.catch_warnings():  # they are said below
            warnings.filterwarnings("ignore", "epoch 0: .* bad sample", UserWarning)
            shown: list[Any] = next(iter(loader), [])
        failed = []
        for failure in loader.failures:
            is_of_data = isinstance(failure.error, (PenstockError, ValueError, OSError))
            reason = (reason_of if is_of_data else reason_in_code)(failure.error)
            failed.append((failure.name or f"sample {failure.index}", reason))
        return shown, names, failed


class _Transformed:
    """A dataset whose images, or samples that are dicts, are transformed."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:  # noqa: ANN401
        self.dataset = dataset
        self._transform = transform

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        sample = self.dataset[index]
        if isinstance(sample, tuple) and sample:  # an image and its class
            return (self._transform(sample[0]), *sample[1:])
        return self._transform(sample)

    def describe(self, index: int) -> str | None:
        return describe_sample(self.dataset, index)


def _transform_named(text: str) -> Callable[[Any], Any]:
    from penstock.cli.sources import object_made

    with errors_in_code(text):
        found = object_made(text, "__call__")

    def transform(sample: Any) -> Any:  # noqa: ANN401
        with errors_in_code(text):
            return found(sample)

    return transform


def _samples_of_loader(text: str, num_images: int) -> tuple[list[Any], Sequence[str]]:
    """Return the first images that a loader gives, and the names of the classes; () if not known.

    Raises:
        ConfigError: it is no loader, gives no batches, or gives batches without images.
    """
    from penstock.cli.sources import object_made
    from penstock.data.labels.known import class_names_of
    from penstock.vision.drawing import samples_of_batch

    samples: list[Any] = []
    with errors_in_code(text):
        loader = object_made(text, "__iter__")
        known = tuple(_normalizations(loader))
        for batch in loader:
            samples += samples_of_batch(batch, known)
            if len(samples) >= num_images:
                break
    if not samples:
        raise ConfigError(f"{text} gives no batches.")
    return samples[:num_images], class_names_of(getattr(loader, "dataset", None)) or ()


def _normalizations(loader: Any) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Yield each mean and standard deviation that a loader's parts say they normalise with."""
    parts = [getattr(getattr(loader, "dataset", None), "transform", None)]
    parts += [getattr(loader, name, None) for name in ("collate_fn", "device_transform")]
    for part in parts:  # grows while it is walked
        mean: Any = getattr(part, "mean", None)
        std: Any = getattr(part, "std", None)
        if np.ndim(mean) == np.ndim(std) == 1:
            yield mean, std
        parts += list(getattr(part, "transforms", ()))
