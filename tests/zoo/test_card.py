"""The model card: its figures are the record's, in its tables and in what Hugging Face reads."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

import robustmetric as rm
from robustmetric.evaluation import Record
from robustmetric.evaluation.record import Score
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import make_recipe
from robustmetric.zoo.card import PAPER
from robustmetric.zoo.front import front_matter, images_of
from robustmetric.zoo.summary import headline
from tests.helpers.hostile import HOSTILE, hostile_record
from tests.helpers.records import altered, written
from tests.helpers.runs import make_run
from tests.zoo.conftest import about, record_of, with_record


def published(run: Path, **how: object) -> str:
    done = rm.publish(run, run.parent / "out", **how)  # type: ignore[arg-type]
    return (done.folder / "README.md").read_text(encoding="utf-8")


def read(card: str) -> Any:
    """What Hugging Face reads of a card."""
    return ModelCard(card).data


def section(card: str, heading: str) -> str:
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", card, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def table(text: str) -> list[list[str]]:
    """The cells of a table, its head first."""
    rows = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[c.strip().replace("\\", "") for c in re.split(r"(?<!\\)\|", row)[1:-1]] for row in rows]


def shown(record: Record, name: str) -> list[str]:
    """What a table shows of a score: value, interval, clean value."""
    score = record.ers if name == "ERS" else {**record.retrieval, **record.scores}[name]
    assert score is not None
    show = record.column(name).show
    interval = "" if score.low is None else f"{show(score.low)} to {show(score.high)}"
    clean = show(score.before) if isinstance(score, Score) and name in record.scores else ""
    return [show(score.value), interval, clean]


def test_every_score_is_the_records(run: Path) -> None:
    records = {
        "evaluation-reference": with_record(run, "evaluation-reference", protocol="reference"),
        "evaluation-strict": with_record(run, "evaluation-strict"),
    }
    card = published(run)
    for folder, record in records.items():
        head, *rows = table(section(card, folder))
        assert head == ["score", "value", "95 % interval", "clean", "unit", "meaning"]
        assert len(rows) == 15
        for name, row in zip(record.columns(), rows, strict=True):
            assert row[0] == record.column(name).heading
            assert row[1:4] == shown(record, name)
            assert row[4] == record.column(name).unit.name
        _, *worst = table(section(card, f"{folder}: worst case"))
        assert [row[:6] for row in worst] == [["misrank ↑", "7.4", "4.3 to 10.6", "98.4", "%", "9"]]
    assert "- evaluation-reference follows the protocol `reference`: its figures compare with" in card
    assert "Few images were attacked (evaluation-reference 9 and evaluation-strict 9)" in card
    assert "The test images are of 3 classes: chance finds the right one for some 33 %." in card


def test_several_records_by_the_reference(run: Path) -> None:
    for name in ("evaluation-reference", "evaluation-small"):
        with_record(run, name, protocol="reference")
    told = (
        "- evaluation-reference and evaluation-small follow the protocol `reference`: their figures compare"
    )
    assert told in published(run)


def test_the_command_of_a_record_with_a_suite_is_one_that_is_typed(run: Path) -> None:
    plan = {"suite": "worst-case(goals='misrank')"}
    written(altered(record_of(run), settings=plan), run / "evaluation")
    command = section(published(run), "evaluation").split("```sh\n")[1].split("\n```")[0]
    assert " --suite \"worst-case(goals='misrank')\" " in command
    assert plan["suite"] in shlex.split(command)


def test_hugging_face_reads_the_figures(run: Path) -> None:
    records = {
        "evaluation-reference": with_record(run, "evaluation-reference", protocol="reference"),
        "evaluation-strict": with_record(run, "evaluation-strict"),
    }
    data = read(published(run, licence="Apache-2.0"))
    assert (data.license, data.library_name, data.pipeline_tag) == (
        "apache-2.0", "robustmetric", "image-feature-extraction",
    )  # fmt: skip
    assert data.datasets is None  # images of one's own
    assert data.model_name == "c2f2 HM[S,LGA]&ICS, η = 8"
    found = {(one.dataset_config, one.metric_type): one for one in data.eval_results}
    kinds = {
        "R@1": "recall_at_1", "R@2": "recall_at_2", "mAP": "mean_average_precision",
        "NMI": "normalized_mutual_information", "ERS": "empirical_robustness_score",
        "misrank": "worst_case_misrank",
    }  # fmt: skip
    assert found.keys() == {(folder, kind) for folder in records for kind in kinds.values()}
    assert data.metrics == list(kinds.values())
    for folder, record in records.items():
        for name, kind in kinds.items():
            one = found[folder, kind]
            assert one.metric_value == round(record[name], 2)  # one digit more than the tables
            assert one.metric_config.startswith(f"{record.settings.protocol} protocol, ε = ")
            assert one.metric_name.endswith(f" ({record.settings.protocol})")
            assert (one.dataset_type, one.dataset_name, one.dataset_split) == ("digits", "digits 8×8", "test")
            assert one.dataset_args == {"images": 9, "classes": 3, "sha256": record.data.sha256}
            assert (one.metric_args is None) == (name == "NMI")
        assert record.ers is not None
        assert found[folder, kinds["ERS"]].metric_args == {
            "low": round(record.ers.low or 0, 2), "high": round(record.ers.high or 0, 2), "interval": "95 %",
        }  # fmt: skip
    again = read(f"---\n{data.to_yaml()}\n---\n")
    assert again.eval_results == data.eval_results


def test_figures_that_are_no_shares_have_four_digits(run: Path) -> None:
    goal = {**record_of(run).suite.goals["misrank"].model_dump(), "unit": "distance", "value": 1.23456789}  # type: ignore[union-attr]
    written(altered(record_of(run), suite={"goals": {"shift": goal}}), run / "evaluation")
    found = {one.metric_type: one.metric_value for one in read(published(run)).eval_results}
    assert found["worst_case_shift"] == 1.2346
    assert found["recall_at_1"] == 61.23


@pytest.mark.parametrize(
    ("data", "name"),
    [("folder", "images of a folder"), ("csv", "images of a CSV file"), ("a.py:b", "images of a.py:b")],
)
def test_images_of_ones_own_are_no_data_set(data: str, name: str, run: Path) -> None:
    for given in (data, f"{data} (all)"):
        record = altered(record_of(run), data={"name": given})
        text = front_matter("a network", data, None, {"x": record})
        found = read(f"{text}Text\n")
        assert found.datasets is None
        assert {(one.dataset_type, one.dataset_name) for one in found.eval_results} == {(name, name)}
    assert images_of(data) == name


def test_the_title_says_where_the_images_come_from(run: Path) -> None:
    assert "\n# c2f2 HM[S,LGA]&ICS on images of a folder, η = 8\n" in published(run)


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ({}, "resize to 8 x 8 as Pillow does with BILINEAR; divide by 255."),
        (
            {"resize": 10, "crop": 8},
            "resize to 10 x 10 as Pillow does with BILINEAR; take the middle 8 x 8; divide by 255.",
        ),
    ],
)
def test_the_card_says_what_becomes_of_an_image(entries: dict[str, int], said: str, tmp_path: Path) -> None:
    card = published(make_run(tmp_path / "run", "last", about=about(), **entries))
    assert "the network takes floats (N, 1, 8, 8) from 0 to 1, grey. `embed` makes" in card
    assert f"convert to grey as Pillow does with L; {said}" in card


def test_a_card_without_records(run: Path) -> None:
    card = published(run, half=True)
    data = read(card)
    assert data.license is None
    assert data.eval_results is None
    assert "**Licence**: none is stated" in card
    assert "robustmetric evaluate FOLDER --root DIR --out scores" in section(card, "Scores")
    assert section(card, "Worst case").startswith("It has not been measured.")
    assert "robustmetric evaluate FOLDER --suite worst-case --root DIR --out scores" in card
    assert "The weights are rounded to half precision, which moves scores a little." in card
    assert "in half precision in the file" in card
    assert "## Checks" not in card


def test_what_the_card_says_of_the_training(run: Path) -> None:
    card = published(run)
    rows = {row[0]: row[1] for row in table(section(card, "Training"))}
    assert rows["weights"] == "best, chosen on validation images"
    assert {k: rows[k] for k in ("data", "defense", "eps", "alpha", "steps", "epochs", "seed", "dim")} == {
        "data": "folder", "defense": "HM[S,LGA]&ICS", "eps": "12/255", "alpha": "12.03125/255", "steps": "8",
        "epochs": "8", "seed": "7", "dim": "16",
    }  # fmt: skip
    assert rows["first weights"] == "first.safetensors"
    assert not rows.keys() & {"root", "fit", "zoom", "jitter"}
    changed: dict[str, Any] = {"fit": "pad", "zoom": 0.5, "jitter": 0.2}
    (run.parent / "more").mkdir()
    other = make_run(run.parent / "more" / "run", "last", about=about(), **changed)
    rows = {row[0]: row[1] for row in table(section(published(other), "Training"))}
    assert {name: rows[name] for name in changed} == {"fit": "pad", "zoom": "0.5", "jitter": "0.2"}
    assert "started 2 times" in card
    assert (
        "\nrobustmetric train --data folder --root birds --out=a --set weights=first.safetensors --defense "
        "'HM[S,LGA]&ICS'\n" in card
    )
    assert "Made with python 3.11.8." in card
    assert table(section(card, "Data"))[1] == ["training images", "1,234", "40", "a" * 64, "b" * 64]
    assert "2 images could not be read and were left out." in card
    assert 'load_zoo("folder/HM[S,LGA]&ICS η=8", folder="ZOO")' in card
    assert "a grey image of 8×8 pixels to a vector of 16 numbers" in card
    assert rm.load_run(run).digest in card


def test_a_network_without_a_defense(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "best", about=about(choice={"images": "test images"}), defense="N/A[S]")
    card = published(run)
    assert "\n# c2f2 N/A[S] on digits\n" in card
    assert "without a defense: it is here to compare with" in card
    assert {"eps", "alpha", "steps"}.isdisjoint(row[0] for row in table(section(card, "Training")))
    assert "The weights were chosen on the test images: their R@1 is too high" in card
    assert "robustmetric evaluate FOLDER --out scores" in card  # digits need no root


def test_checks_that_warn_are_explained(run: Path) -> None:
    with_record(run)
    _, *rows = table(section(published(run), "Checks"))
    assert [row[:4] for row in rows] == [["evaluation", "noise", "warn", "noise | does better"]]
    assert rows[0][4].startswith("Random noise does as much as the attack")


def test_where_only_collapse_was_checked_the_card_says_so_once(run: Path) -> None:
    record = record_of(run)
    collapse = [check.model_dump() for check in record.checks if check.name == "collapse"]
    written(altered(record, checks=collapse), run / "evaluation-a")
    card = published(run)
    assert card.count("Only collapse was checked, and passes. ") == 1
    assert "warns or fails" not in card
    assert "## Checks" not in card
    well = {"name": "noise", "status": "pass", "figure": 0.0, "limit": "", "says": ""}
    written(altered(record_of(run), checks=[*collapse, well]), run / "evaluation-b")
    card = published(run, force=True)
    assert card.count("Only collapse was checked, and passes. ") == 1
    assert section(card, "Checks").strip() == (
        "No check of whether the scores of evaluation-b can be trusted warns or fails."
    )
    failed = {**collapse[0], "status": "fail", "says": "all look alike"}
    written(altered(record, checks=[failed]), run / "evaluation-a")
    shutil.rmtree(run.parent / "out")  # which would keep the record that was there
    card = published(run)
    assert f"The ERS of {record.network.name} is not valid: all look alike." in card
    assert "Only collapse was checked" not in card
    written(altered(record, checks=[]), run / "evaluation-a")
    shutil.rmtree(run.parent / "out")
    assert "No checks were run, so nothing says how far" in published(run)


@pytest.mark.parametrize(
    ("changes", "scores", "said"),
    [
        (
            {"suite": None},
            {"ES:R": 12.0, "LTM": 9.0, "GTM": 11.0},
            "and for 9.0 % of those attacked when an attacker may change each pixel by up to 8/255. That is "
            "under the attacks of the ERS (the least of ES, LTM and GTM); strong attacks may leave far less. "
            "The ERS is ",
        ),
        (
            {},
            {"ES:R": 12.0, "LTM": 9.0, "GTM": 11.0},
            "and for 7.4 % of those attacked in the worst case, when an attacker may change each pixel by up "
            "to 8/255. The ERS is ",
        ),
        ({"suite": None, "scores": {}, "ers": None}, {}, "61.2 % of its queries.\n"),
    ],
)
def test_the_headline_names_its_attacks(
    changes: dict[str, Any], scores: dict[str, float], said: str, run: Path
) -> None:
    changed = {name: {"value": value} for name, value in scores.items()}
    record = altered(record_of(run), **{"scores": changed, **changes})
    if "scores" in changes:
        record = record.model_copy(update={"scores": {}})
    assert said in f"{headline('a', 'x', {'x': record})}\n"


def test_the_worst_case_of_another_record_counts_under_the_same_attack(run: Path) -> None:
    worst = record_of(run)
    plain = altered(worst, suite=None)
    told = headline("a", "x", {"x": plain, "y": worst})
    assert "for 7.4 % of those attacked in the worst case (y), when" in told
    for other in (
        altered(worst, data={"sha256": "1" * 64}),
        altered(worst, settings={"eps": 9 / 255}),
    ):
        assert "worst case" not in headline("a", "x", {"x": plain, "y": other})


def test_an_image_that_was_left_out_stands_apart_from_the_table(run: Path) -> None:
    assert "|\n\n2 images could not be read and were left out.\n" in section(published(run), "Data")
    (run / "run.json").write_text(about(skipped=["a.png"]))
    assert "\n\n1 image could not be read and was left out.\n" in published(run, force=True)


def test_a_check_that_failed_stands_beside_the_figures(run: Path) -> None:
    record = record_of(run)
    failed = {"name": "gradient", "status": "fail", "figure": 1.0, "limit": "none", "says": "it is zero"}
    written(
        altered(record, checks=[check.model_dump() for check in record.checks] + [failed]), run / "evaluation"
    )
    card = published(run)
    assert "\nDo not trust these scores: the check “gradient” failed, so the ERS is not valid.\n" in card
    assert f"| ERS ↑ | {record.show('ERS')} (not valid) |" in card
    assert all(
        one.metric_config.endswith("; checks that failed: gradient") for one in read(card).eval_results
    )


def test_an_ers_that_is_not_valid_is_not_claimed(run: Path) -> None:
    record = altered(record_of(run), ers={"valid": False, "why": "all images look alike"}, suite=None)
    written(record, run / "evaluation")
    card = published(run)
    assert "\nThe ERS of c2f2 HM[S,LGA]&ICS is not valid: all images look alike.\n" in card
    assert f"| ERS ↑ | {record.show('ERS')} (not valid) |" in card
    assert "empirical_robustness_score" not in card
    assert section(card, "Worst case").startswith("It has not been measured.")


def test_text_of_files_stays_text(run: Path) -> None:
    record = altered(hostile_record(), network={"sha256": rm.load_run(run).digest})
    written(record, run / "evaluation")
    card = published(run)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\u2066]", card)
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["model-index"][0]["results"][0]["metrics"][0]["type"] == "recall_at_1"
    assert read(card).eval_results
    outside = re.sub(r"^```.*?^```$", "", body, flags=re.MULTILINE | re.DOTALL)
    assert HOSTILE[:4] in outside
    assert not re.search(r"(?<!\\)<(?!\\)[a-z!/]", outside)
    assert len(re.findall("^```", body, re.MULTILINE)) % 2 == 0
    for line in body.splitlines():
        assert line.count("```") == 0 or line.startswith("```")


def test_the_paper_is_that_of_the_citation_file() -> None:
    stated = yaml.safe_load((Path(__file__).parents[2] / "CITATION.cff").read_text(encoding="utf-8"))
    paper = stated["preferred-citation"]
    for text in (
        paper["title"], paper["collection-title"], f"{paper['start']}--{paper['end']}", str(paper["year"]),
        *(f"{author['family-names']}, {author['given-names']}" for author in paper["authors"]),
    ):  # fmt: skip
        assert text in PAPER


@pytest.mark.parametrize("name", rm.zoo_names())
def test_the_cards_of_the_package_are_up_to_date(name: str, tmp_path: Path) -> None:
    """Each is what publishing its folder again writes."""
    loaded = rm.load_zoo(name)
    done = rm.publish(loaded.folder, tmp_path / "out")
    assert (done.folder / "README.md").read_text(encoding="utf-8") == loaded.card, "publish it again"
    now, was = (RunFolder(folder).read() for folder in (done.folder, loaded.folder))
    # A later version has more entries.
    assert make_recipe(now.pop("recipe")) == make_recipe(was.pop("recipe"))
    assert now == was
    assert done.digest == loaded.digest
    assert read(loaded.card).library_name == "robustmetric"
