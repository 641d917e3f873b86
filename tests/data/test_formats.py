"""What an image file may be: its content decides, not its name, and none starts a program."""

from __future__ import annotations

import io
import os
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from robustmetric.data import Inputs, load, load_pixels
from robustmetric.data.base import ImageSet
from robustmetric.data.cache import cached
from robustmetric.data.decode import FORMATS, SUFFIXES
from robustmetric.data.describe import contact_sheet, describe, typical_size
from robustmetric.errors import UserError
from tests.helpers.command import refused

NOISE = np.random.default_rng(0).integers(0, 256, (12, 16, 3), dtype=np.uint8)
POSTSCRIPT = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 16 12\n%%EndComments\nshowpage\n%%EOF\n"


def one(file: Path) -> ImageSet:
    return ImageSet("mine", "train", torch.tensor([0]), ("a",), (file,))


@pytest.fixture
def ghost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put programs that Pillow is known to start first in the PATH; return the file that they leave."""
    trace, programs = tmp_path / "started", tmp_path / "bin"
    programs.mkdir()
    for name in ("gs", "gswin64c", "djpeg", "xv", "display"):
        (programs / name).write_text(f"#!/bin/sh\necho $0 >> {trace}\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr("PIL.EpsImagePlugin.gs_binary", None)  # looked for once a process
    return trace


def test_postscript_named_as_an_image_starts_nothing(ghost: Path, tmp_path: Path) -> None:
    root = tmp_path / "data"
    for name in "abcd":
        (root / name).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(NOISE).save(root / name / f"{number}.png")
    fake = root / "a" / "0.png"
    fake.write_bytes(POSTSCRIPT)
    images = load("folder", root, "train")
    assert describe(images).unreadable == (fake,)
    contact_sheet(images)
    typical_size(images)
    with pytest.raises(UserError, match="is not PNG"):
        Inputs().tensor(fake)
    where = ["--data", "folder", "--root", root, "--cache", tmp_path / "cache", "--out", tmp_path / "run"]
    said = refused("train", *where, "--epochs", 1, "--steps", 1)
    assert f"{fake}: is not PNG, JPEG, WebP, BMP, GIF, TIFF or PPM" in said
    assert "--skip-broken" in said
    assert not ghost.exists()


def test_the_trap_works(ghost: Path, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(POSTSCRIPT)
    with Image.open(tmp_path / "a.png") as image, pytest.raises(Exception, match=r"."):
        image.load()
    assert ghost.read_text().strip().endswith("gs")


def written(form: str, **options: object) -> bytes:
    file = io.BytesIO()
    Image.fromarray(NOISE).save(file, form, **options)
    return file.getvalue()


def several(form: str, **options: object) -> bytes:
    more = [Image.fromarray(255 - NOISE)]
    return written(form, save_all=True, append_images=more, **options)


PLAIN_PPM = b"P3 16 12 255 " + b" ".join(b"%d" % value for value in NOISE.reshape(-1).tolist())

GOOD: dict[str, Callable[[], bytes]] = {
    "PNG": lambda: written("PNG"),
    "JPEG": lambda: written("JPEG", quality=100, subsampling=0),
    "WebP": lambda: written("WEBP", lossless=True),
    "BMP": lambda: written("BMP"),
    "GIF": lambda: written("GIF"),
    "TIFF": lambda: written("TIFF"),
    "PPM": lambda: written("PPM"),
    "plain PPM": lambda: PLAIN_PPM,
    "JPEG of two pictures (MPO)": lambda: several("MPO", quality=100, subsampling=0),
    "TIFF of two pages": lambda: several("TIFF"),
    "TIFF packed as JPEG": lambda: written("TIFF", compression="jpeg", quality=100),
    "TIFF packed by Deflate": lambda: written("TIFF", compression="tiff_adobe_deflate"),
    "TIFF packed by LZW": lambda: written("TIFF", compression="tiff_lzw"),
    "animated GIF": lambda: several("GIF"),
    "animated WebP": lambda: several("WEBP", lossless=True),
    "animated PNG": lambda: several("PNG"),
}


@pytest.mark.parametrize("form", GOOD)
def test_what_is_read_is_read_under_any_name(form: str, tmp_path: Path) -> None:
    file = tmp_path / "image.xyz"
    file.write_bytes(GOOD[form]())
    found = cached(one(file), tmp_path / "cache", size=None).pixels[0]
    # Of several pictures the first counts; GIF has 256 colours, and JPEG does not keep noise.
    lossy = "GIF" in form or "JPEG" in form
    assert np.abs(found.astype(int) - NOISE).mean() <= (25 if lossy else 0)


@pytest.mark.parametrize("suffix", [*SUFFIXES, ".JPG", ".Png"])
def test_a_folder_takes_every_kind_that_is_decoded(suffix: str, tmp_path: Path) -> None:
    form = Image.registered_extensions()[suffix.lower()]
    assert suffix.lower() in FORMATS[form]
    for name in ("ape/1", "ape/2", "bee/1", "bee/2"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        Image.fromarray(NOISE).convert("1" if suffix == ".pbm" else "L").save(tmp_path / f"{name}{suffix}")
    (found,) = load_pixels("folder", tmp_path, Inputs(resize=8, channels=1), ["train"], tmp_path / "cache")
    assert (found.classes, found.pixels.shape) == (("ape",), (2, 8, 8, 1))


@pytest.mark.parametrize("form", ["EPS", "PCX", "TGA", "ICO", "SGI", "JPEG2000", "DDS", "PDF"])
def test_what_is_not_on_the_list_is_refused(form: str, tmp_path: Path) -> None:
    Image.init()
    if form not in Image.SAVE:
        pytest.skip(f"this Pillow writes no {form}")
    assert form not in FORMATS
    file = tmp_path / "image.png"
    file.write_bytes(written(form))
    with pytest.raises(UserError, match=r"image.png: is not PNG.*\n.*leave them out with skip_broken"):
        cached(one(file), tmp_path / "cache", size=None)


def bomb(width: int, height: int) -> bytes:
    """Write a PNG of zeros in a few bytes."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    packer = zlib.compressobj(9)
    rows = b"".join(packer.compress(bytes(1 + width // 8)) for _ in range(height)) + packer.flush()
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def test_a_bomb_is_not_unpacked(tmp_path: Path) -> None:
    file = tmp_path / "bomb.png"
    file.write_bytes(bomb(40_000, 8))
    content = file.read_bytes().replace(struct.pack(">II", 40_000, 8), struct.pack(">II", 40_000, 40_000))
    header = content[12:29]
    file.write_bytes(content.replace(content[29:33], struct.pack(">I", zlib.crc32(header)), 1))
    with pytest.raises(
        UserError,
        match=r"bomb.png: has 40,000 x 40,000 pixels, which take 4,800,000,000 bytes",
    ):
        cached(one(file), tmp_path / "cache", size=(8, 8))


@pytest.mark.slow
def test_a_large_image_is_no_bomb(tmp_path: Path) -> None:
    file = tmp_path / "large.png"
    file.write_bytes(bomb(16_000, 6_000))  # beyond what Pillow warns of
    assert cached(one(file), tmp_path / "cache", size=(8, 8)).pixels.shape == (1, 8, 8, 3)
    assert typical_size(one(file)) == round((16_000 * 6_000) ** 0.5)
