"""The paper's tables and figures: the right rows, published values and cells."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from robustmetric.defenses import defense
from robustmetric.evaluation import COLUMNS
from robustmetric.evaluation.ers import terms
from robustmetric.experiments.cells import Cell, Samplers, Scale, as_trained
from robustmetric.experiments.outcome import evaluation_of
from robustmetric.experiments.paper import all_cells, experiment, experiment_names
from robustmetric.experiments.published import published, published_hardness

FIGURES = ("figure1", "figure6", "figure7", "figure8")


def test_tables_have_the_paper_s_rows() -> None:
    rows = {name: len(experiment(name).rows) for name in experiment_names()}
    assert list(rows) == experiment_names() == [*(f"table{k}" for k in range(1, 12)), *FIGURES]
    assert rows == {
        "table1": 1, "table2": 25, "table3": 21, "table4": 16, "table5": 14, "table6": 27, "table7": 2,
        "table8": 2, "table9": 3, "table10": 2, "table11": 25, "figure1": 15, "figure6": 20, "figure7": 25,
        "figure8": 20,
    }  # fmt: skip


def test_a_cell_of_two_tables_is_one() -> None:
    cells = [task for task in all_cells() if isinstance(task, Cell)]
    assert len(cells) == len(set(cells)) == 92
    assert Counter(cell.data for cell in cells) == {"cub": 72, "cars": 9, "sop": 11}


def printed_tables() -> dict[int, list[list[str]]]:
    """The lines of the paper's tables, as words."""
    found: dict[int, list[list[str]]] = {}
    for line in Path(__file__).with_name("paper_tables.txt").read_text(encoding="utf-8").splitlines():
        words = line.split()
        if words[:1] == ["Table"]:
            found[int(words[1])] = []
        elif words and words[0] != "#":
            found[max(found)].append(words)
    return found


def test_published_figures_are_those_that_the_paper_prints() -> None:
    """Row by row, in both directions: all 1,530 of Tables 3 to 11, and those of Tables 1 and 2."""
    printed, known = printed_tables(), [row for row in published() if row.table]
    names = ["R@1", "R@2", "mAP", "NMI", *COLUMNS, "ERS"]
    assert all(row.scores.keys() == ({*names} if not row.collapsed else set()) for row in known)
    ours = [
        (row.table, row.data.upper(), row.defense, "N/A" if row.steps is None else str(row.steps),
         "Collapse" if row.collapsed else [row.scores[name] for name in names])
        for row in known
    ]  # fmt: skip
    theirs = [
        (table, *words[:3], "Collapse" if words[3] == "Collapse" else [float(word) for word in words[3:]])
        for table in range(3, 12)
        for words in printed[table]
    ]
    assert ours == theirs
    counts = [len(words) - 3 for table in range(3, 12) for words in printed[table] if words[3] != "Collapse"]
    assert sum(counts) == 1530
    means, variances = ([float(word) for word in words[1:]] for words in printed[1])
    both = dict(zip("RMSDH", zip(means, variances, strict=True), strict=True))
    assert published_hardness() == {("cub", letter): one for letter, one in both.items()}
    pairs = {row.defense[3:6:2]: row for row in known if row.table == 11}
    for source, words in zip("RMSDH", printed[2], strict=True):
        rows = [pairs[source + destination] for destination in "RMSDH"]
        shown = ["Collapse" if r.collapsed else f"{r.scores['R@1']} {r.scores['ERS']}" for r in rows]
        assert " ".join(shown) == " ".join(words[1:])


def test_what_is_published_of_one_training_is_the_same_everywhere() -> None:
    """Cells are shared rightly: rows of different tables that are one training have one set of figures."""
    found: dict[Cell, dict[str, float]] = {}
    for row in published():
        cell = Cell.of(row.data, row.defense, row.steps)
        assert found.setdefault(cell, dict(row.scores)) == row.scores


def test_the_ers_of_each_complete_row_is_the_mean_of_its_terms() -> None:
    complete = [row for row in published() if set(COLUMNS) <= row.scores.keys()]
    assert len(complete) == 102 + 3
    for row in complete[:102]:
        ten = terms({name: row.scores[name] for name in COLUMNS}, protocol="reference")
        # Each column is rounded to 0.05 points, TMA to 0.05 and ES:D to 0.025; the ERS itself to 0.05.
        assert sum(ten.values()) / 10 == pytest.approx(row.scores["ERS"], abs=0.1), row


def test_rows_whose_ers_is_not_that_of_their_scores_are_marked_as_joined() -> None:
    """Fashion-MNIST: the ten scores are of other trainings than R@1 and ERS."""
    joined = [row for row in published() if row.joined]
    assert [row.defense for row in joined] == ["N/A[R]", "EST[R]", "ACT[R]"]
    for row in joined:
        ten = terms({name: row.scores[name] for name in COLUMNS}, protocol="reference")
        assert abs(float(sum(ten.values())) / 10 - row.scores["ERS"]) > 0.1, row


def test_figures_take_their_points_from_the_tables() -> None:
    rows = experiment("figure1").rows
    assert [row.cost for row in rows] == [3, 5, 9, 17, 33] * 3
    ours = [row for row in rows if row.defense == "HM[S,LGA]&ICS"]
    assert [row.published.scores["ERS"] for row in ours if row.published] == [15.2, 24.6, 33.5, 36.0, 36.0]
    known = (
        set(experiment("table3").tasks) | set(experiment("table4").tasks) | set(experiment("table5").tasks)
    )
    for name in FIGURES:
        assert set(experiment(name).tasks) <= known


def test_another_data_set_takes_the_rows_and_no_published_figures() -> None:
    table = experiment("table6", ["digits"])
    assert [row.defense for row in table.rows] == [row.defense for row in experiment("table6", ["cub"]).rows]
    assert all(row.published is None for row in table.rows)


def test_fashion_mnist_is_compared_with_what_the_reference_s_page_gave() -> None:
    table = experiment("table6", ["fashion-mnist"])
    known = {row.defense: row.published.scores["ERS"] for row in table.rows if row.published is not None}
    assert known == {"N/A[R]": 4.5, "EST[R]": 36.4, "ACT[R]": 67.7, "HM[S,LGA]&ICS": 83.9}


def test_names_are_those_of_a_training() -> None:
    for cell in all_cells():
        if isinstance(cell, Cell):
            assert defense(cell.defense).name == cell.defense
            assert as_trained("cub", cell.defense) == cell.defense


@pytest.mark.slow
def test_names_of_folders_are_one_to_one() -> None:
    scale = Scale()
    cells = all_cells(seeds=(0, 1)) + all_cells(["digits"], seeds=(0, 1))
    slugs = [cell.slug for cell in cells]
    assert len(set(slugs)) == len(set(cells)) == len(cells)
    assert all(slug.isascii() and "/" not in slug for slug in slugs)
    some = [cells[0], *cells[1:8]]
    assert len({scale.name(cell) for cell in some}) == len(some)


@pytest.mark.parametrize(
    "changed",
    [
        {"epochs": 3}, {"devices": 2}, {"changes": {"dim": 16}}, {"skip_broken": True},
    ],
)  # fmt: skip
def test_whatever_decides_about_a_training_is_in_the_name(changed: dict[str, object]) -> None:
    cell = Cell("digits", "HM[S,LGA]", 8)
    assert Scale(**changed).name(cell) != Scale().name(cell)  # type: ignore[arg-type]


def test_another_evaluation_is_of_the_same_training() -> None:
    cell = Cell("digits", "HM[S,LGA]", 8)
    assert Scale(queries=5, steps=4).name(cell) == Scale().name(cell)
    places = {evaluation_of(Path("cell"), Scale(queries=q, steps=s)) for q in (None, 5) for s in (4, 32)}
    assert len(places) == 4


def test_where_files_are_is_not_in_the_name() -> None:
    cell = Cell("cub", "HM[S,LGA]", 8)
    here, there = (Scale(roots={"cub": Path(p)}) for p in ("a", "b"))
    assert here.name(cell) == there.name(cell)


def test_cells_are_trained_as_published() -> None:
    recipe = Scale().recipe(Cell.of("sop", "HM[S,LGA]&ICS", 32))
    assert (recipe.defense, recipe.steps, recipe.lr, recipe.freeze_bn) == (
        "HM[S,LGA]&ICS(λ=0.05)", 32, 1e-5, True,
    )  # fmt: skip
    assert (recipe.reference, recipe.validation, recipe.epochs, recipe.batch) == (True, 0, 75, 112)
    plan = Scale().plan(Cell.of("sop", "HM[S,LGA]&ICS", 32)).settings
    assert (plan.protocol, plan.eps, plan.alpha, plan.steps) == ("reference", 8 / 255, 3 / 255, 32)


def test_the_samplers_are_measured_whatever_is_trained() -> None:
    assert Scale(epochs=3).name(Samplers("digits")) == Scale().name(Samplers("digits"))
    assert Scale(batches=3).name(Samplers("digits")) != Scale().name(Samplers("digits"))


def test_files_decide_by_their_contents(tmp_path: Path) -> None:
    """Weights and a network of one's own are told by what is in them, wherever they lie."""
    cell = Cell("digits", "HM[S,LGA]", 8)
    names = []
    for folder, content in (("a", "x = 1\n"), ("b", "x = 1\n"), ("c", "x = 2\n")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "net.py").write_text(content)
        (tmp_path / folder / "w.pth").write_text(content)
        own = Scale(changes={"model": f"{tmp_path / folder / 'net.py'}:net"})
        begins = Scale(changes={"weights": tmp_path / folder / "w.pth"})
        names.append((own.name(cell), begins.name(cell)))
    assert names[0] == names[1]
    assert all(first != other for first, other in zip(names[0], names[2], strict=True))


def test_images_of_one_s_own_are_told_by_their_folder(tmp_path: Path) -> None:
    cell = Cell("csv", "HM[S,LGA]", 8)
    sizes = {"resize": 8, "crop": 8}
    one, other = (Scale(roots={"csv": tmp_path / name}, changes=sizes) for name in ("a.csv", "b.csv"))
    assert one.name(cell) != other.name(cell)
