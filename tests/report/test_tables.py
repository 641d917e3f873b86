"""The tables: our figures, the published ones and the differences, in every format."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from robustmetric.experiments.findings import Finding
from robustmetric.experiments.outcome import Outcome
from robustmetric.experiments.paper import Experiment, Row, experiment, experiment_names
from robustmetric.experiments.published import published_hardness
from robustmetric.report.sheet import Row as Line
from robustmetric.report.sheet import Sheet, escaped, sheet_of_records, spelled
from robustmetric.report.summary import SCORES, Estimate
from robustmetric.report.tables import SAMPLERS, sheet
from robustmetric.text import printable
from tests.helpers.records import GOAL, a_record, altered

Make = Callable[[Row, int], Outcome | None]


def findings(found: Experiment, make: Make) -> list[Finding]:
    return [Finding(row, tuple(make(row, k) for k in range(len(row.tasks)))) for row in found.rows]


def as_published(row: Row, number: int, shift: float = 0.0) -> Outcome | None:
    """What the paper has for a row, with `shift` points more R@1 for each further seed."""
    known = row.published
    if known is None or known.collapsed:
        return Outcome(Path("cell"), collapsed="R@1 fell to 1 %")
    return Outcome(Path("cell"), a_record({**known.scores, "R@1": known.scores["R@1"] + shift * number}))


def rows_of(made: Sheet) -> list[dict[str, str]]:
    return [dict(zip(made.headers, row, strict=True)) for row in made.texts]


def figures_of(made: Sheet) -> list[dict[str, str]]:
    return list(csv.DictReader(io.StringIO(made.csv())))


def test_ours_stand_beside_the_published_ones_with_the_difference() -> None:
    table = experiment("table7")

    def make(row: Row, number: int) -> Outcome:
        assert row.published is not None
        return Outcome(Path(), a_record({**row.published.scores, "R@1": 38.54, "TMA": 0.5}, width=1.5))

    made = sheet(table, findings(table, make), "150 epochs")
    ours, known, difference = rows_of(made)[:3]
    assert (ours["data"], ours["defense"], ours["η"], ours[""]) == ("cub", "HM[S,LGA]", "8", "ours")
    assert (ours["R@1 ↑"], known["R@1 ↑"], difference["R@1 ↑"]) == ("38.5 [37.0, 40.0]", "38.0", "+0.5")
    assert (ours["ERS ↑"], known["ERS ↑"], difference["ERS ↑"]) == ("32.4 [30.9, 33.9]", "32.4", "0.0")
    assert (ours["TMA ↓"], known["TMA ↓"], difference["TMA ↓"]) == ("0.500", "0.567", "−0.067")
    assert known[""] == "published"
    assert any("mAP mixes two measures" in note for note in made.notes)
    assert any(note.startswith("Careful: cub has 3 of 100 test classes here") for note in made.notes)
    first, second, third = figures_of(made)[:3]
    assert [first["kind"], second["kind"], third["kind"]] == ["ours", "published", "difference"]
    for name in SCORES:
        assert float(third[name]) == pytest.approx(float(first[name]) - float(second[name]), abs=1e-9)
    assert (float(first["R@1 low"]), float(first["R@1 high"])) == pytest.approx((37.04, 40.04))
    assert first["scale"] == "150 epochs"
    assert not {"NMI low", "R@1 deviation"} & first.keys(), "no row has them"


def test_several_seeds_are_a_mean_with_its_deviation() -> None:
    table = experiment("table9", seeds=(3, 4, 5))
    made = sheet(table, findings(table, lambda row, k: as_published(row, k, 2.0)), "few")
    ours, known, difference = rows_of(made)[:3]
    assert ours[""] == "ours, 3 seeds"
    assert (ours["R@1 ↑"], known["R@1 ↑"], difference["R@1 ↑"]) == ("40.7 ± 2.0", "38.7", "+2.0")
    found = figures_of(made)
    kinds = ["ours", "seed 3", "seed 4", "seed 5", "published", "difference"]
    assert [row["kind"] for row in found[:6]] == kinds
    assert float(found[0]["R@1 deviation"]) == pytest.approx(2.0)
    assert found[0]["R@1 low"] == ""
    assert [float(row["R@1"]) for row in found[1:4]] == pytest.approx([38.7, 40.7, 42.7])
    assert float(found[2]["R@1 low"]) == pytest.approx(39.7)


def test_collapse_is_shown_as_such_with_figures_if_there_are_some() -> None:
    table = experiment("table4")
    fell = a_record({"R@1": 0.8, "ERS": 29.7}, why="all embeddings are one")
    outcomes = {
        "HM[S,0]": Outcome(Path(), fell, collapsed="all embeddings are one"),
        "HM[S,-γ]": Outcome(Path(), collapsed="R@1 fell to 1 %"),
    }
    made = sheet(table, findings(table, lambda row, k: outcomes.get(row.defense)), "few")
    rows = {row["defense"]: row for row in rows_of(made) if row["defense"] and row["η"] == "8"}
    assert (rows["HM[S,0]"][""], rows["HM[S,0]"]["R@1 ↑"]) == ("ours, collapsed", "0.8 [-0.2, 1.8]")
    assert (rows["HM[S,-γ]"]["R@1 ↑"], rows["HM[S,-γ]"]["ERS ↑"]) == ("collapse", "")
    assert rows["HM[S,M]"]["R@1 ↑"] == "not run"
    assert "Collapse of cub HM[S,-γ] η=8: R@1 fell to 1 %." in made.notes
    # Nothing is subtracted where there is nothing.
    assert sum(row.kind == "difference" for row in made.rows) == 1


def test_a_published_row_that_joins_two_trainings_is_marked() -> None:
    table = experiment("table6", ["fashion-mnist"])
    made = sheet(table, findings(table, lambda row, k: None), "few")
    names = ["N/A[R]", "EST[R]", "ACT[R]"]
    marked = [row.about["defense"] for row in made.rows if row.label == "published †"]
    assert marked == [row["defense"] for row in figures_of(made) if row["joined"]] == names
    assert any(note.startswith("†: ") for note in made.notes)
    assert r"published $\dagger$" in made.latex()
    figure = experiment("figure1", ["fashion-mnist"])
    alone = sheet(figure, findings(figure, lambda row, k: None), "few")
    assert "†" not in alone.markdown(), "R@1 and ERS are of one training"


def test_pairs_are_a_matrix_of_sources_and_destinations() -> None:
    table = experiment("table2")
    made = sheet(table, findings(table, lambda row, k: as_published(row, k)), "few")
    rows = rows_of(made)
    assert [row["source"] for row in rows if row["source"]] == list(SAMPLERS.values())
    softhard = next(row for row in rows if (row["source"], row[""]) == ("Softhard", "ours"))
    assert (softhard["Semihard R@1 ↑"], softhard["Semihard ERS ↑"]) == ("38.4", "29.6")
    assert (softhard["Hardest R@1 ↑"], softhard["Hardest ERS ↑"]) == ("collapse", "")
    for row in table.rows:
        assert row.published is not None
        source, destination = (SAMPLERS[letter] for letter in row.defense[3:-1].split(","))
        published = rows[[r["source"] for r in rows].index(source) + 1]
        told = "collapse" if row.published.collapsed else f"{row.published.scores['R@1']:.1f}"
        assert published[f"{destination} R@1 ↑"] == told
    one = next(row for row in figures_of(made) if row["defense"] == "HM[S,M]")
    assert (one["source"], one["destination"], one["R@1"], one["R@1 low"]) == ("S", "M", "38.4", "37.4")


def test_a_pair_that_collapsed_with_a_record_is_marked() -> None:
    table = experiment("table2", ["digits"])
    fell = Outcome(Path(), a_record({"R@1": 10.0}, why="one point"), collapsed="one point")
    made = sheet(table, findings(table, lambda row, k: fell), "few")
    assert made.texts[0][2:4] == ["10.0*", "33.5*"]
    assert "*: the network has collapsed, or nearly so." in made.notes


def test_samplers_have_mean_and_variances() -> None:
    table = experiment("table1", ["cub", "digits"])
    hardness: dict[str, dict[str, float | None]] = {
        s: {"mean": m + 0.001, "variance": v, "variance_within": 50 * v}
        for (_, s), (m, v) in published_hardness().items()
    }
    hardness["S(itself=False)"] = {"mean": -0.061, "variance": None, "variance_within": 0.0005}
    made = sheet(table, findings(table, lambda row, k: Outcome(Path(), hardness=hardness)), "1000 batches")
    assert made.headers[3:] == ["Random", "Semihard", "Softhard", "Softhard p≠a", "Distance", "Hardest"]
    ours, known, difference, variance = map(tuple, made.texts[:4])
    assert ours == ("cub", "E[H]", "ours", "-0.163", "-0.125", "-0.084", "-0.061", "0.044", "0.045")
    assert known[3:] == ("-0.164", "-0.126", "-0.085", "-", "0.043", "0.044")
    assert difference[3:] == ("+0.001", "+0.001", "+0.001", "", "+0.001", "+0.001")
    assert variance == ("cub", "Var[H]", "ours", "0.00035", "0.00013", "0.00122", "-", "0.00021", "0.00021")
    within = made.texts[6]
    assert tuple(within[:6]) == ("cub", "Var[H] within batches", "ours", "0.01750", "0.00650", "0.06100")
    assert [row.kind for row in made.rows if row.about["data"] == "digits"] == ["ours"] * 3, "never published"
    first = figures_of(made)[0]
    assert first["statistic"] == "E[H]"
    assert float(first["S"]) == pytest.approx(-0.084)


def test_a_figure_is_the_table_of_its_points() -> None:
    figure = experiment("figure1")
    made = sheet(figure, findings(figure, lambda row, k: as_published(row, k)), "few")
    assert made.headers == ["data", "defense", "η", "cost η+1", "", "R@1 ↑", "ERS ↑"]
    points = [tuple(row[1:4]) for row in made.texts if row[4] == "ours"]
    costs = [(str(steps), str(steps + 1)) for steps in (2, 4, 8, 16, 32)]
    assert points == [(d, *both) for d in ("ACT[R]", "ACT[S]", "HM[S,LGA]&ICS") for both in costs]
    assert figures_of(made)[0]["cost"] == "3"


def cells_of(line: str) -> int:
    """How many columns a line of a table takes."""
    cells = re.split(r"(?<!\\)&", line.removesuffix(r" \tabularnewline"))
    wide = [re.match(r"\s*\\multicolumn\{(\d+)\}", cell) for cell in cells]
    return sum(int(one[1]) if one else 1 for one in wide)


def check_latex(text: str) -> None:
    """Check that braces and environments are balanced, and that each line has as many cells as the table."""
    depth = 0
    for brace in re.findall(r"(?<!\\)[{}]", re.sub(r"\\\\", "", text)):
        depth += 1 if brace == "{" else -1
        assert depth >= 0
    assert depth == 0
    assert re.findall(r"\\(?:begin|end)\{[a-z]+\*?\}", text) == [
        r"\begin{table*}", r"\begin{tabular}", r"\end{tabular}", r"\end{table*}",
    ]  # fmt: skip
    assert len(re.findall(r"(?<!\\)\$", text)) % 2 == 0
    columns = re.search(r"\\begin\{tabular\}\{([lr]+)\}", text)
    assert columns is not None
    for line in text.splitlines():
        if line.endswith(r"\tabularnewline"):
            assert cells_of(line) == len(columns[1]), line


@pytest.mark.parametrize("name", experiment_names())
@pytest.mark.parametrize("seeds", [(0,), (0, 1)])
def test_every_table_and_figure_can_be_written(name: str, seeds: Sequence[int]) -> None:
    found = experiment(name, seeds=seeds)
    hardness = {letter: {"mean": -0.1, "variance": None, "variance_within": 0.01} for letter in SAMPLERS}

    def make(row: Row, number: int) -> Outcome | None:
        if found.kind == "samplers":
            return Outcome(Path(), hardness=hardness)
        return None if (number + row.cost) % 3 == 0 else as_published(row, number)

    made = sheet(found, findings(found, make), "2 epochs")
    if found.kind == "samplers":
        assert made.texts[3][-6:] == ["-"] * 6, "one batch has no variance of means"
    check_latex(made.latex())
    lines = made.markdown().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) == len(made.rows) + 2
    assert {line.count("|") for line in table} == {len(made.headers) + 1}


HOSTILE = [
    r"\input{/etc/passwd}", r"\end{tabular}\end{table*}", "a}b{c", "50 % & # _ $ ^ ~ \\", "$x$", "[2em] *",
    "a\nb\\\\c\x1b[2J", "``|<>\"''",
]  # fmt: skip


@pytest.mark.parametrize("text", HOSTILE)
def test_no_text_can_say_anything_in_latex(text: str) -> None:
    found = escaped(text)
    # Take away what the escapes are made of: nothing that means something may be left.
    rest = re.sub(r"\\[&%$#_{}]|\\text[a-z]+\{\}|\{[\[\]*]\}", "", found)
    assert not re.search(r"[\\&%$#_{}\[\]*~^\n\x00-\x1f]", rest)
    assert spelled(text) == found


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("N/A[R]", r"N/A{[}$\mathcal{R}${]}"),
        ("HM[S,LGA(u=2.2)]", r"HM{[}$\mathcal{S}$,$g_\mathsf{LGA}$(u=2.2){]}"),
        ("HM[S,-γ/2]", r"HM{[}$\mathcal{S}$,-$\gamma$/2{]}"),
        ("HM[S,gB(M)]", r"HM{[}$\mathcal{S}$,$g_\mathsf{B}$($\mathcal{M}$){]}"),
        ("HM[a_b.py:Mine,g1/2]", r"HM{[}a\_b.py:Mine,$g_\mathsf{1/2}${]}"),
    ],
)
def test_defenses_have_the_paper_s_letters(name: str, wanted: str) -> None:
    assert spelled(name) == wanted


@pytest.mark.parametrize("text", [*HOSTILE, "=1+1", "a|b", "<b>", "x](http://y)"])
def test_foreign_names_are_shown_as_they_are(text: str) -> None:
    row = Line({"data": text, "defense": text}, {"R@1": Estimate(-1.0)})
    made = Sheet(text, {"data": "data", "defense": "defense"}, {"R@1": SCORES["R@1"]}, (row,), (text,))
    check_latex(made.latex())
    table = [line for line in made.markdown().splitlines() if line.startswith("|")]
    assert len(table) == 3
    assert {len(re.findall(r"(?<!\\)\|", re.sub(r"\\\\", "", line))) for line in table} == {4}
    assert not re.search(r"(?<!\\)<|\]\(", made.markdown())
    (found,) = figures_of(made)
    assert found["data"] == printable(f"'{text}" if text.startswith("=") else text)
    assert found["R@1"] == "-1.0"


def test_a_table_of_records_has_all_their_scores() -> None:
    one = altered(a_record(name="one"), suite={"goals": {"misrank": GOAL}})
    other = altered(a_record(attacks=False), settings={"steps": 8}, retrieval={"NMI": {"value": None}})
    made = sheet_of_records({"one": one, "other": other})
    assert made.headers == ["network", "data", *(c.heading for c in SCORES.values()), "worst misrank ↑"]
    first, second = rows_of(made)
    assert (first["R@1 ↑"], first["TMA ↓"], first["worst misrank ↑"]) == ("37.2 [36.2, 38.2]", "0.806", "7.4")
    assert (second["worst misrank ↑"], second["NMI ↑"]) == ("-", "-")
    assert made.notes[0] == "Careful: they differ in η: one: 32, other: 8."
    assert made.notes[1:] == [f"{name}: only collapse was checked" for name in ("one", "other")]
