# SPDX-License-Identifier: Apache-2.0
"""`penstock view`: a contact sheet of the batch that training would get."""

from __future__ import annotations

import contextlib
import inspect
import numbers
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
    from collections.abc import Callable, Iterator, Sequence

__all__ = ["view"]

_MOST_IMAGES: Final = 400  # more make a sheet that no viewer opens
# Of a loader, which may normalise with a mean and a standard deviation.
_PARTS: Final = ("dataset", "transform", "transforms", "collate_fn", "device_transform")
_MOST_PARTS: Final = 100  # of a list: it may be the data
_DEEPEST: Final = 6


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
    list_columns: dict[str, Any],
) -> None:
    """Draw a batch, augmented, with its boxes and landmarks.

    A contact sheet is written, as PNG. The batch is the first one that `Loader(dataset,
    batch_size=N, shuffle=True, seed=SEED)` gives, with the same random augmentation: what training
    would see. With --loader it is what your own loader gives, from its first batch on. A sample
    that cannot be shown has its error in the place of the image, and a line on stdout: its name, a
    tab, and the reason. The exit status is then 1.
    """
    import cv2

    from penstock.cli.sources import dataset_named, errors_of_code
    from penstock.loader import Loader
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
    with contextlib.ExitStack() as stack:
        if loader is not None:
            of_dataset = {
                "--split": split, "--seed": seed, "--in-order": in_order or None,
                "--transform": transform, "--mosaic": mosaic, "--bad-boxes": bad_boxes,
                **{option_of(name): value for name, value in list_columns.items()},
            }  # fmt: skip
            for option, value in of_dataset.items():
                if value is not None:
                    raise ConfigError(
                        f"{option} is not for --loader, which makes its batches itself."
                    )
            shown, names = _samples_of_loader(loader, stack, num_images, epoch)
        else:
            policy = bad_boxes.policy if bad_boxes else "fix"
            named = dataset_named(str(src), split, list_columns, bad_boxes=policy)
            with errors_of_code(str(src)):
                dataset = stack.enter_context(named)
            names = getattr(dataset, "class_names", None) or getattr(dataset, "classes", None) or ()
            change = None if transform is None else _transform_named(transform, stack)
            viewed = _TrainingSamples(dataset, change, mosaic)
            if not len(viewed):
                raise ConfigError(f"{without_password(str(src))} has no samples.")
            batches: Loader[list[Any]] = Loader(
                viewed, num_images, shuffle=not in_order, seed=seed or 0, collate_fn=list
            )
            batches.set_epoch(epoch)
            shown = next(iter(batches))
        failed = [sample for sample in shown if isinstance(sample, Unshown)]
        if len(failed) == len(shown):
            raise ConfigError(f"no image can be shown: {failed[0].name}: {failed[0].reason}")
        in_a_row = columns if rows is None else -(-len(shown) // rows)
        sheet = contact_sheet(shown, tuple(names), columns=in_a_row, tile_px=tile)
    is_encoded, data = cv2.imencode(".png", sheet[..., ::-1])
    assert is_encoded
    write_output("--output", output, data.tobytes())
    for one in failed:
        say(one.name, without_password(one.reason))
    lost = f", {len(failed)} of them not to be shown" if failed else ""
    size = f"{sheet.shape[1]} x {sheet.shape[0]}"
    say(f"{output}: {counted(len(shown), 'image')}{lost}, {size}")
    if failed:
        raise typer.Exit(1)


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
            from penstock.vision import Mosaic, RandomPerspective

            self._dataset = Mosaic(dataset, mosaic_px)
            self._cut = RandomPerspective(mosaic_px)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Any:  # noqa: ANN401
        try:
            return self._made(self._dataset[index])
        except Exception as error:
            from penstock.data.names import describe_sample
            from penstock.vision.drawing import Unshown

            name = describe_sample(self._dataset, index) or f"sample {index}"
            is_of_data = isinstance(error, (PenstockError, ValueError, OSError))
            return Unshown(name, reason_of(error) if is_of_data else reason_in_code(error))

    def _made(self, sample: Any) -> Any:  # noqa: ANN401
        """Return a sample transformed, and a mosaic cut if it still is the whole canvas."""
        if self._transform is not None and isinstance(sample, tuple) and sample:
            sample = (self._transform(sample[0]), *sample[1:])  # an image and its class
        elif self._transform is not None:
            sample = self._transform(sample)
        if self._cut is None or not isinstance(sample, dict):
            return sample
        shape = getattr(sample.get("image"), "shape", ())
        return self._cut(sample) if tuple(shape[:2]) == self._canvas_px else sample

    def __getattr__(self, name: str) -> Any:  # noqa: ANN401
        if name.startswith("_") or name not in ("describe", "set_epoch"):
            raise AttributeError(name)
        return getattr(self._dataset, name)


def _transform_named(text: str, stack: contextlib.ExitStack) -> Callable[[Any], Any]:
    """Return a transform; until the stack is left, it may import from the current folder."""
    from penstock.cli.sources import object_named

    with errors_in_code(text):
        found = stack.enter_context(object_named(text))
        if isinstance(found, type):
            found = found()
        elif callable(found) and not _takes(found, "a sample"):
            if not _takes(found):
                raise ConfigError(
                    f"--transform {text} takes {inspect.signature(found)}: a transform takes one "
                    "sample, and what makes one takes nothing."
                )
            found = found()
    if not callable(found):
        raise ConfigError(
            f"--transform {text} is of type {type(found).__qualname__} and cannot be called."
        )
    transform: Callable[[Any], Any] = found
    return transform


def _takes(found: Any, *arguments: object) -> bool:  # noqa: ANN401
    """Return whether something can be called with these; without a signature it takes a sample."""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return bool(arguments)
    try:
        signature.bind(*arguments)
    except TypeError:
        return False
    return True


def _samples_of_loader(
    text: str, stack: contextlib.ExitStack, num_images: int, epoch: int
) -> tuple[list[Any], Sequence[str]]:
    """Return the first images that a loader gives, and the names of the classes; () if not known.

    Raises:
        ConfigError: it is no loader, gives no batches, or gives batches without images.
    """
    from penstock.cli.loadable import loader_named
    from penstock.data.labels.known import class_names_of
    from penstock.vision.drawing import samples_of_batch

    loader = loader_named(text, stack)
    samples: list[Any] = []
    with errors_in_code(text):
        if epoch:
            if not hasattr(loader, "set_epoch"):
                raise ConfigError(f"--epoch: {text} has no method set_epoch.")
            loader.set_epoch(epoch)
        known = tuple(_normalizations(loader))
        for batch in loader:
            samples += samples_of_batch(batch, known)
            if len(samples) >= num_images:
                break
    if not samples:
        raise ConfigError(f"{text} gives no batches.")
    return samples[:num_images], class_names_of(getattr(loader, "dataset", None)) or ()


def _normalizations(part: Any, depth: int = 0) -> Iterator[tuple[Any, Any]]:  # noqa: ANN401
    """Yield each mean and standard deviation that a loader's parts say they normalise with."""
    if isinstance(part, (list, tuple)):
        for item in part[:_MOST_PARTS]:
            yield from _normalizations(item, depth + 1)
        return
    mean, std = getattr(part, "mean", None), getattr(part, "std", None)
    if _are_numbers(mean) and _are_numbers(std):
        yield mean, std
    if depth < _DEEPEST:
        for name in _PARTS:
            inner = getattr(part, name, None)
            if inner is not None and inner is not part:
                yield from _normalizations(inner, depth + 1)


def _are_numbers(value: Any) -> bool:  # noqa: ANN401
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(item, numbers.Real) for item in value)
    return isinstance(value, numbers.Real) or getattr(value, "ndim", None) == 1
