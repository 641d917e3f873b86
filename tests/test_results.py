"""Networks that come with the project: each loads, ranks, and is listed with its command."""

import re
from pathlib import Path

import pytest
import torch

import robustmetric as rm

RESULTS = Path(__file__).parents[1] / "results"
RUNS = sorted(file.parent for file in RESULTS.rglob("recipe.yaml"))


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
    found = {str(file.parent.relative_to(RESULTS)) for file in RESULTS.rglob("record.json")}
    assert sorted(name for name, *_ in rows) == sorted(found)
    for name, recall, ers, queries, reference in rows:
        record = rm.load_record(RESULTS / name)
        assert (record.show("R@1"), record.show("ERS")) == (recall, ers)
        assert record.queries.count == int(queries)
        assert record.settings == rm.Plan.make(
            eps=77 / 255, queries=1000, protocol="reference" if reference else "strict"
        )
        assert record.network.name.endswith(f" {rm.load_run(RESULTS / name / '..').recipe.defense}")
