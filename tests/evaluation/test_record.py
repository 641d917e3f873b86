"""The record: what it holds, that it repeats byte for byte, and what is refused when it is read."""

from __future__ import annotations

import hashlib
import json
import math
import platform
import shutil
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from robustmetric.errors import UserError
from robustmetric.evaluation import Record, load_arrays, load_record
from robustmetric.evaluation.identity import digest_of
from robustmetric.evaluation.record import FORMAT
from robustmetric.files import save_entries
from tests.evaluation.conftest import Evaluated, Tiny

FEW: dict[str, Any] = {"steps": 2, "queries": 10}
Written = tuple[Record, Path]


@pytest.fixture(scope="module")
def original(evaluated: Evaluated, tmp_path_factory: pytest.TempPathFactory) -> Written:
    out = tmp_path_factory.mktemp("record") / "out"
    return evaluated(out=out, checks="quick", **FEW), out


@pytest.fixture
def written(original: Written, tmp_path: Path) -> Written:
    """A record and a copy of the folder that it was written to."""
    shutil.copytree(original[1], tmp_path / "out")
    return original[0], tmp_path / "out"


def content_of(out: Path) -> dict[str, Any]:
    """The record's entries, if the file is strict JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (out / "record.json").read_text(encoding="utf-8")
    assert text.endswith("}\n")
    found: dict[str, Any] = json.loads(text, parse_constant=refuse)
    return found


# What it holds


def test_it_is_found_by_its_file_its_folder_or_its_run(written: Written, tmp_path: Path) -> None:
    record, out = written
    assert sorted(f.name for f in out.iterdir()) == ["plan.json", "queries.safetensors", "record.json"]
    run = tmp_path / "run"
    shutil.copytree(out, run / "evaluation")
    inside = run / "evaluation" / "record.json"
    for path in (inside, inside.parent, run):
        assert FORMAT.find(path) == FORMAT.find(str(path)) == inside
        assert load_record(path) == record
        assert load_arrays(path).keys() == load_file(out / "queries.safetensors").keys()
    other = inside.rename(inside.with_name("mine.json"))  # by its own name
    assert FORMAT.find(other) == other
    for nothing in (run, tmp_path / "none"):
        with pytest.raises(FileNotFoundError, match="there is no record"):
            load_record(nothing)
    other.rename(other.parent / "record.json").parent.rename(run / "evaluation-32")
    with pytest.raises(FileNotFoundError, match=r"give the one that is meant: .*evaluation-32$"):
        load_record(run)


def test_the_file_is_strict_json_of_the_schema(written: Written) -> None:
    content, schema = content_of(written[1]), Record.model_json_schema(by_alias=True)
    assert content["schema"] == "robustmetric/record/1"
    assert {*schema["required"]} <= {*content} == {*schema["properties"]}
    assert schema["additionalProperties"] is False
    places = {
        "Settings": content["settings"], "NetworkEntry": content["network"], "DataEntry": content["data"],
        "QueryCounts": content["queries"], "Ers": content["ers"], "Check": content["checks"][0],
        "Arrays": content["arrays"], "Score": content["scores"]["CA+"],
    }  # fmt: skip
    for part, entries in places.items():
        assert {*entries} == {*schema["$defs"][part]["properties"]}, part
    # A cluster score has no interval over queries.
    assert content["retrieval"]["NMI"]["low"] is None


def test_scores_are_the_means_of_the_arrays(written: Written) -> None:
    record, out = written
    arrays = load_arrays(out)
    assert len(arrays["number"]) == 10 == record.queries.count == len(arrays["number"].unique())
    for name, score in record.scores.items():
        attack = "ES" if name.startswith("ES:") else name
        after, before = (arrays[f"{attack}/{when}/{name}"] for when in ("after", "before"))
        assert len(after) == 10
        assert record[name] == pytest.approx(float(after.mean()))
        assert score.before == pytest.approx(float(before.mean()))
        assert score.low <= record[name] <= score.high  # type: ignore[operator]
    for name in ("R@1", "R@2", "mAP", "mAP@R"):
        assert record[name] == pytest.approx(float(arrays[f"retrieval/{name}"].mean()))
        assert len(arrays[f"retrieval/{name}"]) == 40
    assert record.ers is not None
    assert record["ERS"] == pytest.approx(sum(v or 0 for v in record.ers.terms.values()) / 10)
    assert [*record.ers.terms] == [n for n in record.columns() if n in record.scores]


@pytest.mark.parametrize(("size", "group"), [(6, 112), (28, 128)])
def test_the_reference_s_scores_are_means_of_batch_means(
    size: int, group: int, evaluated: Evaluated, tmp_path: Path
) -> None:
    """Of 112 queries, or 128 if images are 28 pixels wide, whatever the batch was here."""
    count = 2 * group + 6
    images = torch.rand(count, 1, size, size, generator=torch.Generator().manual_seed(0))
    how: dict[str, Any] = {"attacks": ["LTM", "TMA"], "steps": 1, "batch": 100, "protocol": "reference"}
    model = nn.Sequential(nn.Flatten(), nn.Linear(size * size, 4))
    record = evaluated(model, images=images, labels=torch.arange(count) % 5, out=tmp_path, **how)
    arrays = load_arrays(tmp_path)
    for name in ("LTM", "TMA"):
        parts = arrays[f"{name}/after/{name}"].split(group)
        assert [len(part) for part in parts] == [group, group, 6]
        assert record[name] == pytest.approx(float(torch.stack([part.mean() for part in parts]).mean()))
        assert record[name] != pytest.approx(float(torch.cat(parts).mean()), abs=1e-6)


def test_a_query_without_an_answer_has_no_value_and_is_counted(
    evaluated: Evaluated, labels: Tensor, tmp_path: Path
) -> None:
    alone = labels.clone()
    alone[[3, 20]] = torch.tensor([50, 51])
    record = evaluated(labels=alone, out=tmp_path / "out", steps=2)
    assert record.queries.left_out == 2
    arrays = load_arrays(tmp_path / "out")
    for name in ("ES/after/ES:R", "LTM/after/LTM", "GTM/after/GTM"):
        assert arrays[name].isnan().nonzero()[:, 0].tolist() == [3, 20]
        assert record[name.split("/")[-1]] == pytest.approx(float(arrays[name].nanmean()))
    assert not arrays["CA+/after/CA+"].isnan().any()
    assert arrays["retrieval/query"].tolist() == [i for i in range(40) if i not in (3, 20)]


def test_a_score_that_no_query_has_is_null(evaluated: Evaluated, tmp_path: Path) -> None:
    """All that is drawn has no mate: LTM and the recall of ES have no value, and neither has the ERS."""
    labels = torch.arange(40)
    labels[39] = 38

    def drawn(seed: int) -> set[int]:
        return {*torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:3].tolist()}

    seed = next(s for s in range(50) if not drawn(s) & {38, 39})
    record = evaluated(labels=labels, queries=3, seed=seed, out=tmp_path, steps=1)
    content = content_of(tmp_path)
    assert [content["scores"]["LTM"][key] for key in ("value", "low", "high", "before")] == [None] * 4
    assert content["scores"]["ES:D"]["value"] > 0
    assert content["ers"]["value"] is None
    assert all(math.isnan(load_record(tmp_path)[name]) for name in ("LTM", "ERS"))
    assert "LTM -" in str(record) == str(load_record(tmp_path))


def test_a_record_is_the_same_byte_for_byte_in_any_folder_or_none(
    written: Written, evaluated: Evaluated, tmp_path: Path
) -> None:
    record, out = written
    evaluated(out=tmp_path / "two", checks="quick", **FEW)
    for file in ("record.json", "queries.safetensors", "plan.json"):
        assert (out / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
    assert evaluated(checks="quick", **FEW) == record
    content = (out / "queries.safetensors").read_bytes()
    assert record.arrays.sha256 == hashlib.sha256(content).hexdigest()


def test_it_names_what_it_depends_on(tiny: Tiny, network: nn.Module) -> None:
    how: dict[str, Any] = {"seed": 7, "search": "pgd(restarts=2)", "attacks": ["ES", "CA+(w=2)"], **FEW}
    evaluation = tiny(network, name="mine", weights="last weights", skipped=["a.png"], **how)
    record = evaluation.run()
    assert record.network.model_dump() == {
        "name": "mine",
        "parameters": 36 * 32 + 32 + 32 * 16 + 16,
        "sha256": digest_of(network),
        "surrogate": None,
        "weights": "last weights",
    }
    data = record.data
    assert (data.name, data.images, data.classes, data.shape) == ("tiny", 40, 5, [1, 6, 6])
    assert (data.sha256, data.skipped) == (evaluation.subject.data.fingerprint.sha256, ["a.png"])
    assert record.settings == evaluation.plan.settings
    assert (record.settings.seed, record.settings.search) == (7, "pgd(restarts=2)")
    assert record.versions["torch"] == version("torch")
    assert record.versions["python"] == platform.python_version()
    assert {"robustmetric", "numpy", "scikit-learn"} <= {*record.versions}
    assert tiny(network, **FEW).run().network.name == "Sequential"
    assert record.ers is None
    for name in ("ERS", "LTM"):
        with pytest.raises(KeyError, match=rf"'{name}' was not measured; measured: R@1, .*ES:R, CA\+\(w=2\)"):
            record[name]


# Reading


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda c: c.update(schema="robustmetric/record/2"), "not a record of this version: .*'.*record/2'"),
        (lambda c: c.pop("scores"), "not a whole record: scores: Field required"),
        (lambda c: c["scores"]["CA+"].update(value="high"), r"scores.CA\+.value: "),
        (lambda c: c.update(extra=1), "extra: "),
    ],
)
def test_a_file_that_is_no_record_of_ours_is_refused(
    change: Callable[[dict[str, Any]], object], told: str, written: Written
) -> None:
    file, content = written[1] / "record.json", content_of(written[1])
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(UserError, match=r"record.json is .*was changed by hand"):
        load_record(written[1])
    del content["sha256"]
    save_entries(file, content)
    with pytest.raises(UserError, match=rf"record.json is .*{told}"):
        load_record(written[1])


def test_arrays_that_were_changed_or_are_missing_are_refused(written: Written) -> None:
    file = written[1] / "queries.safetensors"
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\0", b""):
        file.write_bytes(broken)
        with pytest.raises(UserError, match=r"queries\.safetensors is not what its record was written with"):
            load_arrays(written[1])
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no queries\.safetensors beside the record"):
        load_arrays(written[1])


@pytest.mark.parametrize("place", ["../queries.safetensors", "/queries.safetensors"])
def test_arrays_of_another_folder_are_not_read(place: str, written: Written) -> None:
    record, out = written
    elsewhere = record.model_copy(
        update={"arrays": record.arrays.model_copy(update={"file": place})}
    ).sealed()
    (out / "record.json").write_text(elsewhere.model_dump_json(by_alias=True), encoding="utf-8")
    with pytest.raises(UserError, match="must be beside it"):
        load_arrays(out)
