# SPDX-License-Identifier: Apache-2.0
"""`penstock view`: a contact sheet of the batch that training would get."""

from __future__ import annotations

import contextlib
import inspect
from pathlib import Path  # noqa: TC003 - typer reads the annotations at run time
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from penstock.cli.arguments import ANNOTATED_HELP, SOURCE_HELP, BadBoxesOption
from penstock.cli.list_options import option_of, takes_list_options
from penstock.cli.outputs import check_output, write_output
from penstock.cli.reasons import errors_in_code, reason_in_code, reason_of
from penstock.errors import ConfigError, PenstockError
from penstock.lines import say
from penstock.plural import counted
from penstock.redact import without_password

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["view"]

_MOST_IMAGES: Final = 400  # more make a sheet that no viewer opens


@takes_list_options
def view(
    output: Annotated[
        Path, typer.Option("-o", "--output", metavar="FILE", help="The PNG file to write.")
    ],
    src: Annotated[
        str | None, typer.Argument(metavar="SRC", help=SOURCE_HELP + ANNOTATED_HELP)
    ] = None,
    loader: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Instead of SRC: a loader, or a function or class that makes one. Its batches are "
            "drawn as the model gets them.",
        ),
    ] = None,
    split: Annotated[
        str | None, typer.Option(metavar="NAME", help="Which part, as in VOC's and YOLO's.")
    ] = None,
    num_images: Annotated[
        int, typer.Option("-n", "--num-images", min=1, max=_MOST_IMAGES, help="Images to show.")
    ] = 16,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Decides images and augmentation.", show_default="0")
    ] = None,
    epoch: Annotated[int, typer.Option(min=0, help="Of which epoch the first batch is.")] = 0,
    in_order: Annotated[
        bool, typer.Option("--in-order", help="Take the first images, not random ones.")
    ] = False,
    transform: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="A transform of samples; or a class, or a function without arguments, that makes "
            "one.",
        ),
    ] = None,
    mosaic: Annotated[
        int | None,
        typer.Option(
            min=2,
            metavar="PIXELS",
            help="Mosaic of 4, each image of this longer side, cut to it by "
            "RandomPerspective(PIXELS) as in training, unless --transform cuts it.",
        ),
    ] = None,
    bad_boxes: BadBoxesOption = None,
    columns: Annotated[int | None, typer.Option(min=1, help="Images in a row.")] = None,
    rows: Annotated[int | None, typer.Option(min=1, help="Rows, instead of --columns.")] = None,
    tile: Annotated[int, typer.Option(min=32, max=4096, help="Width of an image in pixels.")] = 360,
    *,
    list_columns: Mapping[str, Any],
) -> None:
    """Draw a batch, augmented, with its boxes and landmarks.

    A contact sheet is written, as PNG. The batch is the first one that `Loader(dataset,
    batch_size=N, shuffle=True, seed=SEED)` gives, with the same random augmentation: what training
    would see. With --loader it is what your own loader gives, from its first batch on. A sample
    that cannot be shown has its error in the place of the image, and a line on stdout: its name, a
    tab, and the reason. The exit status is then 1.
    """
    from penstock.cli.named_dataset import dataset_named
    from penstock.cli.sources import names_a_dataset
    from penstock.cli.viewed_batches import samples_of_loader
    from penstock.vision.drawing import Unshown, contact_sheet

    if (src is None) == (loader is None):
        raise ConfigError("name SRC or --loader MODULE:NAME, one of the two.")
    check_output("--output", output)
    if output.suffix.lower() != ".png":
        raise ConfigError(
            f"cannot write --output {output}: a contact sheet is a PNG file; name one that ends in "
            ".png."
        )
    if rows is not None and columns is not None:
        raise ConfigError("--rows and --columns: give one of them.")
    if loader is not None:
        of_dataset = {
            "--split": split, "--seed": seed, "--in-order": in_order or None,
            "--transform": transform, "--mosaic": mosaic, "--bad-boxes": bad_boxes,
            **{option_of(name): value for name, value in list_columns.items()},
        }  # fmt: skip
        for option, value in of_dataset.items():
            if value is not None:
                raise ConfigError(f"{option} is not for --loader, which makes its batches itself.")
        with contextlib.ExitStack() as stack:
            found, names = samples_of_loader(loader, stack, num_images, epoch)
        in_a_row = _in_a_row(len(found), columns, rows)
        sheet = contact_sheet(found, names, columns=in_a_row, tile_px=tile)
        _write(output, sheet)
        _say(output, len(found), sheet)
        return
    assert src is not None
    with contextlib.ExitStack() as stack:
        with errors_in_code(src) if names_a_dataset(src) else contextlib.nullcontext():
            named = dataset_named(
                src, split, list_columns, bad_boxes=bad_boxes.policy if bad_boxes else "fix"
            )
            dataset = stack.enter_context(named)
        class_names: Any = getattr(dataset, "class_names", None)
        class_names = class_names or getattr(dataset, "classes", None) or ()
        change = None if transform is None else _transform_named(transform, stack)
        samples = _first_batch(
            _TrainingSamples(dataset, change, mosaic),
            num_images,
            seed or 0,
            epoch,
            shuffle=not in_order,
        )
        if not samples:
            raise ConfigError(f"{without_password(src)} has no samples.")
        shown = _checked(samples)
        in_a_row = _in_a_row(len(shown), columns, rows)
        sheet = contact_sheet(shown, tuple(class_names), columns=in_a_row, tile_px=tile)
    _write(output, sheet)
    failed = [sample for sample in shown if isinstance(sample, Unshown)]
    for one in failed:
        say(one.name, without_password(one.reason))
    lost = f", {len(failed)} of them not to be shown" if failed else ""
    _say(output, len(samples), sheet, lost)
    if failed:
        raise typer.Exit(1)


def _in_a_row(num_images: int, columns: int | None, rows: int | None) -> int | None:
    return columns if rows is None else -(-num_images // rows)


def _say(output: Path, num_images: int, sheet: Any, lost: str = "") -> None:  # noqa: ANN401
    size = f"{sheet.shape[1]} x {sheet.shape[0]}"
    say(f"{output}: {counted(num_images, 'image')}{lost}, {size}")


class _Failed:
    """What stands for a sample that could not be made."""

    def __init__(self, name: str, error: Exception) -> None:
        self.name = name
        self.error = error


def _checked(samples: list[Any]) -> list[Any]:
    """Return samples as they are drawn; where there is none at all, raise what was wrong."""
    from penstock.vision.drawing import Unshown

    failed = [sample for sample in samples if isinstance(sample, _Failed)]
    if len(failed) == len(samples):
        first = failed[0]
        if isinstance(first.error, PenstockError):
            raise first.error
        raise ConfigError(f"no image can be shown: {first.name}: {_reason(first.error)}")
    return [
        Unshown(sample.name, _reason(sample.error)) if isinstance(sample, _Failed) else sample
        for sample in samples
    ]


def _reason(error: Exception) -> str:
    is_of_data = isinstance(error, (PenstockError, ValueError, OSError))
    return reason_of(error) if is_of_data else reason_in_code(error)


class _TrainingSamples:
    """The samples of a dataset as training gets them; the errors of those that cannot be made."""

    def __init__(
        self,
        dataset: Any,  # noqa: ANN401
        transform: Callable[[Any], Any] | None,
        mosaic_px: int | None,
    ) -> None:
        self._dataset = dataset
        self._transform = transform
        self._cut: Callable[[Any], Any] | None = None
        self._canvas_px = (2 * mosaic_px, 2 * mosaic_px) if mosaic_px else None
        if mosaic_px is not None:
            from penstock.vision.transforms.geometry import RandomPerspective
            from penstock.vision.transforms.mixing import Mosaic

            self._dataset = Mosaic(dataset, mosaic_px)
            self._cut = RandomPerspective(mosaic_px)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        try:
            return self._cut_out(self._transformed(self._dataset[index]))
        except Exception as error:
            return _Failed(self._name(index), error)

    def _transformed(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample transformed: a dict, or the image of a pair alone."""
        if self._transform is None:
            return sample
        if isinstance(sample, tuple) and sample:
            return (self._transform(sample[0]), *sample[1:])
        return self._transform(sample)

    def _cut_out(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a mosaic cut to its size, if it still is the whole canvas."""
        if self._cut is None or not isinstance(sample, dict):
            return sample
        shape = getattr(sample.get("image"), "shape", ())
        return self._cut(sample) if tuple(shape[:2]) == self._canvas_px else sample

    def _name(self, index: int) -> str:
        from penstock.data.names import describe_sample

        return describe_sample(self._dataset, index) or f"sample {index}"

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("_") or name not in ("describe", "set_epoch"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _transform_named(text: str, stack: contextlib.ExitStack) -> Callable[[Any], Any]:
    """Return a transform; until the stack is left, it may import from the current folder."""
    from penstock.cli.sources import object_named

    with errors_in_code(text):
        found = stack.enter_context(object_named(text))
        takes_none, takes_one = _takes(found), _takes(found, "a sample")
        if isinstance(found, type) or (takes_none and not takes_one):
            found = found()
        elif callable(found) and not takes_one:
            raise ConfigError(
                f"--transform {text} takes {inspect.signature(found)}: a transform takes one "
                "sample, and what makes one takes nothing."
            )
    if not callable(found):
        raise ConfigError(
            f"--transform {text} is of type {type(found).__qualname__} and cannot be called."
        )
    transform: Callable[[Any], Any] = found
    return transform


def _takes(found: Any, *arguments: object) -> bool:  # noqa: ANN401
    """Return whether something can be called with these; what nobody can tell takes a sample."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return bool(arguments)
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


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
    write_output("--output", output, data.tobytes())
