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

LONGEST = 16384  # pixels of a side that images may be resized to
LIMIT = 300_000_000  # bytes that an image may take when it is decoded: 100 megapixels in RGB

_ORIENTATION = 0x0112  # EXIF's number for the way up
_STRIP = 256  # rows that are laid on white at a time


def decoded(
    file: Path, box: Box | None, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8]:
    """Decode one file, or the box of it, into (H, W, C)."""
    with open_image(file) as image:
        return prepared(image, box, size, channels, fit)


def open_image(file: Path) -> Image.Image:
    """Open an image `file` of one of the formats that are read; its content decides, not its name."""
    if file.exists() and not file.is_file():  # a pipe might never end
        raise UserError("is not a file")
    return Image.open(file, formats=list(FORMATS))


def prepared(
    image: Image.Image, box: Box | None, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8]:
    """Bring an open image, or the box of it, into (H, W, C), as `decoded` does.

    An image that takes more than `LIMIT` bytes is decoded at a reduced scale if it is a JPEG file, and
    refused otherwise.
    """
    if _bytes(image) > LIMIT and size is not None and box is None and not image.info.get("progressive"):
        image.draft(None, (max(size), max(size)))
    if (needed := _bytes(image)) > LIMIT:
        raise UserError(
            f"has {image.width:,} x {image.height:,} pixels, which take {needed:,} bytes when decoded; "
            f"at most {LIMIT:,} are allowed: save it smaller"
        )
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


def _bytes(image: Image.Image) -> int:
    return image.width * image.height * max(3, len(image.getbands()))


def decoded_or_reason(
    file: Path, box: Box | None, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8] | str:
    """Decode one file, or say in a few words why that fails.

    >>> decoded_or_reason(Path("nowhere.png"), None, None, 3)
    'No such file or directory'
    """
    try:
        return decoded(file, box, size, channels, fit)
    except MemoryError:  # the file is not to blame: it is not left out as a broken one
        raise UserError(
            f"there is not enough memory to decode {file}: close other programs, or save it smaller"
        ) from None
    except Exception as error:  # damaged files make Pillow's readers raise nearly anything
        if isinstance(error, UnidentifiedImageError):
            empty = file.stat().st_size == 0
            return (
                "is empty (0 bytes)" if empty else "is not PNG, JPEG, WebP, BMP, GIF, TIFF or PPM, or damaged"
            )
        if isinstance(error, OSError) and error.strerror:
            return error.strerror
        return str(error) or type(error).__name__


def resized(
    image: Image.Image, size: Size | None, channels: Channels, fit: Fit = "squeeze"
) -> NDArray[np.uint8]:
    """Convert and resize an 8-bit image into (H, W, C)."""
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


def header(file: Path) -> tuple[Size, str]:
    """Return the size of the upright image in a `file` and its mode; nothing is decoded."""
    with open_image(file) as image:
        # Pillow would decode a PNG to look for EXIF behind the pixels.
        has_exif = image.format != "PNG" or "exif" in image.info
        turned = has_exif and 5 <= _orientation(image) <= 8
        return ((image.width, image.height) if turned else (image.height, image.width)), image.mode


def one_size(images: Iterable[tuple[Path, Box | None]]) -> Size:
    """Return the size that all images, or their boxes, have, from their headers alone.

    >>> one_size([(Path("nowhere.png"), (0, 0, 20, 10))])
    (10, 20)
    """
    sizes: dict[Size, Path] = {}
    for file, box in images:
        try:
            sizes.setdefault((box[3] - box[1], box[2] - box[0]) if box else header(file)[0], file)
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

    Pillow's own limit of pixels gives way to `LIMIT`, and its warnings, which name no file, are left out.
    """
    before = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, None
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", module=r"PIL\.")
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = before


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
    if not image.has_transparency_data:
        return image
    # White is what product photos are shown on; dropping alpha would bring up colours nobody sees.
    flat = Image.new("RGB", image.size)
    opaque = image if image.mode == "RGBA" else image.convert("RGBA")
    for top in range(0, image.height, _STRIP):  # strips, because each step takes a copy
        strip = opaque.crop((0, top, image.width, min(top + _STRIP, image.height)))
        white = Image.new("RGBA", strip.size, "white")
        flat.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return flat
