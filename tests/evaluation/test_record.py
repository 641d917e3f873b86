"""The record: what it holds, that it repeats byte for byte, and what is refused when it is read."""

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

from robustmetric.attacks import EmbeddingShift
from robustmetric.evaluation import COLUMNS, ERS_ATTACKS, Evaluation, Record, load_arrays, load_record
from robustmetric.evaluation.identity import digest_of
from robustmetric.evaluation.record import FORMAT, SCHEMA, Score
from tests.helpers.faults import fault

Tiny = Callable[..., Evaluation]
Evaluated = Callable[..., Record]

FEW = {"steps": 2, "queries": 10}


@pytest.fixture(scope="module")
def original(evaluated: Evaluated, tmp_path_factory: pytest.TempPathFactory) -> tuple[Record, Path]:
    out = tmp_path_factory.mktemp("record") / "out"
    return evaluated(out=out, checks="quick", **FEW), out


@pytest.fixture
def written(original: tuple[Record, Path], tmp_path: Path) -> tuple[Record, Path]:
    """A record and a copy of the folder that it was written to."""
    shutil.copytree(original[1], tmp_path / "out")
    return original[0], tmp_path / "out"


def test_what_is_written_is_what_was_returned(written: tuple[Record, Path]) -> None:
    record, out = written
    assert sorted(f.name for f in out.iterdir()) == ["plan.json", "queries.safetensors", "record.json"]
    for path in (out, str(out), out / "record.json"):
        found = load_record(path)
        assert found.model_dump_json(by_alias=True) == record.model_dump_json(by_alias=True)
        assert str(found) == str(record)


def test_a_record_that_is_read_equals_the_one_that_was_written(written: tuple[Record, Path]) -> None:
    record, out = written
    assert load_record(out) == record


def test_a_record_is_found_in_the_folder_of_a_training(written: tuple[Record, Path], tmp_path: Path) -> None:
    record, out = written
    out.rename(tmp_path / "evaluation")
    assert str(load_record(tmp_path)) == str(record)
    assert "number" in load_arrays(tmp_path)


def test_the_file_is_strict_json_of_the_schema(written: tuple[Record, Path]) -> None:
    record, out = written

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (out / "record.json").read_text(encoding="utf-8")
    content = json.loads(text, parse_constant=refuse)
    assert text.endswith("}\n")
    assert content["schema"] == SCHEMA == "robustmetric/record/1"
    schema = Record.model_json_schema(by_alias=True)
    assert set(content) == set(schema["properties"])
    assert set(schema["required"]) <= set(content)
    assert schema["additionalProperties"] is False
    for part in ("Plan", "Network", "Data", "Queries", "Ers", "Check", "Arrays"):
        named = schema["$defs"][part]
        key = "settings" if part == "Plan" else part.lower()
        holder = content.get(key) or content[f"{key}s"]
        for each in holder if isinstance(holder, list) else [holder]:
            assert set(each) == set(named["properties"]), part
    # A cluster score has no interval over queries.
    assert content["retrieval"]["NMI"]["low"] is None
    assert load_record(out).retrieval["NMI"].low is None
    assert Record.model_validate_json(text).model_dump_json() == record.model_dump_json()


def test_scores_are_the_means_of_the_arrays(written: tuple[Record, Path]) -> None:
    record, out = written
    arrays = load_arrays(out)
    assert arrays["number"].tolist() == arrays["number"].unique().tolist()
    assert len(arrays["number"]) == 10 == record.queries.count
    for name in record.scores:
        attack = "ES" if name.startswith("ES:") else name
        after, before = (arrays[f"{attack}/{when}/{name}"] for when in ("after", "before"))
        assert len(after) == 10
        assert record[name] == pytest.approx(float(after.mean()))
        assert record.scores[name].before == pytest.approx(float(before.mean()))
        low, high = record.scores[name].low, record.scores[name].high
        assert low is not None
        assert high is not None
        assert low <= record[name] <= high
    for name in ("R@1", "R@2", "mAP", "mAP@R"):
        assert record[name] == pytest.approx(float(arrays[f"retrieval/{name}"].mean()))
        assert len(arrays[f"retrieval/{name}"]) == 40
    assert record.ers is not None
    assert record["ERS"] == pytest.approx(sum(v or 0 for v in record.ers.terms.values()) / 10)
    assert [*record.ers.terms] == [n for n in record.columns() if n in record.scores]


def test_the_reference_s_scores_are_means_of_batch_means(evaluated: Evaluated, tmp_path: Path) -> None:
    """Of 112 queries, or 128 if images are 28 pixels wide, whatever the batch was here."""
    generator = torch.Generator().manual_seed(0)
    for size, group in ((6, 112), (28, 128)):
        count = 2 * group + 6
        images = torch.rand(count, 1, size, size, generator=generator)
        model = nn.Sequential(nn.Flatten(), nn.Linear(size * size, 4))
        out = tmp_path / str(size)
        record = evaluated(
            model,
            images=images,
            labels=torch.arange(count) % 5,
            attacks=["LTM", "TMA"],
            steps=1,
            batch=100,
            protocol="reference",
            out=out,
        )
        arrays = load_arrays(out)
        for name in ("LTM", "TMA"):
            parts = arrays[f"{name}/after/{name}"].split(group)
            assert [len(p) for p in parts] == [group, group, 6]
            wanted = torch.stack([p.mean() for p in parts]).mean()
            assert record[name] == pytest.approx(float(wanted))
            assert record[name] != pytest.approx(float(arrays[f"{name}/after/{name}"].mean()), abs=1e-6)


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
    seed = next(s for s in range(50) if not drawn(s, 3) & {38, 39})

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    record = evaluated(
        labels=labels, queries=3, seed=seed, attacks=["ES", "LTM"], out=tmp_path / "a", steps=1
    )
    content = json.loads((tmp_path / "a" / "record.json").read_text(), parse_constant=refuse)
    ltm = content["scores"]["LTM"]
    assert [ltm[key] for key in ("value", "low", "high", "before")] == [None] * 4
    assert content["scores"]["ES:D"]["value"] > 0
    assert math.isnan(record["LTM"])
    assert math.isnan(load_record(tmp_path / "a")["LTM"])
    assert "LTM -" in str(record)
    whole = evaluated(labels=labels, queries=3, seed=seed, out=tmp_path / "b", steps=1)
    json.loads((tmp_path / "b" / "record.json").read_text(), parse_constant=refuse)
    assert whole.ers is not None
    assert whole.ers.value is None
    assert math.isnan(whole["ERS"])
    assert str(load_record(tmp_path / "b")) == str(whole)


def drawn(seed: int, count: int) -> set[int]:
    return set(torch.randperm(40, generator=torch.Generator().manual_seed(seed))[:count].tolist())


def test_two_runs_are_equal_byte_for_byte(evaluated: Evaluated, tmp_path: Path) -> None:
    for name in ("one", "two"):
        evaluated(out=tmp_path / name, checks="quick", **FEW)
    for file in ("record.json", "queries.safetensors", "plan.json"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()


def test_with_and_without_a_folder_the_record_is_the_same(evaluated: Evaluated, tmp_path: Path) -> None:
    inside, outside = evaluated(out=tmp_path / "out", **FEW), evaluated(**FEW)
    assert inside.model_dump_json() == outside.model_dump_json()
    content = (tmp_path / "out" / "queries.safetensors").read_bytes()
    assert inside.arrays.sha256 == hashlib.sha256(content).hexdigest()


def test_it_names_what_it_depends_on(tiny: Tiny, network: nn.Module, images: Tensor) -> None:
    record = tiny(
        network,
        name="mine",
        seed=7,
        checks="quick",
        search="pgd(restarts=2)",
        attacks=["ES", "CA+(w=2)"],
        **FEW,
    ).run()
    assert record.network.model_dump() == {
        "name": "mine",
        "parameters": 36 * 32 + 32 + 32 * 16 + 16,
        "sha256": digest_of(network),
        "surrogate": None,
        "weights": None,
    }
    assert record.data.name == "tiny"
    assert (record.data.images, record.data.classes, record.data.shape) == (40, 5, [1, 6, 6])
    assert record.settings.model_dump(mode="json") == {
        "protocol": "strict",
        "eps": 16 / 255,
        "norm": "linf",
        "alpha": 4 / 255,
        "steps": 2,
        "search": "pgd(restarts=2)",
        "attacks": ["ES", "CA+(w=2)"],
        "suite": "none",
        "queries": 10,
        "seed": 7,
        "batch": 16,
        "checks": "quick",
    }
    assert record.versions["torch"] == version("torch")
    assert record.versions["python"] == platform.python_version()
    assert {"robustmetric", "numpy", "scikit-learn"} <= set(record.versions)
    assert tiny(network, **FEW).run().network.name == "Sequential"
    assert record.ers is None
    with pytest.raises(KeyError, match=r"'ERS' was not measured; measured: R@1, .*ES:R, CA\+\(w=2\)"):
        record["ERS"]
    with pytest.raises(KeyError, match="'LTM' was not measured"):
        record["LTM"]


def test_digests_change_with_one_weight_pixel_or_label_and_only_then(
    evaluated: Evaluated, network: nn.Sequential, images: Tensor, labels: Tensor
) -> None:
    few: dict[str, Any] = {"attacks": ["TMA"], "queries": 2, "steps": 1}
    base = evaluated(network, **few)

    def digests(model: nn.Module = network, **changes: Any) -> tuple[bool, bool]:
        record = evaluated(model, **{**few, **changes})
        return record.network.sha256 == base.network.sha256, record.data.sha256 == base.data.sha256

    same = nn.Sequential(*network)
    assert digests(same.train()) == (True, True)
    assert digests(images=images.clone(), labels=labels.int(), steps=3, seed=4, eps=0.5) == (True, True)
    pixel = images.clone()
    pixel[17, 0, 3, 2] = float(pixel[17, 0, 3, 2]) + (1 / 255 if pixel[17, 0, 3, 2] < 0.5 else -1 / 255)
    assert digests(images=pixel) == (True, False)
    label = labels.clone()
    label[8] = 4
    assert digests(labels=label) == (True, False)
    assert digests(gallery=(images, labels)) == (True, False)
    with torch.no_grad():
        [*network.parameters()][-1][5] += 1e-4
    assert digests() == (False, True)


def test_a_digest_is_of_names_types_shapes_and_values() -> None:
    one, two = nn.Linear(2, 3), nn.Linear(2, 3)
    two.load_state_dict(one.state_dict())
    assert digest_of(one) == digest_of(two)
    assert digest_of(one) != digest_of(nn.Sequential(one))
    assert digest_of(one) != digest_of(two.double())
    turned = nn.Linear(3, 2)
    turned.load_state_dict({"weight": one.weight.detach().reshape(2, 3), "bias": torch.zeros(2)})
    assert digest_of(turned) != digest_of(one)
    norm = nn.BatchNorm1d(3)
    before = digest_of(norm)
    norm(torch.randn(4, 3, generator=torch.Generator().manual_seed(0)))
    assert digest_of(norm) != before, "buffers count as well"


def test_images_of_another_shape_are_other_data(evaluated: Evaluated, images: Tensor) -> None:
    few: dict[str, Any] = {"attacks": ["TMA"], "queries": 2, "steps": 1}
    wide = images.reshape(40, 1, 4, 9)
    assert evaluated(**few).data.sha256 != evaluated(images=wide, **few).data.sha256


# Reading


def changed(out: Path, change: Callable[[dict[str, Any]], object]) -> Path:
    file = out / "record.json"
    content = json.loads(file.read_text(encoding="utf-8"))
    change(content)
    file.write_text(json.dumps(content), encoding="utf-8")
    return file


def test_another_schema_is_refused(written: tuple[Record, Path]) -> None:
    out = written[1]
    file = changed(out, lambda c: c.update(schema="robustmetric/record/2"))
    with pytest.raises(ValueError, match="is not a record of this version: its schema is ") as error:
        load_record(out)
    assert str(file) in str(error.value)
    assert "'robustmetric/record/2', not 'robustmetric/record/1'" in str(error.value)
    changed(out, lambda c: c.pop("schema"))
    with pytest.raises(ValueError, match="its schema is None, not"):
        load_record(out)


@pytest.mark.parametrize("content", [b"", b"{", b"\xff\xfe\x00", b"not a record", b'{"schema": '])
def test_what_is_not_json_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "record.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"record\.json is not a record: it is not JSON \("):
        load_record(tmp_path)


@pytest.mark.parametrize("content", ["[1, 2]", "null", '"schema"', "3"])
def test_json_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "record.json").write_text(content)
    with pytest.raises(ValueError, match="is not a record of this version: its schema is None"):
        load_record(tmp_path)


@pytest.mark.parametrize(
    ("change", "place"),
    [
        (lambda c: c.pop("scores"), "scores: Field required"),
        (lambda c: c["settings"].pop("eps"), "settings: .*eps"),
        (lambda c: c["settings"].update(protocol="mine"), "settings.protocol: "),
        (lambda c: c["scores"]["CA+"].update(value="high"), r"scores.CA\+.value: "),
        (lambda c: c["checks"][0].update(status="fine"), "checks.0.status: "),
        (lambda c: c.update(extra=1), "extra: "),
    ],
)
def test_a_field_that_is_missing_or_wrong_is_named(
    written: tuple[Record, Path], change: Callable[[dict[str, Any]], object], place: str
) -> None:
    changed(written[1], change)
    with pytest.raises(ValueError, match=f"record.json is not a whole record: {place}"):
        load_record(written[1])


def test_no_file_is_refused_with_what_to_give(tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"there is no record .*none; give a record\.json, or a folder"
    ):
        load_record(tmp_path / "none")
    with pytest.raises(FileNotFoundError, match="there is no record"):
        load_record(tmp_path)


def test_a_record_is_found_by_its_file_its_folder_or_its_run(
    written: tuple[Record, Path], tmp_path: Path
) -> None:
    record, out = written
    run = tmp_path / "run"
    shutil.copytree(out, run / "evaluation")
    inside = run / "evaluation" / "record.json"
    for path in (inside, inside.parent, run):
        assert FORMAT.find(path) == FORMAT.find(str(path)) == inside
        assert load_record(path) == record
        assert load_arrays(path).keys() == load_arrays(out).keys()
    other = inside.rename(inside.with_name("mine.json"))  # by its own name
    assert FORMAT.find(other) == other
    assert load_arrays(other).keys() == load_arrays(out).keys()
    with pytest.raises(FileNotFoundError, match="there is no record"):
        FORMAT.find(run)


def test_arrays_of_the_folder_above_are_not_taken(written: tuple[Record, Path]) -> None:
    _, out = written
    (out / "deeper").mkdir()
    (out / "record.json").rename(out / "deeper" / "record.json")
    with pytest.raises(FileNotFoundError, match=r"there is no queries\.safetensors beside the record"):
        load_arrays(out / "deeper")


def test_arrays_that_were_changed_or_are_missing_are_refused(written: tuple[Record, Path]) -> None:
    _, out = written
    file = out / "queries.safetensors"
    assert load_arrays(out).keys() == load_arrays(out / "record.json").keys() == load_file(file).keys()
    whole = file.read_bytes()
    for broken in (whole[:-1], whole[:-1] + bytes([whole[-1] ^ 1]), whole + b"\0", b""):
        file.write_bytes(broken)
        with pytest.raises(ValueError, match=r"queries\.safetensors is not what its record was written with"):
            load_arrays(out)
    file.unlink()
    with pytest.raises(FileNotFoundError, match=r"there is no queries\.safetensors beside the record"):
        load_arrays(out)


@fault("records", "a record names arrays outside of its folder", "refused; they are not read")
def test_arrays_of_another_folder_are_not_read(written: tuple[Record, Path], tmp_path: Path) -> None:
    _, out = written
    (out / "queries.safetensors").replace(tmp_path / "queries.safetensors")
    changed(out, lambda content: content.update(sha256=None))  # as records of before, without a digest
    for elsewhere in ("../queries.safetensors", str(tmp_path / "queries.safetensors")):
        changed(out, lambda content, file=elsewhere: content["arrays"].update(file=file))  # type: ignore[misc]
        with pytest.raises(ValueError, match="they stand beside it"):
            load_arrays(out)


def test_numbers_are_shown_with_the_paper_s_digits() -> None:
    assert [COLUMNS[name].show(0.12345) for name in ("CA+", "TMA", "ES:D")] == ["0.1", "0.123", "0.123"]
    score = Score(value=math.nan, low=math.nan, high=math.nan, better=None, unit=None)
    assert set(score.model_dump(mode="json").values()) == {None}


def test_a_record_says_how_its_values_are_read(evaluated: Evaluated) -> None:
    record = evaluated(steps=1, queries=2)
    for name, column in COLUMNS.items():
        found = record.column(name)
        assert (found.better, found.unit) == (column.better, column.unit), name
        assert record.show(name) == column.show(record[name])
    for name in ("R@1", "NMI", "ERS"):
        assert (record.column(name).better, record.show(name)) == ("higher", f"{record[name]:.1f}")
    assert record.show("R@5") == "-"


def test_a_record_of_before_units_were_written_is_read_alike(evaluated: Evaluated) -> None:
    record = evaluated(steps=1, queries=2)
    whole = record.model_dump(mode="json", by_alias=True)
    for score in whole["scores"].values():
        del score["unit"], score["better"]
    old = Record(**whole)
    for name, column in COLUMNS.items():
        assert old.column(name) == column
        assert old.show(name) == record.show(name)


def test_a_record_cannot_be_changed(evaluated: Evaluated) -> None:
    record = evaluated(attacks=["TMA"], steps=1, queries=2)
    with pytest.raises(ValueError, match="frozen"):
        record.scores = {}


@pytest.mark.slow
def test_the_ers_with_an_attack_of_ones_own_is_marked(evaluated: Evaluated) -> None:
    """One that reports under a name of the ten does not pass for it."""

    class Mine(EmbeddingShift):
        pass

    others = [name for name in ERS_ATTACKS if name != "ES"]
    plain, marked = (evaluated(attacks=[*others, es], steps=1, queries=2) for es in ("ES", Mine()))
    assert plain.ers is not None
    assert plain.ers.valid
    assert marked.ers is not None
    assert not marked.ers.valid
    assert "ES:D, ES:R" in marked.ers.why
    assert marked.ers.value == plain.ers.value


def test_records_in_folders_of_another_name_are_named(written: tuple[Record, Path], tmp_path: Path) -> None:
    run = tmp_path / "run"
    (run / "evaluation-32").mkdir(parents=True)
    shutil.copy(written[1] / "record.json", run / "evaluation-32")
    with pytest.raises(
        FileNotFoundError, match=r"no record in .*run itself; give the one that is meant: .*-32$"
    ):
        load_record(run)
