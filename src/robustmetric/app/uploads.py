"""Images from anybody: looked at before they are decoded, and refused in a sentence."""

from __future__ import annotations

from pathlib import Path

from torch import Tensor

from robustmetric.data.decode import (
    LONGEST,
    Channels,
    Fit,
    Size,
    decoded_or_reason,
    open_image,
    whole_images,
)
from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError

MEGABYTES, MEGAPIXELS = 10, 25


def read_upload(file: Path, size: Size, crop: int | None, channels: Channels, fit: Fit = "squeeze") -> Tensor:
    """Return an image `file` as a network gets it: (1, C, H, W) in [0, 1].

    It is brought to a `size` (height and width) as `fit` says, cut to the middle `crop` pixels if that is
    given, and brought to the `channels`. Of several frames the first counts. A file of more than 10 MB or 25
    megapixels is refused before it is decoded.

    >>> import tempfile
    >>> from PIL import Image
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     Image.new("L", (40, 30)).save(Path(folder, "a.png"))
    ...     read_upload(Path(folder, "a.png"), (16, 16), 8, 3).shape
    torch.Size([1, 3, 8, 8])
    """
    if (bytes_ := file.stat().st_size) > MEGABYTES * 10**6:
        raise UserError(
            f"the upload has {bytes_ / 10**6:.1f} MB, and may have {MEGABYTES}: save the image smaller"
        )
    with whole_images():
        if (found := _claimed(file)) is not None:
            width, height = found
            if width * height > MEGAPIXELS * 10**6 or max(found) > LONGEST:
                raise UserError(
                    f"the upload has {width} x {height} pixels; at most {MEGAPIXELS} million are taken, and "
                    f"{LONGEST} a side: save the image smaller"
                )
        pixels = decoded_or_reason(file, None, size, channels, fit)
    if isinstance(pixels, str):
        it = "it " if pixels.startswith(("is ", "has ", "unpacks ")) else ""
        raise UserError(f"the upload cannot be read as an image: {it}{pixels}")
    return ImageArray(pixels[None], crop)[:]


def _claimed(file: Path) -> tuple[int, int] | None:
    """Return the width and height that a file's header claims; None where it cannot be told."""
    try:
        with open_image(file) as image:
            return image.size
    except Exception:  # decoding it will say why
        return None
