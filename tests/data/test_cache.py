"""The pixel cache: right values, made once, whole or not there, and never other pixels than were decoded."""

import errno
import os
import pickle
import resource
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import replace as replaced
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from robustmetric.data import decode
from robustmetric.data.base import ImageSet
from robustmetric.data.cache import Pixels, Stored, cached
from robustmetric.errors import UserError
from robustmetric.files import DamagedError

SIZE = (6, 10)
Array = NDArray[np.uint8]

# Where threads run, newer Pythons warn of any fork; the children here only decode and leave.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")


def noise(height: int, width: int, channels: int = 3, seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def image_set(files: list[Path]) -> ImageSet:
    return ImageSet(
        "tiny", "train", torch.arange(len(files)), tuple(map(str, range(len(files)))), tuple(files)
    )


@pytest.fixture
def files(tmp_path: Path) -> list[Path]:
    """Eight images, JPEG and PNG in turns, of different sizes."""
    folder = tmp_path / "images"
    folder.mkdir()
    found = []
    for index in range(8):
        found.append(folder / f"{index}.{'png' if index % 2 else 'jpg'}")
        Image.fromarray(noise(20 + index, 30 - index, seed=index)).save(found[-1])
    return found


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def decoded(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Return the files decoded so far."""
    seen: list[Path] = []
    original = decode.decoded

    def counted(file: Path, *rest: Any) -> Array:
        seen.append(file)
        return original(file, *rest)

    monkeypatch.setattr(decode, "decoded", counted)
    return seen


def plain(file: Path, size: tuple[int, int] = SIZE) -> Array:
    with Image.open(file) as image:
        return np.asarray(image.convert("RGB").resize((size[1], size[0]), Image.Resampling.BILINEAR))


def same(result: Pixels, files: list[Path]) -> bool:
    return np.array_equal(result.pixels, np.stack([plain(file) for file in files]))


def child(work: Callable[[], object]) -> int:
    """Start a process that does the work; its exit code is 0 if nothing failed in it."""
    number = os.fork()
    if number == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return number


def code_of(number: int) -> int:
    return os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])


def flip(file: Path, place: int) -> None:
    content = bytearray(file.read_bytes())
    content[place] ^= 4
    file.write_bytes(content)


# Values


def test_the_values_are_those_of_pillow(files: list[Path], folder: Path) -> None:
    result = cached(image_set(files), folder, size=SIZE)
    assert result.pixels.shape == (8, *SIZE, 3)
    assert result.pixels.dtype == np.uint8
    assert same(result, files)
    assert (result.labels.tolist(), result.classes, result.skipped) == ([*range(8)], tuple("01234567"), ())
    (file,) = folder.glob("*.npy")
    assert np.array_equal(np.load(file), result.pixels)  # anyone can open it


GREY = np.arange(0, 240, 4, dtype=np.uint8).reshape(6, 10)
COLOUR = noise(6, 10)
ALPHA = np.linspace(0, 255, 60).astype(np.uint8).reshape(6, 10)
PALETTE = [250, 0, 0, 0, 120, 0, 0, 0, 30]


def on_white(pixels: NDArray[Any], alpha: NDArray[Any]) -> NDArray[Any]:
    share = alpha[..., None] / 255
    return np.asarray(pixels * share + 255 * (1 - share))


def grey_of(pixels: NDArray[Any]) -> NDArray[Any]:
    return np.asarray(pixels @ np.array([0.299, 0.587, 0.114]))[..., None]


def palette_image() -> Image.Image:
    image = Image.fromarray((GREY // 4 % 3).astype(np.uint8))
    image = image.convert("P")
    image.putpalette(PALETTE)
    return image


Case = tuple[Image.Image, str, dict[str, Any], NDArray[Any]]


def modes() -> dict[str, Case]:
    three = np.repeat(GREY[..., None], 3, axis=2)
    deep = (GREY.astype(np.uint16) * 257 + 100).astype(np.uint16)
    ink = np.empty((6, 10, 4), dtype=np.uint8)
    ink[:] = (200, 100, 0, 50)
    drawn, clear = np.array(PALETTE).reshape(3, 3)[GREY // 4 % 3], np.where(GREY // 4 % 3 == 1, 0, 255)
    shown = ALPHA[..., None] > 99
    keyed = np.where(shown, COLOUR, 7).astype(np.uint8)
    return {
        "L": (Image.fromarray(GREY), "png", {}, three),
        "1": (Image.fromarray(GREY > 100), "png", {}, np.where(three > 100, 255, 0)),
        "LA": (Image.fromarray(np.stack([GREY, ALPHA], axis=2)), "png", {}, on_white(three, ALPHA)),
        "RGBA": (Image.fromarray(np.dstack([COLOUR, ALPHA])), "png", {}, on_white(COLOUR, ALPHA)),
        "P": (palette_image(), "png", {}, drawn),
        "P transparent": (palette_image(), "png", {"transparency": 1}, on_white(drawn, clear)),
        "RGB key": (Image.fromarray(keyed), "png", {"transparency": (7, 7, 7)}, np.where(shown, COLOUR, 255)),
        "16-bit": (Image.fromarray(deep), "png", {}, three),
        "32-bit within 16": (Image.fromarray(deep.astype(np.int32)), "tiff", {}, three),
        "CMYK": (
            Image.frombytes("CMYK", (10, 6), ink.tobytes()),
            "jpg",
            {"quality": 100},
            np.broadcast_to((255 - ink[..., :3].astype(float)) * (255 - 50) / 255, (6, 10, 3)),
        ),
    }


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("mode", modes())
def test_every_mode_comes_out_right(mode: str, channels: Any, tmp_path: Path, folder: Path) -> None:
    image, suffix, options, expected = modes()[mode]
    file = tmp_path / f"image.{suffix}"
    image.save(file, **options)
    result = cached(image_set([file]), folder, size=SIZE, channels=channels).pixels
    assert result.shape == (1, *SIZE, channels)
    wanted = expected if channels == 3 else grey_of(expected)
    assert np.abs(result[0].astype(float) - wanted).max() <= (2 if mode == "CMYK" else 1)


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        (np.array([[0, 70000]], dtype=np.int32), "32-bit"),
        (np.zeros((2, 2), dtype=np.float32), "floating-point"),
    ],
)
def test_a_range_nobody_knows_is_not_guessed(
    values: NDArray[Any], kind: str, tmp_path: Path, folder: Path
) -> None:
    Image.fromarray(values).save(tmp_path / "a.tiff")
    with pytest.raises(ValueError, match=f"a.tiff: has {kind} pixels.*save it with 8 or 16 bits"):
        cached(image_set([tmp_path / "a.tiff"]), folder, size=SIZE)


UPRIGHT: dict[int, Callable[[Array], Array]] = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: np.rot90(a, -1),
    7: lambda a: np.rot90(a, 2).transpose(1, 0, 2),
    8: np.rot90,
    9: lambda a: a,
}


@pytest.mark.parametrize("orientation", UPRIGHT)
def test_photos_are_turned_upright(orientation: int, tmp_path: Path, folder: Path) -> None:
    blocks = np.kron(noise(2, 3), np.ones((16, 16, 1), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    Image.fromarray(blocks).save(tmp_path / "a.jpg", exif=exif, quality=100, subsampling=0)
    result = cached(image_set([tmp_path / "a.jpg"]), folder, size=None).pixels[0]
    expected = UPRIGHT[orientation](blocks)
    assert result.shape == expected.shape
    assert np.abs(result.astype(int) - expected).max() <= 3


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
@pytest.mark.parametrize("junk", [b"Exif\0\0junkjunk", b"Exif\0\0II*\0\x08\0\0\0\x09\0aa"])
def test_a_damaged_exif_block_is_no_broken_image(junk: bytes, tmp_path: Path, folder: Path) -> None:
    Image.fromarray(noise(9, 9)).save(tmp_path / "a.jpg", exif=junk)
    assert same(cached(image_set([tmp_path / "a.jpg"]), folder, size=SIZE), [tmp_path / "a.jpg"])


def test_without_a_size_all_images_need_the_same(files: list[Path], folder: Path) -> None:
    message = r"0.jpg is 20 x 30 pixels \(height x width\) and .*1.png is 21 x 29; give the size"
    with pytest.raises(ValueError, match=message):
        cached(image_set(files), folder, size=None)


def in_memory(pixels: Array) -> ImageSet:
    return ImageSet("tiny", "test", torch.zeros(len(pixels), dtype=torch.long), ("a",), pixels=pixels)


def test_pixels_in_memory_are_given_as_they_are_or_resized(folder: Path) -> None:
    grey = noise(12, 8, 1)[None]
    result = cached(in_memory(grey), folder, size=None, channels=1).pixels
    assert np.shares_memory(result, grey)
    with pytest.raises(ValueError, match="read-only"):
        result[0] = 0  # type: ignore[index]
    grey[0, 0] = 7  # the caller's own array stays writable
    wide = cached(in_memory(grey), folder, size=(6, 4)).pixels
    small = Image.fromarray(grey[0, ..., 0]).resize((4, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(wide[0], np.repeat(np.asarray(small)[..., None], 3, axis=2))
    assert not folder.exists()


# Boxes


def boxed(files: list[Path], boxes: list[tuple[int, int, int, int]]) -> ImageSet:
    labels, classes = torch.arange(len(files)), tuple(map(str, range(len(files))))
    return ImageSet("tiny", "train", labels, classes, tuple(files), boxes=np.array(boxes, dtype=np.int64))


def cut(file: Path, box: tuple[int, int, int, int]) -> Array:
    with Image.open(file) as image:
        part = image.convert("RGB").crop(box) if any(box) else image.convert("RGB")
        return np.asarray(part.resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR))


def test_boxes_are_cut_out_before_resizing(files: list[Path], folder: Path) -> None:
    listed = [files[0], files[0], files[1], files[2]]
    boxes = [(0, 0, 5, 5), (3, 4, 30, 20), (0, 0, 0, 0), (27, 0, 28, 22)]
    for changed in (boxes[1], (3, 4, 30, 19)):
        boxes[1] = changed
        result = cached(boxed(listed, boxes), folder, size=SIZE)
        expected = [cut(file, box) for file, box in zip(listed, boxes, strict=True)]
        assert np.array_equal(result.pixels, np.stack(expected))


def test_boxes_are_of_the_upright_image(tmp_path: Path, folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = noise(8, 12)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    result = cached(boxed([tmp_path / "a.png"], [(1, 2, 8, 12)]), folder, size=None)
    assert np.array_equal(result.pixels[0], np.rot90(pixels, -1)[2:12, 1:8])


def test_a_box_that_does_not_fit_is_a_broken_image(files: list[Path], folder: Path) -> None:
    listed, boxes = [files[0], files[0], files[1]], [(0, 0, 30, 20), (0, 0, 31, 20), (0, 0, 29, 22)]
    with pytest.raises(UserError, match="2 of the 3 images") as caught:
        cached(boxed(listed, boxes), folder, size=SIZE)
    caught.match(r"0.jpg: has 30 x 20 pixels .*\(0, 0, 31, 20\)")
    result = cached(boxed(listed, boxes), folder, size=SIZE, skip_broken=True)
    assert np.array_equal(result.pixels, cut(files[0], boxes[0])[None])
    assert (result.files, result.skipped) == ((files[0],), (files[0], files[1]))


# Made once, and anew when something changed


def test_a_second_call_opens_no_image_and_writes_nothing(
    files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[int, int]] = []
    first = cached(image_set(files), folder, size=SIZE, progress=lambda *now: seen.append(now))
    assert seen == [(done, 8) for done in range(9)]

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was opened, or a file written")

    monkeypatch.setattr(Image, "open", refuse)
    monkeypatch.setattr("robustmetric.data.cache.FileLock", refuse)
    again = cached(image_set(files), folder, size=SIZE, progress=refuse)
    assert np.array_equal(first.pixels, again.pixels)


def test_a_cache_is_for_one_split_size_fit_and_number_of_channels(
    files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    images = image_set(files)
    test = ImageSet("tiny", "test", images.labels, images.classes, images.files)
    for _ in "built", "reused":
        for one, how in (
            (images, {"size": SIZE}),
            (images, {"size": (5, 5)}),
            (images, {"size": SIZE, "channels": 1}),
            (images, {"size": SIZE, "fit": "pad"}),
            (test, {"size": SIZE}),
        ):
            cached(one, folder, **how)
        assert len(decoded) == 40
    assert len(list(folder.glob("*.npy"))) == 5


def touch(files: list[Path]) -> list[Path]:
    os.utime(files[3], ns=(1, 1))
    return files


def replace(files: list[Path]) -> list[Path]:
    time_before = files[3].stat().st_mtime_ns
    Image.fromarray(noise(50, 50)).save(files[3])
    os.utime(files[3], ns=(time_before, time_before))
    return files


def rename(files: list[Path]) -> list[Path]:
    return [*files[:-1], files[-1].rename(files[-1].with_name("other.png"))]


@pytest.mark.parametrize(
    "change", [touch, replace, rename, lambda files: files[::-1], lambda files: files[1:]]
)
def test_any_change_of_the_files_makes_it_anew(
    change: Callable[[list[Path]], list[Path]], files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    before = cached(image_set(files), folder, size=SIZE)
    copy = np.array(before.pixels)
    files = change(files)
    for _ in "made anew", "reused":
        assert same(cached(image_set(files), folder, size=SIZE), files)
        assert len(decoded) == 8 + len(files)
    assert np.array_equal(before.pixels, copy), "someone may still use it"
    assert len(list(folder.glob("*.npy"))) == 1


# Damage


def test_no_bit_of_a_cache_is_flipped_unnoticed(files: list[Path], folder: Path) -> None:
    files = files[:2]
    expected = np.array(cached(image_set(files), folder, size=(2, 3)).pixels)
    (file,) = folder.glob("*.npy")
    whole = file.read_bytes()
    for place in range(len(whole)):
        flip(file, place)
        said: list[str] = []
        try:
            found = cached(image_set(files), folder, size=(2, 3), report=said.append).pixels[:]
        except DamagedError:
            assert not file.exists(), "the next start makes it again"
        else:
            assert np.array_equal(found, expected)
        file.write_bytes(whole)


def test_each_image_is_checked_when_it_is_first_read(files: list[Path], folder: Path) -> None:
    many = files * 5
    cached(image_set(many), folder, size=SIZE)
    (file,) = folder.glob("*.npy")
    flip(file, 128 + 180 * 20)
    found = cached(image_set(many), folder, size=SIZE)
    assert np.array_equal(found.pixels[:16], np.stack([plain(file) for file in many[:16]]))
    with pytest.raises(DamagedError, match=rf"the cache {file} is damaged.*16 to 31.*run the same command"):
        found.pixels[np.array([39, 31])]
    assert same(cached(image_set(many), folder, size=SIZE), many)


@pytest.mark.parametrize("length", [0, 100, -1, 1])
def test_a_cache_that_is_cut_off_or_goes_on_is_made_anew(
    length: int, files: list[Path], folder: Path
) -> None:
    cached(image_set(files), folder, size=SIZE)
    (file,) = folder.glob("*.npy")
    os.truncate(file, length if length > 1 else file.stat().st_size + length if length else 0)
    said: list[str] = []
    for _ in "made anew", "reused":
        assert same(cached(image_set(files), folder, size=SIZE, report=said.append), files)
    assert said == [f"the cache {file} is damaged: its images are decoded again"]


def test_a_digest_is_that_of_the_content_wherever_it_is_stored(files: list[Path], folder: Path) -> None:
    result = cached(image_set(files), folder, size=SIZE)
    for change in range(8):
        pixels = np.array(result.pixels)
        assert Pixels(pixels, result.labels, result.classes).digest == result.digest
        pixels[change, -1, -1, -1] ^= 1
        assert Pixels(pixels, result.labels, result.classes).digest != result.digest
    turned = np.array(result.pixels).reshape(8, SIZE[1], SIZE[0], 3)
    assert Pixels(turned, result.labels, result.classes).digest != result.digest


# Reading by rows

INDICES = [
    0, -1, np.int64(7), slice(None), slice(3, 9), slice(9, 3), slice(None, None, 3), slice(None, None, -1),
    [4, 5, 6, 1], np.array([39, 0, 1, 2, 2, -1]), np.array([], dtype=np.int64), np.arange(40) % 3 == 0,
    (3, slice(1, 4)), (slice(2, 5), slice(1, 4), slice(0, 2)), (np.array([1, 9]), 2, 3, 0), (5, ..., 1),
]  # fmt: skip


@pytest.fixture
def stored(files: list[Path], folder: Path) -> Stored:
    found = cached(image_set(files * 5), folder, size=SIZE).pixels
    assert isinstance(found, Stored)
    return found


def test_a_cache_is_indexed_like_an_array(stored: Stored) -> None:
    pixels = np.load(stored.path)
    assert (stored.shape, stored.ndim, stored.nbytes) == (pixels.shape, pixels.ndim, pixels.nbytes)
    for index in INDICES:
        found = stored[index]
        assert np.array_equal(found, pixels[index])
        found[...] = 0  # what is done with it does not reach the file
    for index in (40, -41, np.array([40]), np.ones(3, dtype=bool)):
        with pytest.raises(IndexError):
            stored[index]
    assert np.array_equal(stored, pixels)
    assert np.asarray(stored, dtype=np.float32).dtype == np.float32


def test_a_cache_is_sent_by_its_path(stored: Stored, files: list[Path], folder: Path) -> None:
    sent = pickle.dumps(stored)
    assert len(sent) < 1000
    assert np.array_equal(pickle.loads(sent), stored)  # noqa: S301 (our own bytes)
    cached(image_set(files), folder, size=SIZE)
    with pytest.raises(DamagedError, match="of other images"):
        pickle.loads(sent)  # noqa: S301


# Broken images


@pytest.fixture
def broken(files: list[Path], monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """Break all images but 0, in every way; return the reasons expected."""
    files[2].write_bytes(files[2].read_bytes()[:-200])
    files[3].unlink()
    files[3].symlink_to(files[3])
    files[4].write_bytes(b"")
    files[5].write_text("not an image")
    files[6].unlink()
    Image.fromarray(noise(100, 100)).save(files[7])
    monkeypatch.setattr(decode, "LIMIT", 29_999)
    original = Image.open

    def guarded(file: Path, **options: Any) -> Image.Image:
        # The tests may run as root, who may read everything.
        if file == files[1] and file.stat().st_mode & 0o400 == 0:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(file))
        return original(file, **options)

    files[1].chmod(0o000)
    monkeypatch.setattr(Image, "open", guarded)
    return {
        files[1]: "Permission denied",
        files[2]: "image file is truncated",
        files[3]: "Too many levels of symbolic links",
        files[4]: r"is empty \(0 bytes\)",
        files[5]: "is not PNG, JPEG",
        files[6]: "No such file or directory",
        files[7]: "has 100 x 100 pixels, which take 30,000 bytes .*at most 29,999 .*save it smaller",
    }


def test_broken_images_are_all_listed(files: list[Path], folder: Path, broken: dict[Path, str]) -> None:
    with pytest.raises(UserError, match=r"7 of the 8 images of tiny.*cannot be read") as caught:
        cached(image_set(files), folder, size=SIZE)
    for file, reason in broken.items():
        assert caught.match(rf"(?m)^  {file}: .*{reason}")
    caught.match("leave them out with skip_broken")
    assert not list(folder.glob("*.npy"))


def test_broken_images_are_skipped_on_request(
    files: list[Path], folder: Path, broken: dict[Path, str], decoded: list[Path]
) -> None:
    for _ in "built", "reused":
        result = cached(image_set(files), folder, size=SIZE, skip_broken=True)
        assert same(result, [files[0]])
        assert (result.labels.tolist(), result.classes) == ([0], tuple("01234567"))
        assert result.skipped == tuple(files[1:])
    # Without the permission to skip they are listed again, from the broken files alone.
    with pytest.raises(UserError, match="7 of the 8 images"):
        cached(image_set(files), folder, size=SIZE)
    assert decoded.count(files[0]) == 1
    files[1].chmod(0o600)  # changes neither its size nor its time
    assert same(cached(image_set(files), folder, size=SIZE, skip_broken=True), files[:2])


MARKS = ("cameras", "is_query", "is_gallery")


def test_what_is_known_of_the_images_that_are_kept_goes_along(files: list[Path], folder: Path) -> None:
    files[2].write_bytes(b"")
    known: dict[str, Any] = {name: torch.arange(8) * 10 + number for number, name in enumerate(MARKS)}
    images = replaced(image_set(files), **known, columns={"shop": tuple("ABCDEFGH")})
    kept = [0, 1, 3, 4, 5, 6, 7]
    for _ in "built", "reused":
        result = cached(images, folder, size=SIZE, skip_broken=True)
        assert (result.files, result.skipped) == (tuple(files[row] for row in kept), (files[2],))
        for name in MARKS:
            assert getattr(result, name).tolist() == known[name][kept].tolist()
        assert result.columns == {"shop": tuple("ABCDEFGH"[row] for row in kept)}


def test_truncated_images_are_refused_whatever_pillow_was_told(
    files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files[2].write_bytes(files[2].read_bytes()[:-200])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(UserError, match="1 of the 8 images"):
        cached(image_set(files), folder, size=SIZE)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


# Large images


def test_a_large_jpeg_is_decoded_at_a_reduced_scale(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    smooth = np.linspace(0, 255, 400 * 400 * 3).reshape(400, 400, 3).astype(np.uint8)
    for name in ("a.jpg", "a.png"):
        Image.fromarray(smooth).save(tmp_path / name)
    monkeypatch.setattr(decode, "LIMIT", 400 * 400)
    found = cached(image_set([tmp_path / "a.jpg"]), folder, size=(20, 20)).pixels[0]
    assert np.abs(found.astype(int) - plain(tmp_path / "a.png", (20, 20))).max() <= 4
    with pytest.raises(UserError, match=r"a.png: has 400 x 400 pixels"):
        cached(image_set([tmp_path / "a.png"]), folder, size=(20, 20))
    with pytest.raises(UserError, match=r"a.jpg: has 400 x 400 pixels"):
        cached(boxed([tmp_path / "a.jpg"], [(0, 0, 9, 9)]), folder, size=(20, 20))


def test_a_lack_of_memory_names_the_image_and_leaves_none_out(
    files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(file: Path, *_: object) -> Array:
        raise MemoryError

    monkeypatch.setattr(decode, "decoded", full)
    with pytest.raises(UserError, match=r"not enough memory to decode .*0.jpg"):
        cached(image_set(files), folder, size=SIZE, skip_broken=True)


# Interruptions, other processes, full disks


def test_a_build_that_is_killed_leaves_nothing_that_counts(files: list[Path], folder: Path) -> None:
    process = child(
        lambda: cached(
            image_set(files), folder, size=SIZE, progress=lambda done, _: time.sleep(60 * (done == 5))
        )
    )
    while not list(folder.glob(".*.tmp")):
        time.sleep(0.01)
    os.kill(process, signal.SIGKILL)
    assert code_of(process) == -signal.SIGKILL
    assert not list(folder.glob("*.npy"))
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert not list(folder.glob(".*.tmp"))


def test_processes_share_one_build(files: list[Path], folder: Path, tmp_path: Path) -> None:
    log = tmp_path / "decoded"
    log.touch()
    original = decode.decoded

    def logged(file: Path, *rest: Any) -> Array:
        time.sleep(0.02)
        with log.open("a") as lines:
            lines.write(f"{file}\n")
        return original(file, *rest)

    def work() -> None:
        decode.decoded = logged  # type: ignore[assignment]
        assert same(cached(image_set(files), folder, size=SIZE), files)

    processes = [child(work) for _ in range(3)]
    assert [code_of(process) for process in processes] == [0, 0, 0]
    assert sorted(log.read_text().split()) == sorted(map(str, files))


@pytest.mark.parametrize("limit", [0, 100, 1000])
def test_a_full_disk_is_explained_and_leaves_nothing(limit: int, files: list[Path], folder: Path) -> None:
    def work() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        with pytest.raises(UserError, match=r"6x10x3.npy cannot be written \(File too large\): .*the cache"):
            cached(image_set(files), folder, size=SIZE)

    assert code_of(child(work)) == 0
    assert {path.suffix for path in folder.iterdir()} <= {".lock"}


def test_an_empty_split_and_a_folder_that_is_a_file_are_refused(files: list[Path], folder: Path) -> None:
    with pytest.raises(UserError, match="the train split of tiny has no images"):
        cached(image_set([]), folder, size=SIZE)
    folder.touch()
    with pytest.raises(UserError, match="choose another folder for the cache"):
        cached(image_set(files), folder, size=SIZE)
