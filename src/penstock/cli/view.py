# SPDX-License-Identifier: Apache-2.0
"""`penstock view`: a contact sheet of the batch that training would get."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.arguments import SOURCE_HELP
from penstock.cli.lines import printable, without_password
from penstock.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["view"]

_MOST_IMAGES: Final = 400  # more make a sheet that no viewer opens


def view(
    src: Annotated[
        str,
        typer.Argument(
            metavar="SRC",
            help=SOURCE_HELP + " Also YOLO's yaml, imglab's XML, or a list of images or landmarks.",
        ),
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The PNG file to write.")
    ],
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which part, as in VOC's and YOLO's.")
    ] = None,
    num_images: Annotated[
        int, typer.Option("-n", "--num-images", min=1, max=_MOST_IMAGES, help="Images to show.")
    ] = 16,
    seed: Annotated[int, typer.Option(min=0, help="Decides images and augmentation.")] = 0,
    epoch: Annotated[int, typer.Option(min=0, help="Of which epoch the first batch is.")] = 0,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Take the first images, not random ones.")
    ] = False,
    transform: Annotated[
        str | None,
        typer.Option(metavar="MODULE:NAME", help="A transform of samples, or what makes one."),
    ] = None,
    mosaic: Annotated[
        int | None,
        typer.Option(min=2, metavar="PIXELS", help="Mosaic of 4, each image of this longer side."),
    ] = None,
    columns: Annotated[int | None, typer.Option(min=1, help="Images in a row.")] = None,
    tile: Annotated[int, typer.Option(min=32, max=4096, help="Width of an image in pixels.")] = 360,
) -> None:
    """Draw a batch, augmented, with its boxes and landmarks.

    A contact sheet is written, as PNG. The batch is the first one that `Loader(dataset,
    batch_size=N, shuffle=True, seed=SEED)` gives, with the same random augmentation: what training
    would see.
    """
    from penstock.cli.named_dataset import dataset_named
    from penstock.vision.looking.contact_sheet import contact_sheet

    if not output.parent.is_dir() or output.is_dir():
        raise ConfigError(f"cannot write --output {output}: name a file in a folder that exists.")
    with dataset_named(src, split) as dataset:
        class_names: Any = getattr(dataset, "class_names", None)
        class_names = class_names or getattr(dataset, "classes", None) or ()
        seen = _augmented(dataset, transform, mosaic)
        samples = _first_batch(seen, num_images, seed, epoch, shuffle=not in_order)
        if not samples:
            raise ConfigError(f"{without_password(src)} has no samples.")
        sheet = contact_sheet(samples, tuple(class_names), columns=columns, tile_px=tile)
    _write(output, sheet)
    typer.echo(printable(f"{output}: {len(samples)} images, {sheet.shape[1]} x {sheet.shape[0]}"))


def _augmented(dataset: Any, transform: str | None, mosaic: int | None) -> Any:  # noqa: ANN401
    if mosaic is not None:
        from penstock.vision.transforms.mosaic import Mosaic

        dataset = Mosaic(dataset, mosaic)
    if transform is None:
        return dataset
    return _Transformed(dataset, _transform_named(transform))


class _Transformed:
    """The samples of a dataset, transformed: as dicts, or the image of a pair alone."""

    def __init__(self, dataset: Any, transform: Callable[[Any], Any]) -> None:  # noqa: ANN401
        self._dataset = dataset
        self._transform = transform

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        sample = self._dataset[index]
        if isinstance(sample, tuple) and sample:
            return (self._transform(sample[0]), *sample[1:])
        return self._transform(sample)

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("_") or name not in ("describe", "set_epoch"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _transform_named(text: str) -> Callable[[Any], Any]:
    from penstock.cli.sources import object_named

    with object_named(text) as found:
        if isinstance(found, type):
            found = found()
        if not callable(found):
            raise ConfigError(
                f"--transform {text} is of type {type(found).__qualname__} and cannot be called."
            )
        transform: Callable[[Any], Any] = found
        return transform


def _first_batch(
    dataset: Any,  # noqa: ANN401
    num_images: int,
    seed: int,
    epoch: int,
    *,
    shuffle: bool,
) -> list[Any]:
    from penstock.loader import Loader

    if not len(dataset):
        return []
    loader = Loader(dataset, num_images, shuffle=shuffle, seed=seed, collate_fn=_as_they_are)
    loader.set_epoch(epoch)
    samples: list[Any] = next(iter(loader))
    return samples


def _as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def _write(output: Path, sheet: Any) -> None:  # noqa: ANN401
    import cv2

    is_encoded, data = cv2.imencode(".png", sheet[..., ::-1])
    assert is_encoded
    try:
        output.write_bytes(data.tobytes())
    except OSError as error:
        raise ConfigError(f"cannot write --output {output}: {error.strerror}.") from error
