"""What a run or a recipe names: its network with the right weights, and only the images asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

import robustmetric as rm
from robustmetric.data import decode as decoding
from robustmetric.training.inputs import Subject, image_files, pixels
from robustmetric.training.recipe import load_recipe, make_recipe
from tests.helpers.runs import make_run


def make_pictures(root: Path) -> Path:
    """Write a data set of 4 classes in a folder each, the first two of which are trained on."""
    for number, name in enumerate(["ant", "bee", "cat", "dog"]):
        (root / name).mkdir(parents=True)
        for k in range(3):
            noise = np.random.default_rng(10 * number + k).integers(0, 256, (10, 9, 3), dtype=np.uint8)
            Image.fromarray(noise).save(root / name / f"{k}.png")
    return root


# A run's network


@pytest.mark.parametrize(
    ("there", "taken"), [(("last", "best"), "best"), (("last",), "last"), (("best",), "best")]
)
def test_the_best_weights_go_before_the_last(there: tuple[str, ...], taken: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", *there)
    subject = Subject.of_run(run, {})
    assert subject.weights == run / f"{taken}.safetensors"
    network = subject.network(like=pixels(subject.recipe, splits=["test"])[0])
    wanted = load_file(run / f"{taken}.safetensors")
    assert all(torch.equal(value, wanted[name]) for name, value in network.state_dict().items())


def test_weights_that_are_given_go_before_both(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "last", "best", "mine")
    assert Subject.of_run(run, {}, run / "mine.safetensors").weights == run / "mine.safetensors"


def test_the_recipe_is_that_of_the_run_with_changes(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "best", seed=3)
    assert Subject.of_run(run, {}).recipe == make_recipe(
        {"data": "digits", "model": "c2f2", "dim": 16, "seed": 3}
    )
    changed = Subject.of_run(run, {"data": "folder", "root": tmp_path}).recipe
    assert (changed.data, changed.root, changed.dim) == ("folder", tmp_path, 16)


def test_a_run_without_weights_says_how_to_go_on(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    with pytest.raises(FileNotFoundError) as caught:
        Subject.of_run(run, {})
    said = str(caught.value)
    assert said.startswith(f"there are no weights {run / 'best.safetensors'}: the run has not been validated")
    assert said.endswith(f"go on with robustmetric train --out {run} --resume")


def test_weights_that_were_given_and_are_not_there_do_not_blame_the_run(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "best")
    with pytest.raises(FileNotFoundError, match=r"nowhere\.safetensors") as caught:
        Subject.of_run(run, {}, tmp_path / "nowhere.safetensors")
    assert "not been validated" not in str(caught.value)
    assert "--resume" not in str(caught.value)


def test_a_folder_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"is no run, it has no recipe\.yaml: give the folder of a"):
        Subject.of_run(tmp_path, {})


def test_weights_of_another_size_are_refused(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "best")
    subject = Subject.of_run(run, {"dim": 8})
    with pytest.raises(ValueError, match=r"fc2\.weight is \(16, 1024\), the model has \(8, 1024\)"):
        subject.network(like=pixels(subject.recipe, splits=["test"])[0])


@pytest.mark.parametrize("run_is_grey", [True, False])
def test_weights_for_other_channels_are_refused_in_plain_words(run_is_grey: bool, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "best")
    changes = {"data": "folder", "root": make_pictures(tmp_path / "data"), "resize": 8} if run_is_grey else {}
    if not run_is_grey:
        rm.save_weights(rm.model("c2f2", size=8, dim=16, channels=3), run / "best.safetensors")
    subject = Subject.of_run(run, changes)
    told = "1 channel, and these have 3" if run_is_grey else "3 channels, and these have 1"
    with pytest.raises(ValueError, match=f"is of a c2f2 for images with {told}: c2f2 gets one channel where"):
        subject.network(like=pixels(subject.recipe, tmp_path / "cache", splits=["test"])[0])


@pytest.mark.parametrize(
    ("code", "told"),
    [
        (
            "def net(size, depth=2): ...",
            r"net cannot be called without arguments \(missing .*'size'\): give them",
        ),
        (
            "def net():\n  raise OSError('gone')",
            r"net raised OSError in line 2 of .*nets\.py: gone; mend the",
        ),
        (
            "import nothing_of_this_name",
            r"nets\.py raised ModuleNotFoundError in line 1 of .*nets\.py: No module",
        ),
        ("def net(:", r"nets\.py raised SyntaxError: .*line 1"),
    ],
)
def test_functions_that_make_no_network_say_why(code: str, told: str, tmp_path: Path) -> None:
    (tmp_path / "nets.py").write_text(code)
    recipe = load_recipe("digits", {"model": f"{tmp_path / 'nets.py'}:net"})
    with pytest.raises(ValueError, match=told):
        make_model(recipe, pixels(make_recipe({}), splits=["test"])[0])


def test_a_network_without_weights_is_the_same_each_time() -> None:
    subject = Subject(load_recipe("digits", {"dim": 8, "seed": 4}))
    like = pixels(subject.recipe, splits=["test"])[0]
    state = torch.random.get_rng_state()
    first, second = (subject.network(like).state_dict() for _ in range(2))
    assert torch.equal(torch.random.get_rng_state(), state), "torch's own generator was touched"
    assert all(torch.equal(first[name], second[name]) for name in first)
    other = Subject(load_recipe("digits", {"dim": 8, "seed": 5})).network(like).state_dict()
    assert not torch.equal(first["fc2.weight"], other["fc2.weight"])


def test_the_network_fits_the_images(tmp_path: Path) -> None:
    changes = {"data": "folder", "root": make_pictures(tmp_path / "data"), "dim": 4}
    for sizes, expected in (({"resize": 12, "crop": 8}, 8), ({"resize": 12, "crop": None}, 12)):
        recipe = load_recipe("digits", {**changes, **sizes})
        (test,) = pixels(recipe, tmp_path / "cache", splits=["test"])
        assert make_model(recipe, test)(torch.rand(2, 3, expected, expected)).shape == (2, 4)


# Images


def test_splits_are_given_in_the_order_asked_for() -> None:
    both = pixels(make_recipe({}))
    assert [len(split) for split in both] == [1000, 797]
    assert [len(split) for split in pixels(make_recipe({}), splits=["test", "train"])] == [797, 1000]
    (test,) = pixels(make_recipe({}), splits=["test"])
    assert np.array_equal(test.pixels, both[1].pixels)
    assert torch.equal(test.labels, both[1].labels)


def test_all_images_together() -> None:
    first, second = pixels(make_recipe({}))
    (both,) = pixels(make_recipe({}), splits=["all"])
    assert np.array_equal(both.pixels, np.concatenate([first.pixels, second.pixels]))
    assert torch.equal(both.labels, torch.cat([first.labels, second.labels]))


def test_all_images_of_files_with_their_classes_and_names(tmp_path: Path) -> None:
    root = make_pictures(tmp_path / "data")
    (root / "ant" / "1.png").write_bytes(b"no image")
    splits = {"dog": "test", "ant": "train", "cat": "train"}
    rows = [f"{name}/{k}.png,{name},{split}" for name, split in splits.items() for k in range(3)]
    (root / "list.csv").write_text("\n".join(["path,label,split", *rows]))
    for entries in ({"data": "folder", "root": root}, {"data": "csv", "root": root / "list.csv"}):
        recipe = make_recipe({**entries, "resize": 8})
        decoded: dict[str, np.ndarray[tuple[int, ...], np.dtype[np.uint8]]] = {}
        for split in ("test", "train", "all"):
            (found,) = pixels(recipe, tmp_path / "cache", splits=[split], skip_broken=True)
            names = image_files(recipe, found)
            assert names is not None
            assert len(names) == len(set(names)) == len(found)
            for name, image, label in zip(names, found.pixels, found.labels.tolist(), strict=True):
                assert (root / name).is_file()
                assert found.classes[label] == Path(name).parts[0]
                assert np.array_equal(decoded.setdefault(name, image), image)
        assert len(decoded) == len(found) == {"folder": 11, "csv": 8}[recipe.data]
        kept = sorted(file.name for file in (tmp_path / "cache").rglob(f"{recipe.data}-*.npy"))
        assert len(kept) == 3, "the images of one split took the place of another's"


def test_training_images_are_not_decoded_for_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = make_pictures(tmp_path / "data")
    recipe = make_recipe({"data": "folder", "root": root, "resize": 8})
    for broken in (root / "ant" / "0.png", root / "bee" / "2.png"):
        broken.write_bytes(b"no image")
    decoded, original = [], decoding.decoded

    def counted(file: Path, *args: Any) -> object:
        decoded.append(file.parent.name)
        return original(file, *args)

    monkeypatch.setattr(decoding, "decoded", counted)
    told: list[tuple[str, int, int]] = []
    (test,) = pixels(recipe, tmp_path / "cache", splits=["test"], watch=lambda *now: told.append(now))
    assert sorted(decoded) == ["cat"] * 3 + ["dog"] * 3
    assert test.classes == ("cat", "dog")
    assert {(split, total) for split, _, total in told} == {("test", 6)}
    assert told[-1] == ("test", 6, 6)
    pixels(recipe, tmp_path / "cache", splits=["test"])
    assert len(decoded) == 6, "decoded again"
    with pytest.raises(ValueError, match=r"0\.png"):
        pixels(recipe, tmp_path / "cache")
