"""Uploads: images of every kind are read as they are elsewhere, and what is none is told in a sentence."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from robustmetric.app import uploads
from robustmetric.app.uploads import MEGABYTES, read_upload
from robustmetric.data.decode import Channels
from robustmetric.data.inputs import Inputs
from robustmetric.errors import UserError

DAMAGED = "it is not PNG, JPEG, WebP, BMP, GIF, TIFF or PPM, or damaged"


def noise(mode: str, height: int = 20, width: int = 30) -> Image.Image:
    channels = len(Image.new(mode, (1, 1)).getbands())
    values = np.random.default_rng(0).integers(0, 256, (height, width, channels), dtype=np.uint8)
    return Image.fromarray(values[..., 0] if channels == 1 else values, mode=None if mode != "CMYK" else mode)


def sixteen(file: Path) -> None:
    values = np.random.default_rng(0).integers(0, 65536, (20, 30)).astype(np.uint16)
    Image.fromarray(values).save(file, "PNG")


def animated(file: Path) -> None:
    frames = [Image.new("RGB", (30, 20), colour) for colour in ("red", "green", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:], duration=50)


def upside_down(file: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    noise("RGB").save(file, "JPEG", exif=exif)


WRITERS: dict[str, Callable[[Path], None]] = {
    "grey.png": lambda file: noise("L").save(file),
    "rgb.jpg": lambda file: noise("RGB").save(file),
    "rgba.png": lambda file: noise("RGBA").save(file),
    "cmyk.jpg": lambda file: noise("CMYK").save(file),
    "16-bit.png": sixteen,
    "animated.gif": animated,
    "turned.jpg": upside_down,
    "palette.gif": lambda file: noise("RGB").convert("P").save(file),
    "a png called.txt": lambda file: noise("RGB").save(file, "PNG"),
    "two bits.tiff": lambda file: noise("L").convert("1").save(file),
}


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("name", list(WRITERS))
def test_an_image_is_read_as_those_of_the_data_are(name: str, channels: int, tmp_path: Path) -> None:
    file = tmp_path / name
    WRITERS[name](file)
    kind: Channels = 1 if channels == 1 else 3
    found = read_upload(file, (16, 16), 12, kind)
    assert found.shape == (1, channels, 12, 12)
    assert torch.equal(found, Inputs(resize=16, crop=12, channels=kind).tensor(file))
    padded = read_upload(file, (16, 16), 12, kind, "pad")
    assert torch.equal(padded, Inputs(resize=16, crop=12, channels=kind, fit="pad").tensor(file))
    assert 0 <= float(found.min()) <= float(found.max()) <= 1


def test_of_an_animation_the_first_picture_counts(tmp_path: Path) -> None:
    animated(tmp_path / "a.gif")
    found = read_upload(tmp_path / "a.gif", (8, 8), None, 3)
    assert found.mean((0, 2, 3)).tolist() == [1, 0, 0]


def test_an_image_need_not_be_square(tmp_path: Path) -> None:
    noise("RGB").save(tmp_path / "a.png")
    assert read_upload(tmp_path / "a.png", (20, 30), None, 3).shape == (1, 3, 20, 30)


def chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def claiming(width: int, height: int) -> bytes:
    """A PNG of a few bytes that claims a size."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"\0" * 1000)) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("content", "told"),
    [
        pytest.param(b"no image at all", DAMAGED),
        (b"", "it is empty (0 bytes)"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n(x) run", DAMAGED),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", DAMAGED),
        pytest.param(claiming(100_000, 100_000), "it unpacks to more than "),
        (claiming(300, 300), "image file is truncated"),
    ],
)  # fmt: skip
def test_what_is_no_image_is_told(content: bytes, told: str, tmp_path: Path) -> None:
    file = tmp_path / "photo.png"
    file.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_upload(file, (8, 8), None, 3)
    assert str(error.value).startswith(f"the upload cannot be read as an image: {told}")
    assert str(tmp_path) not in str(error.value)


def test_a_truncated_photo_is_told(tmp_path: Path) -> None:
    noise("RGB", 200, 200).save(tmp_path / "whole.jpg")
    (tmp_path / "half.jpg").write_bytes((tmp_path / "whole.jpg").read_bytes()[:5000])
    with pytest.raises(UserError, match="cannot be read as an image: image file is truncated"):
        read_upload(tmp_path / "half.jpg", (8, 8), None, 3)


@pytest.mark.parametrize(
    ("width", "height", "allowed"),
    [(5000, 5000, True), (5001, 5000, False), (16384, 1, True), (16385, 1, False), (1, 16385, False)],
)
def test_more_pixels_than_allowed_are_refused_before_they_are_decoded(
    width: int, height: int, allowed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "decoded_or_reason", lambda *_: "it was decoded")
    (tmp_path / "a.png").write_bytes(claiming(width, height))
    with pytest.raises(UserError) as error:
        read_upload(tmp_path / "a.png", (8, 8), None, 3)
    assert str(error.value) == (
        "the upload cannot be read as an image: it was decoded"
        if allowed
        else f"the upload has {width} x {height} pixels; at most 25 million are taken, and 16384 a side: "
        "save the image smaller"
    )


def test_a_large_file_is_refused_before_it_is_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "open_image", lambda _: pytest.fail("it was opened"))
    with (tmp_path / "a.png").open("wb") as file:
        file.truncate(MEGABYTES * 10**6 + 10**5)
    with pytest.raises(UserError, match=r"the upload has 10\.1 MB, and may have 10: save the image smaller"):
        read_upload(tmp_path / "a.png", (8, 8), None, 3)
