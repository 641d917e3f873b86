"""One image file into 8-bit pixels: upright, cut to its box, on white, in the size and channels asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageFile, ImageOps, UnidentifiedImageError

from robustmetric.data.base import Box
from robustmetric.errors import UserError

Size = tuple[int, int]  # height, width
Channels = Literal[1, 3]
Fit = Literal["squeeze", "crop", "pad"]
"""How an image of another aspect becomes a square: squeezed, its middle, or whole with white beside it."""

FORMATS = {
    "JPEG": (".jpg", ".jpeg"),
    "PNG": (".png",),
    "WEBP": (".webp",),
    "BMP": (".bmp",),
    "GIF": (".gif",),
    "TIFF": (".tif", ".tiff"),
    "PPM": (".ppm", ".pgm", ".pbm", ".pnm"),
}
"""What images may be, by content: others of Pillow's readers start programs or open further files. Of each,
the endings of its files."""

SUFFIXES = tuple(chain.from_iterable(FORMATS.values()))
"""The endings of files that are taken for images."""

LONGEST = 16384  # pixels of a side that images may be brought to

_ORIENTATION = 0x0112  # EXIF's number for the way up


def decoded(
    file: Path, box: Box | None, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8]:
    """Decode one file, or the box of it, into (H, W, C).

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("RGB", (20, 10), "red").save(Path(folder, "red.png"))
    ...     decoded(Path(folder, "red.png"), (0, 0, 5, 10), None, 3).shape
    (10, 5, 3)
    """
    with open_image(file) as image:
        return prepared(image, box, size, channels, fit)


def open_image(file: Path) -> Image.Image:
    """Open an image `file` of one of the formats that are read; its content decides, not its name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "a.png").write_bytes(b"%!PS-Adobe-3.0 EPSF-3.0")
    ...     open_image(Path(folder, "a.png"))
    Traceback (most recent call last):
    ...
    PIL.UnidentifiedImageError: cannot identify image file ...
    """
    return Image.open(file, formats=list(FORMATS))


def prepared(
    image: Image.Image, box: Box | None, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8]:
    """Bring an open image, or the box of it, into (H, W, C), as `decoded` does.

    >>> prepared(Image.new("RGBA", (20, 10)), None, (4, 4), 3).tolist()[0][0]
    [255, 255, 255]
    """
    image.load()
    picture = _eight_bits(_upright(image))
    if box is not None:
        if box[2] > picture.width or box[3] > picture.height:
            raise UserError(
                f"has {picture.width} x {picture.height} pixels (width x height), beyond which its box "
                f"{box} (left, top, right, bottom) reaches; correct the box"
            )
        picture = picture.crop(box)
    return resized(picture, size, channels, fit)


def decoded_or_reason(
    file: Path, box: Box | None, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8] | str:
    """Decode one file, or say in a few words why that fails.

    >>> decoded_or_reason(Path("nowhere.png"), None, None, 3)
    'No such file or directory'
    """
    try:
        return decoded(file, box, size, channels, fit)
    except MemoryError:
        raise
    except Exception as error:  # damaged files make Pillow's readers raise nearly anything
        return _reason(file, error)


def resized(
    image: Image.Image, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8]:
    """Convert and resize an 8-bit image into (H, W, C).

    >>> resized(Image.new("L", (4, 2)), (4, 4), 1, "pad")[:, 0, 0].tolist()
    [255, 0, 0, 255]
    """
    mode = "RGB" if channels == 3 else "L"
    if image.mode != mode:
        image = image.convert(mode)
    if size is not None and (image.height, image.width) != size:
        image = _FITS[fit](image, (size[1], size[0]), Image.Resampling.BILINEAR)
    pixels: NDArray[np.uint8] = np.asarray(image)
    return pixels.reshape(image.height, image.width, channels)


def _padded(image: Image.Image, size: tuple[int, int], method: int) -> Image.Image:
    # Of an image as thin as a line Pillow would keep no pixel.
    whole = min(image.width, image.height * size[0]), min(image.height, image.width * size[1])
    return ImageOps.pad(image.resize(whole, method), size, method, color="white")


_FITS: dict[Fit, Callable[[Image.Image, tuple[int, int], int], Image.Image]] = {
    "squeeze": Image.Image.resize,
    "crop": ImageOps.fit,
    "pad": _padded,
}


def upright_size(image: Image.Image) -> tuple[int, int]:
    """Return width and height of an open image once it is turned upright.

    >>> upright_size(Image.new("L", (20, 10)))
    (20, 10)
    """
    return (image.height, image.width) if 5 <= _orientation(image) <= 8 else image.size


def one_size(images: Iterable[tuple[Path, Box | None]]) -> Size:
    """Return the size that all images, or their boxes, have, from their headers alone.

    >>> one_size([(Path("nowhere.png"), (0, 0, 20, 10))])
    (10, 20)
    """
    sizes: dict[Size, Path] = {}
    for file, box in images:
        try:
            sizes.setdefault(_box_size(box) if box else _file_size(file), file)
        except Exception:  # noqa: S112  decoding it will say why
            continue
        if len(sizes) > 1:
            (size, first), (other, second) = sizes.items()
            raise UserError(
                f"{first} is {size[0]} x {size[1]} pixels (height x width) and {second} is "
                f"{other[0]} x {other[1]}; give the size that all are to have",
                parameter="size",
            )
    return next(iter(sizes), (1, 1))  # no file opens: any size will do to list the reasons


@contextmanager
def whole_images() -> Iterator[None]:
    """Refuse truncated images, even where another library has told Pillow to fill them with grey.

    What Pillow would warn of names no file, and is left out: images are read, or told with a reason.

    >>> with whole_images():
    ...     ImageFile.LOAD_TRUNCATED_IMAGES
    False
    """
    before = ImageFile.LOAD_TRUNCATED_IMAGES
    ImageFile.LOAD_TRUNCATED_IMAGES = False
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            warnings.simplefilter("ignore", Image.DecompressionBombWarning)
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES = before


def _orientation(image: Image.Image) -> int:
    try:
        return int(image.getexif().get(_ORIENTATION, 1))
    except Exception:  # a damaged EXIF block says nothing about the pixels
        return 1


def _upright(image: Image.Image) -> Image.Image:
    return ImageOps.exif_transpose(image) if 2 <= _orientation(image) <= 8 else image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Bring an image of any mode to one that Pillow converts rightly to RGB and to grey."""
    if image.mode.startswith("I"):
        values = np.asarray(image)
        if values.min() < 0 or values.max() > 65535:
            raise UserError("has 32-bit pixels, whose range is not known; save it with 8 or 16 bits")
        # Pillow's own conversion has clipped at 255 or cut off the low byte, by version.
        return Image.fromarray(((values.astype(np.uint32) + 128) // 257).astype(np.uint8))
    if image.mode == "F":
        raise UserError("has floating-point pixels, whose range is not known; save it with 8 or 16 bits")
    if image.has_transparency_data:
        # White is what product photos are shown on; dropping alpha would bring up colours nobody sees.
        opaque = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", opaque.size, "white"), opaque).convert("RGB")
    return image


def _reason(file: Path, error: Exception) -> str:
    if isinstance(error, UnidentifiedImageError):
        empty = file.stat().st_size == 0
        return "is empty (0 bytes)" if empty else "is not PNG, JPEG, WebP, BMP, GIF, TIFF or PPM, or damaged"
    if isinstance(error, Image.DecompressionBombError):
        limit = 2 * (Image.MAX_IMAGE_PIXELS or 0)
        return f"unpacks to more than {limit:,} pixels, as files do that fill the memory; save it smaller"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return str(error) or type(error).__name__


def _box_size(box: Box) -> Size:
    return box[3] - box[1], box[2] - box[0]


def _file_size(file: Path) -> Size:
    with open_image(file) as image:
        width, height = upright_size(image)
        return height, width
