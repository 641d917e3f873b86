"""The pixel cache: right values, made once, and never half made."""

import errno
import json
import os
import resource
import shutil
import signal
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image, ImageFile

from robustmetric.data import cache, cache_build, decode
from robustmetric.data.base import ImageSet
from robustmetric.data.cache import Pixels, cached
from robustmetric.data.cache_plan import LostError, opened
from robustmetric.data.stored import Stored
from robustmetric.errors import UserError
from robustmetric.files import digest_of_entries

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


def finished(folder: Path) -> set[str]:
    """Return the names of what a user would take for a cache."""
    return {path.name for path in folder.iterdir() if path.suffix == ".npy"}


class Child(NamedTuple):
    """A process of its own; the exit code is 0 when nothing failed in it."""

    number: int

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.number, 0)[1])


def child(work: Callable[[], object]) -> Child:
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
    return Child(number)


# Values


@pytest.mark.parametrize("workers", [1, 2, 64])
def test_the_values_are_those_of_pillow(files: list[Path], folder: Path, workers: int) -> None:
    result = cached(image_set(files), folder, size=SIZE, workers=workers)
    assert result.pixels.shape == (8, *SIZE, 3)
    assert result.pixels.dtype == np.uint8
    assert same(result, files)
    assert torch.equal(result.labels, torch.arange(8))
    assert result.classes == tuple("01234567")
    assert result.skipped == ()
    assert len(result) == 8


def test_anyone_can_open_the_file(files: list[Path], folder: Path) -> None:
    result = cached(image_set(files), folder, size=SIZE)
    (pixels,) = folder.glob("*.npy")
    assert np.array_equal(np.load(pixels), result.pixels)
    about = json.loads(pixels.with_suffix(".json").read_text())
    assert about["files"] == [str(file) for file in files]
    assert (about["name"], about["split"], about["shape"]) == ("tiny", "train", [8, *SIZE, 3])
    assert (about["size"], about["channels"], about["skipped"]) == ([*SIZE], 3, [])


def test_what_is_done_with_the_result_does_not_reach_the_file(files: list[Path], folder: Path) -> None:
    result = cached(image_set(files), folder, size=SIZE)
    assert isinstance(result.pixels, Stored)
    for index in (0, slice(None), np.array([0, 3])):
        result.pixels[index][:] = 0
    assert same(result, files)


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
    drawn = np.array(PALETTE).reshape(3, 3)[GREY // 4 % 3]
    return {
        "L": (Image.fromarray(GREY), "png", {}, three),
        "1": (
            Image.fromarray(GREY > 100),
            "png",
            {},
            np.repeat((GREY > 100)[..., None] * 255, 3, axis=2),
        ),
        "LA": (Image.fromarray(np.stack([GREY, ALPHA], axis=2)), "png", {}, on_white(three, ALPHA)),
        "RGBA": (
            Image.fromarray(np.concatenate([COLOUR, ALPHA[..., None]], axis=2)),
            "png",
            {},
            on_white(COLOUR, ALPHA),
        ),
        "P": (palette_image(), "png", {}, drawn),
        "P transparent": (
            palette_image(),
            "png",
            {"transparency": 1},
            on_white(drawn, np.where(GREY // 4 % 3 == 1, 0, 255)),
        ),
        "RGB key": (
            Image.fromarray(np.where(ALPHA[..., None] > 99, COLOUR, 7).astype(np.uint8)),
            "png",
            {"transparency": (7, 7, 7)},
            np.where(ALPHA[..., None] > 99, COLOUR, 255),
        ),
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


def test_16_bits_are_rounded_not_clipped(tmp_path: Path, folder: Path) -> None:
    values = np.arange(0, 65536, 41, dtype=np.uint16)[:1500].reshape(30, 50)
    Image.fromarray(values).save(tmp_path / "deep.png")
    result = cached(image_set([tmp_path / "deep.png"]), folder, size=None, channels=1)
    assert np.array_equal(result.pixels[0, ..., 0], np.round(values / 257))


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


def test_without_a_size_images_stay_as_they_are(tmp_path: Path, folder: Path) -> None:
    for index in range(3):
        Image.fromarray(noise(7, 9, seed=index)).save(tmp_path / f"{index}.png")
    files = [tmp_path / f"{index}.png" for index in range(3)]
    result = cached(image_set(files), folder, size=None)
    assert np.array_equal(result.pixels, np.stack([noise(7, 9, seed=index) for index in range(3)]))
    assert cached(image_set(files), folder, size=None).pixels.shape == (3, 7, 9, 3)


def test_without_a_size_all_images_need_the_same(files: list[Path], folder: Path) -> None:
    message = r"0.jpg is 20 x 30 pixels \(height x width\) and .*1.png is 21 x 29; give the size"
    with pytest.raises(ValueError, match=message):
        cached(image_set(files), folder, size=None)


# Pixels in memory


def in_memory(pixels: Array) -> ImageSet:
    return ImageSet("tiny", "test", torch.zeros(len(pixels), dtype=torch.long), ("a",), pixels=pixels)


@pytest.mark.parametrize("size", [None, (6, 10)])
def test_pixels_that_fit_are_given_as_they_are(size: tuple[int, int] | None, folder: Path) -> None:
    pixels = noise(6, 10)[None]
    result = cached(in_memory(pixels), folder, size=size)
    assert np.shares_memory(result.pixels, pixels)
    assert not folder.exists()
    assert isinstance(result.pixels, np.ndarray)
    with pytest.raises(ValueError, match="read-only"):
        result.pixels[0] = 0
    pixels[0] = 0  # the caller's own array stays writable


def test_pixels_that_do_not_fit_are_fitted(folder: Path) -> None:
    grey, colour = noise(12, 8, 1), noise(12, 8, 3)
    wide = cached(in_memory(grey[None]), folder, size=(6, 4)).pixels
    small = Image.fromarray(grey[..., 0]).resize((4, 6), Image.Resampling.BILINEAR)
    assert np.array_equal(wide[0], np.repeat(np.asarray(small)[..., None], 3, axis=2))
    flat = cached(in_memory(colour[None]), folder, size=None, channels=1).pixels
    assert np.abs(flat[0] - grey_of(colour)).max() <= 1
    assert isinstance(flat, np.ndarray)
    assert not flat.flags.writeable


# Made once, and anew when something changed


def test_a_second_call_opens_no_image(
    files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = cached(image_set(files), folder, size=SIZE)
    before = {path: path.stat().st_mtime_ns for path in folder.iterdir()}

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("an image was opened")

    monkeypatch.setattr(Image, "open", refuse)
    again = cached(image_set(files), folder, size=SIZE, progress=refuse)
    assert np.array_equal(first.pixels, again.pixels)
    assert before == {path: path.stat().st_mtime_ns for path in folder.iterdir()}


def test_a_cache_in_a_folder_that_cannot_be_written_is_used(
    files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(image_set(files), folder, size=SIZE)
    monkeypatch.setattr(cache, "locked", None)  # nothing may be locked, which would write
    assert same(cached(image_set(files), folder, size=SIZE), files)


def touch(files: list[Path]) -> list[Path]:
    os.utime(files[3], ns=(1, 1))
    return files


def replace(files: list[Path]) -> list[Path]:
    time_before = files[3].stat().st_mtime_ns
    Image.fromarray(noise(50, 50)).save(files[3])
    os.utime(files[3], ns=(time_before, time_before))
    return files


def add(files: list[Path]) -> list[Path]:
    new = files[0].with_name("new.jpg")
    shutil.copy(files[0], new)
    return [*files, new]


def rename(files: list[Path]) -> list[Path]:
    return [*files[:-1], files[-1].rename(files[-1].with_name("other.png"))]


def two_become_one(files: list[Path]) -> list[Path]:
    files[3].write_bytes(files[5].read_bytes())
    return files[:6]


CHANGES: list[tuple[Callable[[list[Path]], list[Path]], list[str]]] = [
    (touch, ["3.png"]),
    (replace, ["3.png"]),
    (add, ["new.jpg"]),
    (rename, ["other.png"]),
    (two_become_one, ["3.png"]),
    (lambda files: files[1:], []),
    (lambda files: files[::-1], []),
    (lambda files: [files[0], files[2], files[0]], []),
]


@pytest.mark.parametrize(("change", "again"), CHANGES)
def test_any_change_of_the_files_redoes_what_changed_and_removes_the_old(
    change: Callable[[list[Path]], list[Path]],
    again: list[str],
    files: list[Path],
    folder: Path,
    decoded: list[Path],
) -> None:
    before = cached(image_set(files), folder, size=SIZE)
    copy = np.array(before.pixels)
    other = folder / "notes.npy"
    other.write_text("mine")
    old = finished(folder)
    decoded.clear()
    files = change(files)
    seen: list[tuple[int, int]] = []
    result = cached(image_set(files), folder, size=SIZE, progress=lambda *now: seen.append(now))
    assert same(result, files)
    assert [file.name for file in decoded] == again
    assert seen == [(done, len(files)) for done in range(len(files) + 1)]
    assert np.array_equal(before.pixels, copy), "someone may still use it"
    assert finished(folder) & old == {"notes.npy"}
    assert len(finished(folder)) == 2
    assert len(list(folder.glob("*.json"))) == 1


def test_caches_of_other_sizes_channels_and_splits_stay(
    files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    images = image_set(files)
    test = ImageSet("tiny", "test", images.labels, images.classes, images.files)

    def all_four() -> None:
        cached(images, folder, size=SIZE)
        cached(images, folder, size=(5, 5))
        cached(images, folder, size=SIZE, channels=1)
        cached(test, folder, size=SIZE)

    all_four()
    assert len(decoded) == 32
    all_four()
    assert len(decoded) == 32
    assert len(finished(folder)) == 4


def cut_pixels(pixels: Path) -> None:
    os.truncate(pixels, pixels.stat().st_size - 1)


def lengthen_pixels(pixels: Path) -> None:
    os.truncate(pixels, pixels.stat().st_size + 1)


def spoil_header(pixels: Path) -> None:
    with pixels.open("r+b") as file:
        file.write(b"nonsense")


def other_array(pixels: Path) -> None:
    np.save(pixels, np.zeros((8, 5, 5, 3), dtype=np.uint8))


def cut_description(pixels: Path) -> None:
    os.truncate(pixels.with_suffix(".json"), 20)


def empty_description(pixels: Path) -> None:
    pixels.with_suffix(".json").write_text("[]")


def other_description(pixels: Path) -> None:
    """Take the description of a cache of other files, which is whole."""
    about = pixels.with_suffix(".json")
    text = json.loads(about.read_text())
    del text["sha256"]
    text["key"] = text["key"][::-1]
    about.write_text(json.dumps({**text, "sha256": digest_of_entries(text)}))


def of_before(pixels: Path) -> None:
    """Take away what caches did not have before they had digests."""
    about = pixels.with_suffix(".json")
    text = json.loads(about.read_text())
    del text["sha256"], text["digests"]
    about.write_text(json.dumps(text))


def flip(file: Path, bit: int) -> None:
    """Flip a bit, counted from the start of a file, or from its end."""
    content = bytearray(file.read_bytes())
    content[bit // 8] ^= 1 << bit % 8
    file.write_bytes(content)


def report_to(said: list[str]) -> Callable[[str], object]:
    return said.append


@pytest.mark.parametrize(
    ("damage", "redone"),
    [
        (cut_pixels, 8),
        (lengthen_pixels, 0),
        (spoil_header, 0),
        (other_array, 8),
        (cut_description, 8),
        (empty_description, 8),
        (other_description, 8),
        pytest.param(
            of_before,
            8,
        ),
        (lambda pixels: pixels.with_suffix(".json").unlink(), 8),
    ],
)
@pytest.mark.parametrize("changed", [False, True])
def test_a_damaged_cache_is_made_anew_of_what_is_whole_in_it(
    damage: Callable[[Path], None],
    redone: int,
    changed: bool,
    files: list[Path],
    folder: Path,
    decoded: list[Path],
) -> None:
    cached(image_set(files), folder, size=SIZE)
    pixels = next(folder.glob("*.npy"))
    damage(pixels)
    if changed:
        touch(files)
    decoded.clear()
    said: list[str] = []
    assert same(cached(image_set(files), folder, size=SIZE, report=said.append), files)
    assert len(decoded) == max(redone, int(changed))
    (line,) = said
    assert line.startswith(f"the cache {pixels} ")
    assert "decoded again" in line
    cached(image_set(files), folder, size=SIZE, report=said.append)
    assert len(said) == 1, "it is whole by now"


def test_a_cache_without_pixels_is_built_without_a_word(
    files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    cached(image_set(files), folder, size=SIZE)
    next(folder.glob("*.npy")).unlink()  # a build that is killed just before its end leaves this
    said: list[str] = []
    assert same(cached(image_set(files), folder, size=SIZE, report=said.append), files)
    assert (len(decoded), said) == (16, [])


@pytest.mark.parametrize("row", [0, 15, 16, 39])
def test_a_flipped_bit_redoes_the_images_of_its_block_alone(
    row: int, files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    many = files * 5
    cached(image_set(many), folder, size=SIZE)
    pixels = next(folder.glob("*.npy"))
    flip(pixels, 8 * (128 + 180 * row) + 1003)
    decoded.clear()
    said: list[str] = []
    assert same(cached(image_set(many), folder, size=SIZE, report=said.append), many)
    begin = row // 16 * 16
    # A file that stands elsewhere in the cache too is copied from there.
    assert set(decoded) <= set(many[begin : begin + 16])
    assert said == [
        f"the cache {pixels} is damaged: {min(16, 40 - begin)} of its 40 images are decoded again"
    ]


@pytest.mark.parametrize("suffix", [".npy", ".json"])
def test_no_bit_of_a_cache_is_flipped_unnoticed(suffix: str, files: list[Path], folder: Path) -> None:
    files = files[:2]
    expected = np.array(cached(image_set(files), folder, size=SIZE).pixels)
    file = next(folder.glob("*.npy")).with_suffix(suffix)
    content = file.read_bytes()
    for bit in range(0, 8 * len(content), 37):
        flip(file, bit)
        try:
            found = opened(file.with_suffix(".npy"))
        except LostError:
            assert suffix == ".json"
        else:
            assert found is not None
            if suffix == ".npy":
                assert found.fault is not None
                assert (None in found.marks) == (bit >= 8 * 128)
            else:  # white space
                assert json.loads(file.read_bytes()) == json.loads(content)
                assert np.array_equal(found.pixels, expected)
        file.write_bytes(content)


def test_a_bit_flipped_in_a_partial_cache_does_not_survive(
    files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        cached(image_set(files), folder, size=SIZE, progress=press)
    flip(next(folder.glob("*.pixels.partial")), 8 * (128 + 180 * 2) + 500)
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert decoded == [files[2], *files[5:]]


def test_pixels_that_the_disk_changed_do_not_make_a_cache(
    files: list[Path], folder: Path, decoded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    write = cache_build._write

    def wrong(file: Any, place: int, data: bytes) -> None:
        write(file, place, bytes([data[0] ^ 1]) + data[1:] if place == 128 + 180 * 3 else data)

    with monkeypatch.context() as patch:
        patch.setattr(cache_build, "_write", wrong)
        with pytest.raises(UserError, match=r"pixels.partial does not hold what was written.*check the disk"):
            cached(image_set(files), folder, size=SIZE)
    assert finished(folder) == set()
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert decoded == [files[3]]


def test_a_cache_that_shrinks_is_an_error_and_not_the_end(
    files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    result = cached(image_set(files), folder, size=SIZE)
    pixels = next(folder.glob("*.npy"))
    os.truncate(pixels, 128 + 180 * 3)
    assert np.array_equal(result.pixels[:3], np.stack([plain(file) for file in files[:3]]))
    for index in (3, slice(None), np.array([7, 0])):
        with pytest.raises(UserError, match=rf"{pixels} became shorter.*decodes what is lost"):
            result.pixels[index]
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE, report=report_to([])), files)
    assert decoded == files


def test_a_cache_that_is_removed_is_read_on(files: list[Path], folder: Path) -> None:
    result = cached(image_set(files), folder, size=SIZE)
    pixels = next(folder.glob("*.npy"))
    pixels.unlink()
    np.save(pixels, np.zeros((8, *SIZE, 3), np.uint8))
    assert same(result, files)


def test_nothing_of_an_old_cache_is_copied_that_shrinks_meanwhile(
    files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(image_set(files), folder, size=SIZE)
    pixels = next(folder.glob("*.npy"))
    touch(files)
    copies = cache_build._copies

    def cut(*arguments: Any) -> Any:
        os.truncate(pixels, 200)
        return copies(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(cache_build, "_copies", cut)
        with pytest.raises(UserError, match=f"{pixels} became shorter"):
            cached(image_set(files), folder, size=SIZE)
    assert same(cached(image_set(files), folder, size=SIZE, report=report_to([])), files)


# Digests


def test_a_digest_is_that_of_the_content_wherever_it_is_stored(files: list[Path], folder: Path) -> None:
    result = cached(image_set(files), folder, size=SIZE)
    memory = Pixels(np.array(result.pixels), result.labels, result.classes)
    assert len(result.digest) == 64
    assert result.digest == memory.digest == cached(image_set(files), folder, size=SIZE).digest
    for change in range(8):
        pixels = np.array(result.pixels)
        pixels[change, -1, -1, -1] ^= 1
        assert Pixels(pixels, result.labels, result.classes).digest != result.digest
    turned = np.array(result.pixels).reshape(8, SIZE[1], SIZE[0], 3)
    assert Pixels(turned, result.labels, result.classes).digest != result.digest


# Boxes


def boxed(files: list[Path], boxes: list[tuple[int, int, int, int]]) -> ImageSet:
    labels = torch.arange(len(files))
    classes = tuple(map(str, range(len(files))))
    return ImageSet("tiny", "train", labels, classes, tuple(files), boxes=np.array(boxes, dtype=np.int64))


def cut(file: Path, box: tuple[int, int, int, int]) -> Array:
    with Image.open(file) as image:
        part = image.convert("RGB").crop(box) if any(box) else image.convert("RGB")
        return np.asarray(part.resize((SIZE[1], SIZE[0]), Image.Resampling.BILINEAR))


def test_boxes_are_cut_out_before_resizing(files: list[Path], folder: Path, decoded: list[Path]) -> None:
    listed = [files[0], files[0], files[1], files[2]]
    boxes = [(0, 0, 5, 5), (3, 4, 30, 20), (0, 0, 0, 0), (27, 0, 28, 22)]
    for _ in "built", "reused":
        result = cached(boxed(listed, boxes), folder, size=SIZE)
        expected = [cut(file, box) for file, box in zip(listed, boxes, strict=True)]
        assert np.array_equal(result.pixels, np.stack(expected))
    decoded.clear()
    boxes[1] = (3, 4, 30, 19)
    result = cached(boxed(listed, boxes), folder, size=SIZE)
    assert np.array_equal(result.pixels[1], cut(files[0], boxes[1]))
    assert decoded == [files[0]]


def test_boxes_are_of_the_upright_image(tmp_path: Path, folder: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = noise(8, 12)
    Image.fromarray(pixels).save(tmp_path / "a.png", exif=exif)
    result = cached(boxed([tmp_path / "a.png"], [(1, 2, 8, 12)]), folder, size=None)
    assert np.array_equal(result.pixels[0], np.rot90(pixels, -1)[2:12, 1:8])


def test_boxes_of_one_size_need_no_other(files: list[Path], folder: Path) -> None:
    result = cached(boxed(files[:2], [(0, 0, 7, 5), (1, 1, 8, 6)]), folder, size=None)
    assert result.pixels.shape == (2, 5, 7, 3)
    with pytest.raises(ValueError, match=r"0.jpg is 5 x 7 pixels \(height x width\) and .*1.png is 21 x 29"):
        cached(boxed(files[:2], [(0, 0, 7, 5), (0, 0, 0, 0)]), folder, size=None)


def test_a_box_that_does_not_fit_is_told_with_its_file(files: list[Path], folder: Path) -> None:
    listed, boxes = [files[0], files[0], files[1]], [(0, 0, 30, 20), (0, 0, 31, 20), (0, 0, 29, 22)]
    with pytest.raises(ValueError, match="2 of the 3 images") as caught:
        cached(boxed(listed, boxes), folder, size=SIZE)
    assert f"{files[0]}: has 30 x 20 pixels (width x height), beyond which its box (0, 0, 31, 20)" in str(
        caught.value
    )
    assert f"{files[1]}: has 29 x 21 pixels" in str(caught.value)
    for _ in "built", "reused":
        result = cached(boxed(listed, boxes), folder, size=SIZE, skip_broken=True)
        assert np.array_equal(result.pixels, cut(files[0], boxes[0])[None])
        assert (result.files, result.skipped) == ((files[0],), (files[0], files[1]))


@pytest.mark.parametrize("skip", [False, True])
def test_what_is_known_of_the_images_goes_along(skip: bool, files: list[Path], folder: Path) -> None:
    kept = [0, 1, 3, 4, 5, 6, 7] if skip else list(range(8))
    if skip:
        files[2].write_bytes(b"")
    images = ImageSet(
        "tiny",
        "test",
        torch.arange(8),
        tuple("abcdefgh"),
        tuple(files),
        cameras=torch.arange(8) * 10,
        is_query=torch.arange(8) < 4,
        is_gallery=torch.arange(8) > 2,
        columns={"shop": tuple("ABCDEFGH")},
    )
    for _ in "built", "reused":
        result = cached(images, folder, size=SIZE, skip_broken=skip)
        assert result.files == tuple(files[row] for row in kept)
        assert result.cameras is not None
        assert result.cameras.tolist() == [10 * row for row in kept]
        assert result.is_query is not None
        assert result.is_query.tolist() == [row < 4 for row in kept]
        assert result.is_gallery is not None
        assert result.is_gallery.tolist() == [row > 2 for row in kept]
        assert result.columns == {"shop": tuple("ABCDEFGH"[row] for row in kept)}
        assert len(result) == len(kept)


# Broken images


@pytest.fixture
def broken(files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[Path, str]:
    """Break all images but 0, in every way; return the reasons expected."""
    files[2].write_bytes(files[2].read_bytes()[:-200])
    files[3].write_bytes(files[3].read_bytes()[:200])
    files[4].write_bytes(b"")
    files[5].write_text("not an image")
    files[6].unlink()
    Image.fromarray(noise(100, 100)).save(files[7])
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 2000)
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
        files[3]: "image file is truncated",
        files[4]: r"is empty \(0 bytes\)",
        files[5]: "is not PNG, JPEG, WebP, BMP, GIF, TIFF or PPM",
        files[6]: "No such file or directory",
        files[7]: "more than 4,000 pixels, .*save it smaller",
    }


@pytest.mark.parametrize("workers", [1, 2])
def test_broken_images_are_all_listed(
    workers: int, files: list[Path], folder: Path, broken: dict[Path, str]
) -> None:
    with pytest.raises(ValueError, match=r"7 of the 8 images of tiny.*cannot be read") as caught:
        cached(image_set(files), folder, size=SIZE, workers=workers)
    for file, reason in broken.items():
        assert caught.match(rf"(?m)^  {file}: .*{reason}")
    caught.match("leave them out with skip_broken")
    assert finished(folder) == set()


def test_a_long_list_is_cut(tmp_path: Path, folder: Path) -> None:
    files = [tmp_path / f"{index:02}.jpg" for index in range(25)]
    with pytest.raises(ValueError, match="25 of the 25 images") as caught:
        cached(image_set(files), folder, size=None)
    caught.match("19.jpg: No such file")
    caught.match("and 5 more")
    assert "20.jpg" not in str(caught.value)


def test_only_repaired_images_are_decoded_again(
    files: list[Path], folder: Path, broken: dict[Path, str], decoded: list[Path]
) -> None:
    with pytest.raises(ValueError, match="7 of the 8"):
        cached(image_set(files), folder, size=SIZE)
    for index, file in enumerate(files[1:], 1):
        file.unlink(missing_ok=True)
        Image.fromarray(noise(20, 20, seed=index)).save(file)
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert decoded == files[1:]


def test_broken_images_are_skipped_on_request(
    files: list[Path], folder: Path, broken: dict[Path, str], decoded: list[Path]
) -> None:
    Image.fromarray(noise(20, 20, seed=6)).save(files[6])
    for _ in "built", "reused":
        result = cached(image_set(files), folder, size=SIZE, skip_broken=True)
        assert same(result, [files[0], files[6]])
        assert result.labels.tolist() == [0, 6]
        assert result.classes == tuple("01234567")
        assert result.skipped == (*files[1:6], files[7])
    assert files[0] not in decoded[1:]
    about = json.loads(next(folder.glob("*.json")).read_text())
    assert [entry["file"] for entry in about["skipped"]] == [str(file) for file in result.skipped]
    assert about["skipped"][3]["reason"] == "is empty (0 bytes)"
    assert about["files"] == [str(files[0]), str(files[6])]
    assert np.array_equal(np.load(next(folder.glob("*.npy"))), result.pixels)
    # The same files without the permission to skip: told again, from the broken files alone.
    with pytest.raises(ValueError, match="6 of the 8 images"):
        cached(image_set(files), folder, size=SIZE)
    assert files[0] not in decoded[1:]


def test_a_skipped_image_made_readable_comes_back(
    files: list[Path], folder: Path, broken: dict[Path, str], decoded: list[Path]
) -> None:
    cached(image_set(files), folder, size=SIZE, skip_broken=True)
    files[1].chmod(0o600)  # changes neither its length nor its time
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE, skip_broken=True), files[:2])
    assert files[0] not in decoded


def test_a_file_listed_twice_is_skipped_twice(files: list[Path], folder: Path) -> None:
    files[1].write_bytes(b"")
    twice = [files[0], files[1], files[2], files[1], files[2]]
    for _ in "built", "reused":
        result = cached(image_set(twice), folder, size=SIZE, skip_broken=True)
        assert same(result, [files[0], files[2], files[2]])
        assert result.labels.tolist() == [0, 2, 4]


def test_nothing_left_is_an_error_even_if_broken_images_may_be_skipped(
    files: list[Path], folder: Path
) -> None:
    for file in files:
        file.write_bytes(b"")
    with pytest.raises(ValueError, match="8 of the 8 images"):
        cached(image_set(files), folder, size=SIZE, skip_broken=True)


def test_truncated_images_are_refused_whatever_pillow_was_told(
    files: list[Path], folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files[2].write_bytes(files[2].read_bytes()[:-200])
    monkeypatch.setattr(ImageFile, "LOAD_TRUNCATED_IMAGES", True)
    with pytest.raises(ValueError, match="1 of the 8 images"):
        cached(image_set(files), folder, size=SIZE)
    assert ImageFile.LOAD_TRUNCATED_IMAGES


# Interruptions


def test_progress_counts_what_is_done(files: list[Path], folder: Path) -> None:
    seen: list[tuple[int, int]] = []
    cached(image_set(files), folder, size=SIZE, progress=lambda done, total: seen.append((done, total)))
    assert seen == [(done, 8) for done in range(9)]


def press(done: int, total: int) -> None:
    """Press Ctrl-C after five images."""
    if done == 5:
        raise KeyboardInterrupt


def test_ctrl_c_keeps_what_is_done(files: list[Path], folder: Path, decoded: list[Path]) -> None:
    with pytest.raises(KeyboardInterrupt):
        cached(image_set(files), folder, size=SIZE, progress=press)
    assert finished(folder) == set()
    decoded.clear()
    seen: list[int] = []
    result = cached(image_set(files), folder, size=SIZE, progress=lambda done, _: seen.append(done))
    assert same(result, files)
    assert decoded == files[5:]
    assert seen == [5, 6, 7, 8]


def test_work_continues_although_a_file_changed(files: list[Path], folder: Path, decoded: list[Path]) -> None:
    with pytest.raises(KeyboardInterrupt):
        cached(image_set(files), folder, size=SIZE, progress=press)
    Image.fromarray(noise(20, 20, seed=99)).save(files[3])
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert decoded == [files[3], *files[5:]]


def die_at(moment: int) -> None:
    """Kill this process by SIGKILL at the n-th step that touches the disk; a write is torn in the middle."""
    steps = iter(range(1, 10_000))

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def step(*arguments: Any, **options: Any) -> Any:
            if next(steps) == moment:
                os.kill(os.getpid(), signal.SIGKILL)
            return original(*arguments, **options)

        return step

    write = cache_build._write

    def torn(file: Any, place: int, data: bytes) -> None:
        if next(steps) == moment:
            write(file, place, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGKILL)
        write(file, place, data)

    cache_build.JOURNAL_SECONDS = 0.0
    cache_build._write = torn
    os.fsync = deadly(os.fsync)
    Path.replace = deadly(Path.replace)  # type: ignore[method-assign]
    Path.unlink = deadly(Path.unlink)  # type: ignore[method-assign]


@pytest.mark.slow
@pytest.mark.parametrize("skip", [False, True])
def test_a_kill_at_any_step_loses_nothing(
    skip: bool, files: list[Path], folder: Path, decoded: list[Path]
) -> None:
    files = files[:5]
    good = list(files)
    if skip:
        files[1].write_bytes(b"")
        del good[1]

    def build() -> Pixels:
        return cached(image_set(files), folder, size=SIZE, skip_broken=skip)

    def doomed() -> None:
        die_at(moment)
        build()

    redone = []
    moment = 0
    code = -signal.SIGKILL
    while code == -signal.SIGKILL:
        moment += 1
        shutil.rmtree(folder, ignore_errors=True)
        code = child(doomed).wait()
        for path in folder.glob("*.npy"):
            assert np.array_equal(np.load(path), np.stack([plain(file) for file in good]))
        decoded.clear()
        assert same(build(), good)
        assert not list(folder.glob("*.pixels.partial"))
        redone.append(len([file for file in decoded if file in good]))
    assert code == 0
    assert moment > 20
    assert redone[0] == len(good)
    assert redone[-1] == 0
    if not skip:
        assert redone == sorted(redone, reverse=True)
        assert set(redone) == {0, 1, 2, 3, 4, 5}


@pytest.mark.slow
def test_a_kill_at_any_step_of_a_rebuild_loses_nothing(
    files: list[Path], folder: Path, tmp_path: Path, decoded: list[Path]
) -> None:
    files = files[:5]
    old = np.array(cached(image_set(files), folder, size=SIZE).pixels)
    (old_name,) = finished(folder)
    saved = shutil.copytree(folder, tmp_path / "saved")
    Image.fromarray(noise(20, 20, seed=99)).save(files[3])

    def doomed() -> None:
        die_at(moment)
        cached(image_set(files), folder, size=SIZE)

    moment, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        moment += 1
        shutil.rmtree(folder)
        shutil.copytree(saved, folder)
        code = child(doomed).wait()
        for path in folder.glob("*.npy"):
            new = np.stack([plain(file) for file in files])
            assert np.array_equal(np.load(path), old if path.name == old_name else new)
        decoded.clear()
        assert same(cached(image_set(files), folder, size=SIZE), files)
        assert decoded in ([files[3]], [])
        assert not list(folder.glob("*.pixels.partial"))
    assert (code, decoded) == (0, [])
    assert moment > 20


def test_a_rebuild_on_a_full_disk_keeps_the_old_and_what_is_copied(
    files: list[Path], folder: Path, decoded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    cached(image_set(files), folder, size=SIZE)
    before = {path: path.read_bytes() for path in folder.iterdir()}
    touch(files)
    write = cache_build._write
    rows: list[int] = []

    def full(file: Any, place: int, data: bytes) -> None:
        if len(data) == 180:
            if len(rows) == 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            rows.append((place - 128) // 180)
        write(file, place, data)

    with monkeypatch.context() as patch:
        patch.setattr(cache_build, "_write", full)
        with pytest.raises(OSError, match="No space left"):
            cached(image_set(files), folder, size=SIZE)
    assert rows == [0, 1, 2, 4]
    check_previous(before)
    decoded.clear()
    seen: list[int] = []
    assert same(
        cached(image_set(files), folder, size=SIZE, progress=lambda done, _: seen.append(done)), files
    )
    assert decoded == [files[3]]
    assert seen == [4, 5, 6, 7, 8]


def test_a_build_killed_from_outside_continues(files: list[Path], folder: Path, decoded: list[Path]) -> None:
    def stuck() -> None:
        cache_build.JOURNAL_SECONDS = 0.0
        cached(
            image_set(files),
            folder,
            size=SIZE,
            workers=2,
            progress=lambda done, _: time.sleep(60 * (done == 5)),
        )

    process = child(stuck)
    marks = folder / "tiny-train-6x10x3.marks.partial"
    while not marks.exists() or not any(marks.read_bytes()[4 * 16 :]):
        time.sleep(0.01)
    os.kill(process.number, signal.SIGKILL)
    assert process.wait() == -signal.SIGKILL
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert decoded == files[5:]


def test_two_processes_share_one_build(files: list[Path], folder: Path, tmp_path: Path) -> None:
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
    assert [process.wait() for process in processes] == [0, 0, 0]
    assert sorted(log.read_text().split()) == sorted(map(str, files))


def test_two_processes_with_other_files_take_turns(files: list[Path], folder: Path) -> None:
    def work(part: list[Path]) -> None:
        for _ in range(10):
            assert same(cached(image_set(part), folder, size=SIZE), part)

    processes = [child(lambda: work(files[:6])), child(lambda: work(files[2:]))]
    assert [process.wait() for process in processes] == [0, 0]


# A full disk


@pytest.fixture
def previous(files: list[Path], folder: Path) -> dict[Path, bytes]:
    """Build a cache, then change all files; return what is in the folder."""
    cached(image_set(files), folder, size=SIZE)
    for file in files:
        os.utime(file, ns=(1, 1))
    return {path: path.read_bytes() for path in folder.iterdir()}


def check_previous(previous: dict[Path, bytes]) -> None:
    assert {path: path.read_bytes() for path in previous} == previous


NEEDED = 8 * 6 * 10 * 3 + 128 + 8 * 16


def test_too_little_space_is_said_before_the_work(
    files: list[Path],
    folder: Path,
    previous: dict[Path, bytes],
    decoded: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10_000, 9_000, 1_000))
    with pytest.raises(OSError, match=rf"need {NEEDED:,} bytes in {folder}, where 1,000 are free") as caught:
        cached(image_set(files), folder, size=SIZE)
    assert caught.value.errno == errno.ENOSPC
    assert decoded == []
    check_previous(previous)


def test_a_disk_that_fills_up_costs_nothing(
    files: list[Path],
    folder: Path,
    previous: dict[Path, bytes],
    decoded: list[Path],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = cache_build._write
    decoded.clear()

    def full(file: Any, place: int, data: bytes) -> None:
        if place > 128 + 5 * 180:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(file, place, data)

    monkeypatch.setattr(cache_build, "_write", full)
    with pytest.raises(OSError, match=rf"No space left.*need {NEEDED:,} bytes.*Make room") as caught:
        cached(image_set(files), folder, size=SIZE)
    assert caught.value.errno == errno.ENOSPC
    check_previous(previous)
    monkeypatch.setattr(cache_build, "_write", write)
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert decoded == files[6:]


def test_pixels_that_fsync_lost_are_decoded_again(
    files: list[Path], folder: Path, decoded: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    fsync = os.fsync
    calls = iter(range(100))

    def failing(file: int) -> None:
        # A network disk may tell of a full disk here, once, and drop what it could not write.
        if next(calls) == 5:  # marks at the start; pixels and marks of rows 0 and 1; then the pixels of row 2
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(file)

    with monkeypatch.context() as patch:
        patch.setattr(cache_build, "JOURNAL_SECONDS", 0.0)
        patch.setattr(os, "fsync", failing)
        with pytest.raises(OSError, match="No space left"):
            cached(image_set(files), folder, size=SIZE)
    decoded.clear()
    assert same(cached(image_set(files), folder, size=SIZE), files)
    assert decoded == files[2:]


@pytest.mark.parametrize("limit", [0, 100, 1000, NEEDED - 8 * 16 - 1])
def test_a_write_that_the_system_refuses_is_explained(
    limit: int, files: list[Path], folder: Path, previous: dict[Path, bytes]
) -> None:
    def work() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
        with pytest.raises(OSError, match=rf"File too large.*need {NEEDED:,} bytes"):
            cached(image_set(files), folder, size=SIZE)

    assert child(work).wait() == 0
    check_previous(previous)
    assert same(cached(image_set(files), folder, size=SIZE), files)


# Bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"size": (0, 5)}, r"size is \(0, 5\); expected \(height, width\)"),
        pytest.param(
            {"size": (100_000, 5)},
            r"size is \(100000, 5\); .*from 1 to 16384",
        ),
        ({"size": (5,)}, r"size is \(5,\); expected \(height, width\)"),
        ({"size": SIZE, "channels": 4}, r"channels is 4; expected 3 \(RGB\) or 1 \(grey\)"),
        ({"size": SIZE, "workers": 0}, "workers is 0; expected at least 1"),
    ],
)
def test_bad_options_are_refused(
    options: dict[str, Any], message: str, files: list[Path], folder: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        cached(image_set(files), folder, **options)
    assert not folder.exists()


def test_an_empty_split_is_refused(folder: Path) -> None:
    with pytest.raises(ValueError, match="the train split of tiny has no images"):
        cached(image_set([]), folder, size=SIZE)


def test_a_folder_that_is_a_file_is_refused(files: list[Path], folder: Path) -> None:
    folder.write_text("")
    with pytest.raises(OSError, match=r"cannot write a cache to .*cache.*choose a folder"):
        cached(image_set(files), folder, size=SIZE)


def test_odd_names_make_good_file_names(files: list[Path], folder: Path, decoded: list[Path]) -> None:
    odd = ImageSet("../my [set]*", "train", torch.arange(8), tuple("abcdefgh"), tuple(files))
    for _ in range(2):
        assert same(cached(odd, folder, size=SIZE), files)
    touch(files)
    cached(odd, folder, size=SIZE)
    assert len(finished(folder)) == 1
    assert len(decoded) == 8 + 1
