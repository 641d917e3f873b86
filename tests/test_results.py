"""Networks that come with the project: each loads, ranks, and is listed with its command.

Their cards and records are checked in tests/zoo.
"""

import re
from pathlib import Path

import pytest
import torch

import robustmetric as rm
from robustmetric.experiments.cells import slug
from robustmetric.training.parts import perturbs

RESULTS = Path(__file__).parents[1] / "results"
ZOO = RESULTS / "zoo"
DEFENSES = {"N-A-S": "N/A[S]", "N-A-R": "N/A[R]", "HM-S-LGA-ICS-8": "HM[S,LGA]&ICS"}
"""Those of the records, by the names of their folders."""
RUNS = sorted(file.parent for file in ZOO.rglob("recipe.yaml"))


def test_the_package_has_them_all() -> None:
    """Through its link, and in folders that are named as experiments name their cells."""
    found = [rm.load_zoo(name) for name in rm.zoo_names()]
    assert sorted(run.folder.resolve() for run in found) == RUNS
    for run in found:
        eta = f"-{run.recipe.steps}" if perturbs(run.recipe) else ""
        assert run.folder.parts[-2:] == (run.recipe.data, f"{slug(run.recipe.defense)}{eta}")


def test_every_run_is_listed_with_its_command() -> None:
    rows = re.findall(
        r"^\| `(.*?)` \| `robustmetric train (.*?)` \|$", (RESULTS / "README.md").read_text(), re.M
    )
    assert [name for name, _ in rows] == [str(run.relative_to(RESULTS)) for run in RUNS][::-1]
    for name, command in rows:
        assert f'--defense "{rm.load_run(RESULTS / name).recipe.defense}"' in command


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.name)
def test_a_run_loads_and_tells_images_apart(run: Path) -> None:
    found = rm.load_run(run)
    images = torch.rand(4, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        z = rm.embed(found.network, images)
    assert z.shape == (4, 512)
    assert rm.cross_distance(z).fill_diagonal_(1).min() > 1e-3
    assert (found.recipe.data, found.recipe.epochs, found.chosen) == ("fashion-mnist", 8, "last weights")


def test_every_record_is_listed_with_its_scores() -> None:
    rows = re.findall(
        r"^\| `(.*?)` \| ([\d.]+) \| ([\d.]+) \| `robustmetric evaluate RUN --weights last --queries (\d+)"
        r"( --protocol reference)? --out scores` \|$",
        (RESULTS / "README.md").read_text(),
        re.M,
    )
    files = [file for file in RESULTS.rglob("record.json") if not file.is_relative_to(ZOO)]
    found = {str(file.parent.relative_to(RESULTS)) for file in files}
    assert sorted(name for name, *_ in rows) == sorted(found)
    for name, recall, ers, queries, reference in rows:
        record = rm.load_record(RESULTS / name)
        assert (record.show("R@1"), record.show("ERS")) == (recall, ers)
        assert record.queries.count == int(queries)
        assert record.settings == rm.Plan.make(
            eps=77 / 255, queries=1000, protocol="reference" if reference else "strict"
        )
        assert record.network.name == f"c2f2 {DEFENSES[Path(name).parent.name]}"
