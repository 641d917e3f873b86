"""Parts of the user's own, all in a file, through train, evaluate and attack on the command line."""

from __future__ import annotations

import csv
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from robustmetric import load_record
from robustmetric.evaluation.record import load_arrays
from tests.cli.tables import ONE
from tests.helpers.command import command, refused, works

OWN = '''
from dataclasses import dataclass

import torch
from lightning.pytorch.loggers import CSVLogger
from torch import nn

import robustmetric as rm
from robustmetric.attacks import DISTANCE, Column, Attack, Search
from robustmetric.data import ImageSet, load
from robustmetric.destination import Destination
from robustmetric.evaluation import Verdict
from robustmetric.losses import Term
from robustmetric.triplets import Random, Sampler


class Near(Sampler):
    """A sampler."""

    def draw(self, batch, *, generator):
        return Random()(batch, generator=generator)


class Halfway(Destination):
    def hardness(self, mined, *, generator):
        return mined.hardness / 2


class Pull(Term):
    """A term."""

    roles = ("a", "a~")

    def __init__(self, weight=0.5):
        self.weight = weight

    def loss(self, embeddings, *, margin):
        return self.weight * (embeddings["a"] - embeddings["a~"]).square().sum(1).mean()


class Plain(rm.Defense):
    """A defense that needs a step alone, and logs something of its own."""

    def step(self, network, images, labels):
        z = network(images, learn=True)
        a, p, n = (z[role] for role in self.mine(z, labels).triplets)
        return rm.Step(rm.triplet_loss(a, p, n, self.margin), {"own/length": float(z.shape[1])})

    def mine(self, z, labels):
        from robustmetric.triplets import Batch, Mined
        return Mined.of(Batch.of(z, labels), Random(), self.generator)


def net(width=16, channels=3):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, width))


def shapes(root, split, first=150):
    some = load("digits", root, split).take(range(first))
    return ImageSet("shapes", split, some.labels, some.classes, pixels=some.pixels)


class Lines(CSVLogger):
    def __init__(self, out):
        super().__init__(out, name="lines", version="")


class Mine(Attack):
    """Move away from where it was."""

    name = "mine"
    columns = (Column("mine:D", "lower", DISTANCE),)

    def __init__(self, k=1):
        self.k = k

    def select(self, queries, gallery, *, draws):
        return torch.empty(len(queries), 0, dtype=torch.long, device=queries.own.device)

    def start(self, images, *, draws):
        return images + 0.01 * draws.signs(*images.shape[1:]).to(images)

    def objective(self, z, target, queries, gallery):
        return -self.k * (z - queries.z).square().sum(1)

    def measure(self, z, target, queries, gallery):
        return {"mine:D": (z - queries.z).norm(dim=1)}


@dataclass(frozen=True, kw_only=True)
class Jump(Search):
    """Noise of size ε."""

    share: float = 1.0

    follows_gradient = False

    def minimise(self, problem):
        images = problem.images
        noise = self.share * problem.budget.eps * problem.draws.signs(*images.shape[1:])
        return (images + noise.to(images)).clamp(0, 1)


def odd(findings, most=10):
    count = len(findings.numbers)
    return Verdict("pass" if count < most else "warn", count, f"less than {most}", f"{count} queries")
'''
TRAIN = ("--recipe", "digits", "--batch", 128, "--epochs", 1, "--steps", 1, "--out", "run")
SMALL = ("--queries", 6, "--steps", 2)
NETWORK = ("--model", "own.py:net", "--data", "own.py:shapes", "--size", 8)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_all_parts_from_training_to_an_attack(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    defense = "HM[own.py:Near,own.py:Halfway]&own.py:Pull"
    own = ["--defense", defense, "--model", "own.py:net(width=8)", "--data", "own.py:shapes", "--logger"]
    shown = works("train", *own, "own.py:Lines", *TRAIN)
    assert defense in shown
    assert (home / "run" / "lines" / "metrics.csv").is_file()
    assert load_file(home / "run" / "last.safetensors")["1.weight"].shape[0] == 8
    attacks = ["--attacks", "ES,own.py:Mine(k=2)", "--checks", "quick,own.py:odd"]
    shown = works("evaluate", "run", *SMALL, *attacks, "--trust")
    assert "mine:D ↓" in shown
    record = load_record(home / "run")
    assert record.settings.attacks == ("ES", "own.py:Mine(k=2)")
    assert record.checks[-1].name == "odd"
    assert record.checks[-1].status == "pass"
    assert record.data.images == 150
    score = record.scores["mine:D"]
    assert (score.better, score.unit) == ("lower", "distance")
    assert record["mine:D"] == pytest.approx(record["ES:D"], rel=0.5)

    works("attack", "run", "--attack", "own.py:Mine", *SMALL, "--trust", "--out", "images")
    with (home / "images" / "ranks.csv").open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["mine:D before"]) for row in rows] == [0] * 6
    assert min(float(row["mine:D after"]) for row in rows) > 0

    # The run holds what it needs of the file.
    (home / "own.py").unlink()
    shutil.move(home / "run", home / "moved")
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    works("evaluate", "../moved", *SMALL, "--attacks", "ES", "--checks", "none", "--trust", "--out", "again")
    again = load_record("again")
    assert again.network.sha256 == record.network.sha256
    assert again["ES:D"] == record["ES:D"]


@pytest.mark.parametrize("search", ["own.py:Jump", "own.py:Jump(share=0.5)"])
def test_a_search_of_ones_own(search: str, home: Path) -> None:
    works("evaluate", *NETWORK, "--search", search, *SMALL, "--attacks", "ES", "--out", "out")
    change = load_arrays("out")["ES/change"]
    record = load_record("out")
    wanted = record.settings.eps * (0.5 if "share" in search else 1)
    assert float(change.max()) == pytest.approx(wanted, abs=1e-6)
    told = {check.name: check for check in record.checks}
    assert told["last"].status == "not run", "it follows no gradient"
    assert told["budget"].status == "pass"


@pytest.mark.slow
def test_a_transfer_by_a_search_of_ones_own(home: Path) -> None:
    works("train", "--defense", "N/A[R]", *NETWORK, *TRAIN)
    transfer = ["--search", "transfer(own.py:Jump)", "--surrogate", "run", "--trust"]
    works("evaluate", *NETWORK, *transfer, *SMALL, "--attacks", "own.py:Mine", "--out", "out")
    record = load_record("out")
    assert record.network.surrogate is not None
    assert record.settings.search == "transfer(own.py:Jump)"
    works("attack", *NETWORK, *transfer, *SMALL, "--attack", "own.py:Mine", "--out", "images")
    arrays = load_file(home / "images" / "images.safetensors")
    change = (arrays["after"] - arrays["before"]).abs().amax()
    assert float(change) == pytest.approx(record.settings.eps, abs=1e-6)


@pytest.mark.slow
def test_parts_of_ones_own_in_workers(home: Path) -> None:
    how = [*NETWORK, *SMALL, "--search", "own.py:Jump", "--attacks", "ES,own.py:Mine"]
    how += ["--checks", "none,own.py:odd(most=3)", "--batch", 2]
    works("evaluate", *how, "--out", "alone")
    works("evaluate", *how, "--out", "shared", "--devices", 2)
    for name in ("record.json", "queries.safetensors"):
        assert (home / "alone" / name).read_bytes() == (home / "shared" / name).read_bytes()
    check = load_record("alone").checks[-1]
    assert (check.name, check.status, check.limit) == ("odd(most=3)", "warn", "less than 3")


# What cannot be


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("train", "--logger", "tensorbord"), "unknown logger 'tensorbord' (did you mean 'tensorboard'?)"),
        (("train", "--defense", "own.py:Plan"), "unknown name 'Plan' (did you mean 'Plain'?)"),
        (("train", "--defense", "HM[own.py:Near(k=2),LGA]"), "its options: none"),
        (("train", "--model", "own.py:net(depth=1)"), "its options: width"),
        (("evaluate", "--search", "own.py:Jump(size=2)"), "its options: share"),
        (("evaluate", "--attacks", "none.py:Mine"), "there is no file none.py to take the attack from"),
        (("evaluate", "--attacks", "own.py:Jump"), "Jump; it must be derived from Attack"),
        (("evaluate", "--attacks", "own.py:Mine,own.py:Mine(k=2)"), "an attack was given twice: mine"),
    ],
)
def test_what_cannot_be_is_refused(arguments: tuple[str, ...], told: str, home: Path) -> None:
    name, *words = arguments
    how = TRAIN if name == "train" else (*NETWORK, *SMALL, "--out", "out")
    assert told in refused(name, *how, *words)
    assert not any((home / folder).exists() for folder in ("run", "out"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("train", *TRAIN, "--defense", "N/A[bad.py:X]"),
        ("train", *TRAIN, "--model", "bad.py:X"),
        ("evaluate", *NETWORK, "--attacks", "bad.py:X", "--out", "out"),
        ("attack", *NETWORK, "--attack", "bad.py:X", "--out", "out"),
    ],
    ids=lambda arguments: " ".join(map(str, arguments[-4:])),
)
@pytest.mark.parametrize(("content", "line"), [("import torch\n1 / 0\n", 2), ("def X(:\n", 1)])
def test_a_file_that_fails_shows_its_own_traceback_once(
    arguments: tuple[object, ...], content: str, line: int, home: Path
) -> None:
    (home / "bad.py").write_text(content)
    said = command(*arguments)
    assert said.code == 1
    assert said.err.startswith("error: ")
    assert said.err.count("Traceback") == 1
    assert f'File "{home / "bad.py"}", line {line}' in said.err
    assert said.err.count("ZeroDivisionError: division by zero" if line == 2 else "SyntaxError: ") >= 1
    assert "robustmetric/" not in said.err, "frames of the library"
    assert not any((home / name).exists() for name in ("run", "out"))


# Contracts

BREACHES = """
import robustmetric as rm
from own import Jump, Mine, Near, Plain


class Rows(Mine):
    def objective(self, z, target, queries, gallery):
        return super().objective(z, target, queries, gallery).mean()


class Flat(Jump):
    def minimise(self, problem):
        return problem.images.flatten(1)


def mute(findings):
    return True


class Lost(Plain):
    def step(self, network, images, labels):
        return 0.5


class Lone(Near):
    def draw(self, batch, *, generator):
        return None
"""


@pytest.mark.parametrize(
    ("option", "part", "told"),
    [
        ("--attacks", "Rows", "Rows.objective returned"),
        ("--search", "Flat", "Flat.minimise returned"),
        ("--checks", "mute", "Verdict(status, figure, limit, says)"),
    ],
)
def test_a_breach_in_an_evaluation_names_the_method(option: str, part: str, told: str, home: Path) -> None:
    (home / "breaches.py").write_text(BREACHES)
    given = {"--attacks": "own.py:Mine", "--search": "pgd", "--checks": "none"}
    given[option] = f"none,breaches.py:{part}" if option == "--checks" else f"breaches.py:{part}"
    pairs = [word for pair in given.items() for word in pair]
    assert told in refused("evaluate", *NETWORK, *SMALL, *pairs, "--out", "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("defense", "told"),
    [
        ("breaches.py:Lost", "what Lost.step returns must be a Step, not 0.5"),
        ("N/A[breaches.py:Lone]", "what Lone.draw returns must be a Triplets, not None"),
    ],
)
def test_a_breach_in_a_training_names_the_method(defense: str, told: str, home: Path) -> None:
    (home / "breaches.py").write_text(BREACHES)
    assert told in refused("train", *TRAIN, "--defense", defense, "--data", "own.py:shapes")


def test_a_part_of_a_file_is_the_same_as_in_python(home: Path) -> None:
    works("evaluate", *NETWORK, *SMALL, "--attacks", "own.py:Mine(k=3)", "--checks", "none", "--out", "out")
    arrays = load_arrays("out")
    objective, moved = arrays["mine/objective/last"], arrays["mine/after/mine:D"]
    assert torch.allclose(objective, -3 * moved.square(), atol=1e-5)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with parts of the user's own in nets.py."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "nets.py").write_text(
        "from torch import nn\n"
        "from robustmetric.triplets import Random\n"
        "class Near(Random): pass\n"
        "def small(dim=4, channels=3):\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(channels * 64, dim))\n"
    )
    return tmp_path


@pytest.mark.slow
@pytest.mark.parametrize("folder", ["mine (1)", "a:b.py:c", "it's"])
def test_a_run_is_used_again_whatever_its_folder_is_called(folder: str, parts: Path) -> None:
    run = parts / folder / "a"
    new = ("--data", "digits", "--model", "nets.py:small(dim=8)", "--defense", "N/A[R]", "--batch", 512)
    works("train", *new, "--epochs", 1, "--out", run)
    (parts / "nets.py").unlink()
    works("evaluate", run, *ONE, "--trust")
    works("train", "--resume", "--out", run, "--epochs", 2, "--trust")
    assert "model: code/nets.py:small(dim=8)" in (run / "recipe.yaml").read_text()
    assert load_file(run / "last.safetensors")["1.weight"].shape[0] == 8


@pytest.mark.parametrize("folder", ["mine (1)", "a,b", "a[1]"])
def test_a_folder_that_no_defense_can_name_is_refused_before_training(folder: str, parts: Path) -> None:
    new = ("--data", "digits", "--defense", "N/A[nets.py:Near]", "--batch", 512, "--epochs", 1)
    said = refused("train", *new, "--out", folder)
    assert folder in said
    assert "--out" in said
    assert not (parts / folder / "recipe.yaml").exists()
