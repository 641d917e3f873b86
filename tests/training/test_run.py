"""Runs: what a run's folder holds, what is refused, and that nothing is lost when a disk is full."""

from __future__ import annotations

import csv
import errno
import json
import os
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning as L
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.training.module import MetricModule
from robustmetric.training.recipe import Recipe, load_recipe
from robustmetric.training.run import train
from robustmetric.training.stops import CutShortError

# Two steps an epoch, without perturbations: what is tested here is what lies around them.
QUICK: dict[str, Any] = {"defense": "N/A[R]", "batch": 1024, "epochs": 1, "dim": 16, "validation": 0}
WEIGHTS = ("last.safetensors", "best.safetensors")

pytestmark = pytest.mark.slow  # trainings from beginning to end

TINY = """
from torch import nn

def network(dim):
    return nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, dim))
"""

OWN = """
from torch import nn

class Mine(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 8))

    def forward(self, images):
        return self.layers(images)

def network(dim):
    return Mine()

def seven(dim):
    return 7

constant = 7
"""


def quick(**changes: Any) -> Recipe:
    return load_recipe("digits", {**QUICK, **changes})


def go(
    out: Path, *, resume: bool = False, callbacks: Sequence[L.Callback] = (), **changes: Any
) -> MetricModule:
    """Train, with a network of one layer unless another is asked for."""
    if "model" not in changes:
        tiny = out.parent / "tiny.py"
        tiny.parent.mkdir(parents=True, exist_ok=True)
        tiny.write_text(TINY)
        changes["model"] = f"{tiny}:network"
    return train(
        quick(**changes), out, resume=resume, callbacks=callbacks, progress=False, report=lambda _: None
    )


def rows(out: Path) -> list[dict[str, str]]:
    with (out / "metrics.csv").open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def contents(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(out.rglob("*")) if path.is_file()}


def state(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, MetricModule]:
    """A run of two epochs of 16 steps, which no test changes."""
    out = tmp_path_factory.mktemp("runs") / "new" / "run"
    return out, go(out, model="c2f2", batch=128, epochs=2, dim=32, steps=1, defense="HM[S,LGA]&ICS")


# The folder of a run


def test_files(finished: tuple[Path, MetricModule]) -> None:
    out, _ = finished
    needed = {"recipe.yaml", "run.json", "metrics.csv", "last.ckpt", *WEIGHTS}
    found = {path.name for path in out.iterdir()}
    assert needed <= found
    assert not [name for name in found if name.endswith(".tmp")]


def test_versions(finished: tuple[Path, MetricModule]) -> None:
    about = json.loads((finished[0] / "run.json").read_text(encoding="utf-8"))
    assert about["recipe"] == load_recipe(finished[0] / "recipe.yaml").model_dump(mode="json")
    assert about["skipped"] == []
    [start] = about["starts"]
    assert start["torch"] == version("torch")
    assert start["lightning"] == L.__version__
    assert start["robustmetric"] == rm.__version__
    assert start["python"].count(".") == 2


def test_metrics(finished: tuple[Path, MetricModule]) -> None:
    found = rows(finished[0])
    columns = list(found[0])
    assert columns[:2] == ["epoch", "step"]
    assert {
        "loss",
        "loss/triplet",
        "loss/ICS",
        "hardness/reached",
        "perturbed",
        "R@1",
        "R@2",
        "mAP",
        "mAP@R",
        "NMI",
    } <= set(columns)
    assert all(None not in row and None not in row.values() for row in found), "a row of another length"
    assert [(row["epoch"], row["step"]) for row in found] == [
        ("0", "10"), ("0", "16"), ("1", "20"), ("1", "30"), ("1", "32"),
    ]  # fmt: skip
    scored = [row for row in found if row["R@1"]]
    assert [row["step"] for row in scored] == ["16", "32"]
    for row in found:
        if row in scored:
            assert row["loss"] == ""
            assert 10 < float(row["R@1"]) <= float(row["R@2"]) <= 100
        else:
            assert float(row["loss"]) > 0
            assert float(row["loss"]) == pytest.approx(
                float(row["loss/triplet"]) + float(row["loss/ICS"]), rel=1e-4
            )


def test_weights(finished: tuple[Path, MetricModule]) -> None:
    out, module = finished
    last, best = (rm.model("c2f2", size=8, dim=32) for _ in WEIGHTS)
    assert rm.load_weights(last, out / "last.safetensors") == []
    assert rm.load_weights(best, out / "best.safetensors") == []
    assert same(state(last), state(module.model))
    scores = [float(row["R@1"]) for row in rows(out) if row["R@1"]]
    assert same(state(best), state(last)) == (scores[1] >= scores[0])


def test_checkpoint(finished: tuple[Path, MetricModule]) -> None:
    out, module = finished
    kept = torch.load(out / "last.ckpt", weights_only=True)
    assert kept["global_step"] == 32
    own = {
        name.removeprefix("model."): v for name, v in kept["state_dict"].items() if name.startswith("model.")
    }
    assert same(own, state(module.model))
    assert any("previous_loss" in name for name in kept["state_dict"]), "LGA's loss is not kept"
    assert sorted(kept["random_states"][0]) == ["cpu", "cuda", "numpy", "python"]
    assert kept["optimizer_states"][0]["state"]


def test_best_is_kept_by_r_at_1(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = iter([0.5, 0.7, 0.6, 0.65, 0.7])
    monkeypatch.setattr(
        "robustmetric.training.module.retrieval_scores",
        lambda *_: {"R@1": next(fake), "R@2": 0.9, "mAP": 0.5, "mAP@R": 0.5, "NMI": 0.5},
    )
    seen: list[dict[str, Tensor]] = []

    class Watch(L.Callback):
        def on_validation_end(self, trainer: L.Trainer, pl_module: Any) -> None:
            seen.append(state(pl_module.model))

    go(tmp_path / "run", epochs=3, callbacks=[Watch()])
    assert same(load_file(tmp_path / "run" / "best.safetensors"), seen[1])
    assert same(load_file(tmp_path / "run" / "last.safetensors"), seen[2])
    # A resumed run remembers the best; of equal ones the later counts.
    go(tmp_path / "run", epochs=4, resume=True)
    assert same(load_file(tmp_path / "run" / "best.safetensors"), seen[1])
    go(tmp_path / "run", epochs=5, resume=True, callbacks=[Watch()])
    assert same(load_file(tmp_path / "run" / "best.safetensors"), seen[3])


@pytest.mark.parametrize("epochs", [1, 3])
def test_last_weights_are_those_of_the_end(tmp_path: Path, epochs: int) -> None:
    module = go(tmp_path / "run", epochs=epochs, validate_every=2)
    assert (tmp_path / "run" / "last.safetensors").exists()
    assert same(load_file(tmp_path / "run" / "last.safetensors"), state(module.model))


def test_the_same_seed_gives_the_same_run(tmp_path: Path) -> None:
    go(tmp_path / "a", seed=1)
    torch.rand(7)  # what was drawn before does not matter
    go(tmp_path / "b", seed=1)
    go(tmp_path / "c", seed=2)
    a, b, c = (contents(tmp_path / name) for name in "abc")
    assert a["last.safetensors"] == b["last.safetensors"]
    assert a["metrics.csv"] == b["metrics.csv"]
    assert a["last.safetensors"] != c["last.safetensors"]


# A folder that is taken


def test_a_folder_with_a_run_is_refused(finished: tuple[Path, MetricModule]) -> None:
    before = contents(finished[0])
    with pytest.raises(ValueError, match="holds a run already: resume it, or give another folder"):
        go(finished[0], model="c2f2", batch=128, epochs=2, dim=32, steps=1, defense="HM[S,LGA]&ICS")
    assert contents(finished[0]) == before


def test_a_folder_with_other_files_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("precious")
    for resume in (False, True):
        with pytest.raises(ValueError, match="is not empty and holds no run: give another folder"):
            go(tmp_path, resume=resume)
    assert contents(tmp_path) == {"thesis.txt": b"precious"}


def test_a_folder_of_a_run_killed_in_its_first_write_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "run"

    class Killed(BaseException):
        pass

    def killed(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patched:
        # As SIGKILL: nothing is tidied up.
        patched.setattr(os, "fsync", killed)
        patched.setattr(Path, "unlink", lambda *_, **__: None)
        with pytest.raises(Killed):
            go(out, resume=True)
    assert not (out / "recipe.yaml").exists()
    go(out, resume=True)


# Resuming


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"lr": 0.01}, "lr was 0.001, is 0.01"),
        ({"seed": 3, "eps": 0.1}, "eps was 0.2, is 0.1, seed was 0, is 3"),
        ({"defense": "EST[R]"}, r"defense was 'N/A\[R\]', is 'EST\[R\]'"),
        ({"dim": 8}, "dim was 16, is 8"),
    ],
)
def test_resume_with_another_recipe_is_refused(tmp_path: Path, changes: dict[str, Any], told: str) -> None:
    out = tmp_path / "run"
    out.mkdir()
    (out / "recipe.yaml").write_text(
        "".join(f"{k}: {v}\n" for k, v in quick().model_dump(mode="json").items() if v is not None)
    )
    before = contents(out)
    with pytest.raises(ValueError, match=rf"holds another run: {told}; resume with its own recipe"):
        go(out, resume=True, model="c2f2", **changes)
    assert contents(out) == before


def test_resume_goes_on_for_more_epochs(tmp_path: Path) -> None:
    go(tmp_path / "whole", epochs=3)
    go(tmp_path / "parts", epochs=1)
    go(tmp_path / "parts", epochs=3, resume=True)
    whole, parts = contents(tmp_path / "whole"), contents(tmp_path / "parts")
    for name in ("metrics.csv", "recipe.yaml", *WEIGHTS):
        assert whole[name] == parts[name], name
    assert [row["step"] for row in rows(tmp_path / "parts")] == ["2", "4", "6"]


def test_resume_without_a_run_begins_one(tmp_path: Path) -> None:
    go(tmp_path / "resumed", resume=True)
    go(tmp_path / "begun")
    assert (
        contents(tmp_path / "resumed")["last.safetensors"] == contents(tmp_path / "begun")["last.safetensors"]
    )


@pytest.mark.parametrize("rest", ["1", "1,2", "1,2,0.3"])
def test_a_row_cut_short_is_dropped(tmp_path: Path, rest: str) -> None:
    go(tmp_path / "whole", epochs=2)
    go(tmp_path / "parts", epochs=1)
    with (tmp_path / "parts" / "metrics.csv").open("a", newline="") as file:
        file.write(rest)
    go(tmp_path / "parts", epochs=2, resume=True)
    assert contents(tmp_path / "whole")["metrics.csv"] == contents(tmp_path / "parts")["metrics.csv"]


# Networks and weights of one's own


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(OWN)
    return path


def test_own_network(tmp_path: Path, own: Path) -> None:
    module = go(tmp_path / "run", model=f"{own}:network")
    assert type(module.model).__name__ == "Mine"
    assert load_file(tmp_path / "run" / "last.safetensors").keys() == {"layers.1.weight", "layers.1.bias"}


def test_weights_to_begin_with(tmp_path: Path) -> None:
    given = rm.model("c2f2", size=8, dim=16)
    rm.save_weights(given, tmp_path / "given.safetensors")
    begun: list[dict[str, Tensor]] = []

    class Watch(L.Callback):
        def on_train_start(self, trainer: L.Trainer, pl_module: Any) -> None:
            begun.append(state(pl_module.model))

    module = go(
        tmp_path / "run", model="c2f2", weights=str(tmp_path / "given.safetensors"), callbacks=[Watch()]
    )
    assert same(begun[0], state(given))
    assert not same(state(module.model), state(given))


class Touch:
    """What a malicious pickle would do: make a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.path,)


def test_malicious_weights_are_not_run(tmp_path: Path) -> None:
    torch.save({"conv1.weight": Touch(tmp_path / "owned")}, tmp_path / "weights.pt")
    with pytest.raises(
        ValueError, match=r"weights\.pt is not plain weights: it was refused, and nothing in it was run"
    ):
        go(tmp_path / "run", model="c2f2", weights=str(tmp_path / "weights.pt"))
    assert not (tmp_path / "owned").exists()
    # The file is as bad as it looks.
    torch.load(tmp_path / "weights.pt", weights_only=False)
    assert (tmp_path / "owned").exists()


# A full disk


class FullDisk(L.Callback):
    """Lets the disk be full from the n-th synchronisation of the training on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, calls: int) -> None:
        self.monkeypatch, self.calls = monkeypatch, calls

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        fsync = os.fsync

        def full(descriptor: int) -> None:
            self.calls -= 1
            if self.calls < 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            fsync(descriptor)

        self.monkeypatch.setattr(os, "fsync", full)


@pytest.mark.parametrize(("calls", "step"), [(2, 1), (4, 1), (6, 1), (8, 2), (10, 3)])
def test_a_full_disk_keeps_the_previous_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, calls: int, step: int
) -> None:
    # Two for each file: the checkpoint of step 1, last and best weights, the checkpoints of step 2, which
    # ends the epoch, and of step 3. The callbacks of the user come after metrics.csv's.
    with monkeypatch.context() as patched, pytest.raises(CutShortError, match="No space left") as caught:
        go(tmp_path / "run", callbacks=[FullDisk(patched, calls)], epochs=2, save_every=1)
    assert "make room" in str(caught.value)
    kept = torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)
    assert kept["global_step"] == step
    assert not [path.name for path in (tmp_path / "run").iterdir() if path.name.endswith(".tmp")]


def test_after_a_full_disk_the_run_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    go(tmp_path / "whole", batch=512, epochs=2, save_every=3)
    with monkeypatch.context() as patched, pytest.raises(CutShortError, match="No space left"):
        go(tmp_path / "run", callbacks=[FullDisk(patched, 2)], batch=512, epochs=2, save_every=3)
    assert torch.load(tmp_path / "run" / "last.ckpt", weights_only=True)["global_step"] == 3
    go(tmp_path / "run", resume=True, batch=512, epochs=2, save_every=3)
    for name in ("metrics.csv", *WEIGHTS):
        assert contents(tmp_path / "run")[name] == contents(tmp_path / "whole")[name], name
