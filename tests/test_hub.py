"""Published folders: what goes out and what does not, the model card, and what is loaded or downloaded."""

from __future__ import annotations

import errno
import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import robustmetric as rm
from robustmetric.evaluation import Record
from robustmetric.files import DamagedError, digest_of_entries
from robustmetric.locks import InUseError
from robustmetric.training import RunFolder
from tests.helpers.command import refused, works
from tests.helpers.hostile import HOSTILE, hostile_record
from tests.helpers.records import a_record, altered, written
from tests.helpers.runs import make_run

HOME = "/home/somebody/secret"
ABOUT = {
    "skipped": [f"{HOME}/birds/wren/3.jpg"],
    "choice": {"images": "validation images", "count": 40},
    "starts": [{"command": ["train", "--root", f"{HOME}/birds"], "python": "3.11.7"}],
    "origin": {
        "files": [f"{HOME}/nets.py"],
        "images": {"training images": {"count": 1234, "classes": 40, "labels": "a" * 64, "pixels": "b" * 64}},
    },
    "images": {"height": 8, "width": 8, "channels": 1},
}


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run of a defense, with both kinds of weights, files full of paths, and a pickle."""
    folder = make_run(
        tmp_path / "run", "last", "best", about=json.dumps({**ABOUT, "sha256": digest_of_entries(ABOUT)}),
        data="folder", root=f"{HOME}/birds", weights=f"{HOME}/first.safetensors", eps=12 / 255, seed=7,
    )  # fmt: skip
    (folder / "last.ckpt").write_bytes(b"a pickle")
    (folder / "metrics.csv").write_text("epoch,step,loss\n0,10,0.2\n")
    return folder


def record_of(run: Path, **how: Any) -> Record:
    """A record of a run's network, with figures of its own, a warning and a worst case."""
    goal = {
        "value": 7.4, "low": 4.3, "high": 10.6, "before": 98.4, "alone": 7.4, "better": "higher", "unit": "%",
        "queries": 9, "forward": 9, "backward": 9, "undropped": 9, "attacks": [],
    }  # fmt: skip
    check = {"name": "noise", "status": "warn", "figure": 1.0, "limit": "none", "says": "noise | does better"}
    return altered(
        a_record({"R@1": 61.23456789}, **how),
        network={"sha256": rm.load_run(run).digest},
        data={"skipped": [f"{HOME}/9.jpg"]},
        suite={"goals": {"misrank": goal}},
        checks=[check],
    )


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_what_goes_out_and_comes_back(run: Path, tmp_path: Path) -> None:
    record = record_of(run)
    written(record, run / "evaluation")
    done = rm.publish(run, tmp_path / "out")
    assert files(done.folder) == [
        "README.md", "best.safetensors", "evaluation/record.json", "metrics.csv", "recipe.yaml", "run.json",
    ]  # fmt: skip
    before = rm.load_run(run)
    shutil.rmtree(run)
    loaded = rm.from_pretrained(shutil.move(done.folder, tmp_path / "räume und mehr"))
    assert (loaded.digest, loaded.name, loaded.chosen) == (before.digest, before.name, before.chosen)
    images = torch.rand(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.embed(images), before.embed(images))
    assert (done.digest, done.records, done.left_out) == (before.digest, ("evaluation",), {})
    kept = rm.load_record(tmp_path / "räume und mehr" / "evaluation")
    assert kept.scores == record.scores
    assert sorted(path.name for path in tmp_path.iterdir()) == ["räume und mehr"]


def test_no_path_goes_out(run: Path, tmp_path: Path) -> None:
    written(record_of(run), run / "evaluation")
    best = run / "best.safetensors"
    save_file(load_file(best), best, metadata={"made in": HOME})
    done = rm.publish(run, tmp_path / "given" / "away")
    for file in done.folder.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        for trace in ("somebody", "secret", "/home", str(tmp_path)):
            assert trace.encode() not in content, file
    recipe = rm.load_run(done.folder).recipe
    assert (recipe.root, recipe.weights) == (None, Path("first.safetensors"))
    private = {"root", "weights"}
    assert recipe.model_dump(exclude=private) == rm.load_run(run).recipe.model_dump(exclude=private)
    assert rm.load_record(done.folder).data.skipped == ["9.jpg"]


def test_half_precision_makes_other_weights(run: Path, tmp_path: Path) -> None:
    written(record_of(run), run / "evaluation")
    done = rm.publish(run, tmp_path / "out", half=True, weights="last")
    whole, loaded = load_file(run / "last.safetensors"), rm.from_pretrained(done.folder)
    for name, value in loaded.network.state_dict().items():
        assert torch.equal(value, whole[name].half().float())
    assert done.digest == loaded.digest != rm.load_run(run, "last").digest
    assert done.records == ()
    assert "of other weights" in done.left_out["evaluation"]
    tensors = {name: value + 7e4 for name, value in whole.items()}
    rm.save_weights(tensors, run / "last.safetensors")
    with pytest.raises(rm.UserError, match="beyond 65,504"):
        rm.publish(run, tmp_path / "more", half=True, weights="last")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


NETS = """
from pathlib import Path
from torch import nn

def small(channels=1):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 8))

Path({!r}).touch()
"""


def own_run(folder: Path, model: str = "code/nets.py:small") -> Path:
    about = {"images": ABOUT["images"]}
    text = json.dumps({**about, "sha256": digest_of_entries(about)})
    run = make_run(folder, model=model, dim=None, about=text)
    (run / "code").mkdir()
    (run / "code" / "nets.py").write_text(NETS.format(str(folder.parent / "ran")))
    rm.save_weights(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8)), run / "last.safetensors")
    return run


def test_code_goes_out_with_the_run_and_is_run_only_if_it_is_trusted(tmp_path: Path) -> None:
    run, ran = own_run(tmp_path / "run"), tmp_path / "ran"
    for act in (lambda: rm.publish(run, tmp_path / "out"), lambda: rm.from_pretrained(run)):
        with pytest.raises(rm.UserError, match="trust"):
            act()
        assert not ran.exists()
    done = rm.publish(run, tmp_path / "out", trust=True)
    assert "code/nets.py" in files(done.folder)
    assert ran.exists()
    shutil.rmtree(run)
    assert rm.from_pretrained(done.folder, trust=True).digest == done.digest
    other = own_run(tmp_path / "other", "code/nets.py:small(channels='/home/somebody/x')")
    with pytest.raises(rm.UserError, match="has a path in its options"):
        rm.publish(other, tmp_path / "more", trust=True)


def test_records_of_other_places_and_of_other_weights(run: Path, tmp_path: Path) -> None:
    record = record_of(run)
    written(record, run / "evaluation")
    written(record_of(run, protocol="strict"), tmp_path / "scores")
    damaged = written(record, run / "evaluation-damaged") / "record.json"
    damaged.write_text(damaged.read_text().replace("61.2", "99.2"))
    done = rm.publish(run, tmp_path / "out", records=[tmp_path / "scores", run / "evaluation"])
    assert done.records == ("evaluation", "evaluation-scores")
    assert "damaged" in done.left_out["evaluation-damaged"]
    with pytest.raises(rm.UserError, match=r"scores does not count: it is of other weights"):
        rm.publish(run, tmp_path / "last", weights="last", records=[tmp_path / "scores"])
    assert not (tmp_path / "last").exists()


def test_a_published_folder_is_exported_onto_itself(run: Path, tmp_path: Path) -> None:
    out = rm.publish(run, tmp_path / "out", licence="MIT").folder
    assert "have not been evaluated" in (out / "README.md").read_text()
    record = record_of(out)
    written(record, out / "evaluation")
    (out / "evaluation" / "queries.safetensors").write_bytes(b"the values of each query")
    (out / "mine.txt").touch()
    with pytest.raises(rm.UserError, match="exists"):
        rm.publish(out, out)
    done = rm.publish(out, out, force=True)
    assert {"mine.txt", "evaluation/queries.safetensors", "evaluation/record.json"} <= {*files(out)}
    card = (out / "README.md").read_text()
    assert f"| {record.column('R@1').heading} | {record.show('R@1')} |" in card
    assert "license: mit" in card
    assert done.digest == rm.from_pretrained(out).digest
    other = rm.publish(run, out, weights="last", force=True)
    assert [name for name in files(out) if name.endswith("t.safetensors")] == ["last.safetensors"]
    assert (other.records, "evaluation" in other.left_out) == ((), True)


def test_other_folders_are_left_alone(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "a.txt").touch()
    for place in (tmp_path / "mine", run, run / "metrics.csv", tmp_path):
        before = files(tmp_path)
        with pytest.raises(rm.UserError, match="holds something else"):
            rm.publish(run, place, force=True)
        assert files(tmp_path) == before
    with pytest.raises(rm.UserError, match="last or best"):
        rm.publish(run, tmp_path / "out", weights="first")  # type: ignore[arg-type]


@pytest.mark.parametrize("broken", ["save_weights", "_card"])
def test_what_fails_leaves_the_folder_as_it_was(
    broken: str, run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = rm.publish(run, tmp_path / "out", weights="last").folder
    before = {name: (out / name).read_bytes() for name in files(out)}

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(f"robustmetric.hub.{broken}", full)
    for place in (out, tmp_path / "new"):
        with pytest.raises(OSError, match="No space left"):
            rm.publish(run, place, force=True)
    assert {name: (out / name).read_bytes() for name in files(out)} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_one_export_at_a_time(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def second(*_: object, **__: object) -> str:
        with pytest.raises(InUseError):
            rm.publish(run, tmp_path / "out")
        return "card"

    monkeypatch.setattr("robustmetric.hub._card", second)
    rm.publish(run, tmp_path / "out")


def test_a_kill_between_the_two_renames_loses_nothing(run: Path, tmp_path: Path) -> None:
    out = rm.publish(run, tmp_path / "out").folder
    (tmp_path / ".out.export" / "new").mkdir(parents=True)
    out.rename(tmp_path / ".out.export" / "old")
    with pytest.raises(rm.UserError, match="exists"):
        rm.publish(run, out)
    assert rm.from_pretrained(out).digest == rm.load_run(run).digest
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


# The card


def card_of(run: Path, **how: Any) -> str:
    done = rm.publish(run, run.parent / "card", **how)
    return (done.folder / "README.md").read_text(encoding="utf-8")


def test_the_card_has_the_figures_of_the_record_twice(run: Path) -> None:
    """In its tables, and in what the Hub reads."""
    records = {
        "evaluation-reference": record_of(run, protocol="reference"),
        "evaluation-strict": record_of(run, protocol="strict"),
    }
    for name, record in records.items():
        written(record, run / name)
    card = card_of(run, licence="Apache-2.0")
    data: Any = ModelCard(card).data
    assert (data.license, data.library_name, data.datasets) == ("apache-2.0", "robustmetric", None)
    found = {(one.dataset_config, one.metric_type): one for one in data.eval_results}
    for folder, record in records.items():
        table = card.split(f"### {folder}\n")[1].split("\n##")[0]
        assert "| worst misrank ↑ | 7.4 | 4.3 to 10.6 | 98.4 |" in table
        assert "- Check noise, warn: noise \\| does better" in table
        for name in record.columns():
            assert f"\n| {record.column(name).heading} | {record.show(name)} |" in table
            one, column = found[folder, name], record.column(name)
            assert one.metric_value == round(record[name], column.unit.digits + 1)
            assert one.metric_name == f"{name} ({record.settings.protocol})"
            assert one.dataset_args == {"images": 9, "sha256": record.data.sha256}
        assert found[folder, "worst misrank"].metric_args == {
            "low": 4.3, "high": 10.6, "interval": "95 %",
        }  # fmt: skip
    assert "`embed` prepares image files: decode" in card
    assert "seed: 7" in card


def test_scores_that_are_not_valid_are_not_claimed(run: Path) -> None:
    failed = {"name": "gradient", "status": "fail", "figure": 1.0, "limit": "none", "says": "it is zero"}
    record = altered(record_of(run), checks=[failed])
    written(record, run / "evaluation")
    card = card_of(run)
    assert f"| ERS ↑ | {record.show('ERS')} (not valid) |" in card
    data: Any = ModelCard(card).data
    results = data.eval_results
    assert "ERS" not in {one.metric_type for one in results}
    assert all(one.metric_config.endswith("; failed checks gradient") for one in results)


def test_text_of_records_stays_text(run: Path) -> None:
    written(altered(hostile_record(), network={"sha256": rm.load_run(run).digest}), run / "evaluation")
    card = card_of(run)
    assert not re.search(r"[\x00-\x08\x0b-\x1f\u202e\u2066]", card)
    front, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert yaml.safe_load(front)["model-index"]
    outside = re.sub(r"^```.*?^```$", "", body, flags=re.MULTILINE | re.DOTALL)
    assert HOSTILE[:4] in outside
    assert not re.search(r"(?<!\\)<(?!\\)[a-z!/]", outside)


# Loading


def test_only_an_id_of_the_hub_is_downloaded(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = rm.publish(run, tmp_path / "cache").folder
    asked: list[tuple[str, Any]] = []

    def fake(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, revision))
        assert not any(pattern.endswith(("ckpt", "pt", "bin", "pkl")) for pattern in allow_patterns)
        if name == "owner/gone":
            raise OSError("404: there is no such repository\nmore")
        return str(cache)

    monkeypatch.setattr("huggingface_hub.snapshot_download", fake)
    monkeypatch.chdir(tmp_path)
    digest = rm.load_run(run).digest
    assert rm.from_pretrained("owner/name", "v1").digest == digest
    assert asked == [("owner/name", "v1")]
    Path("owner").mkdir()
    shutil.copytree(cache, "owner/name")
    assert rm.from_pretrained("owner/name").digest == digest
    with pytest.raises(rm.UserError, match="only the Hub has revisions"):
        rm.from_pretrained("owner/name", "v1")
    for name in ("nowhere", "a/b/c", "/nowhere/at all", "../owner"):
        with pytest.raises(FileNotFoundError, match="there is no folder"):
            rm.from_pretrained(name)
    assert len(asked) == 1
    with pytest.raises(rm.UserError, match=r"OSError: 404: there is no such repository\)"):
        rm.from_pretrained("owner/gone")


def test_damaged_and_exchanged_weights_are_noticed(run: Path, tmp_path: Path) -> None:
    out = rm.publish(run, tmp_path / "out").folder
    weights = out / "best.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    with pytest.raises(DamagedError):
        rm.from_pretrained(out)
    shutil.copy(run / "last.safetensors", weights)  # whole, and of another network
    with pytest.raises(DamagedError, match="not those that were published"):
        rm.from_pretrained(out)


@pytest.mark.slow
@pytest.mark.parametrize("folder", sorted(Path("results/zoo").glob("*/*")), ids=lambda folder: folder.name)
def test_networks_of_the_evidence_can_be_published_again(folder: Path, tmp_path: Path) -> None:
    done = rm.publish(folder, tmp_path / "out")
    assert done.digest == rm.from_pretrained(folder).digest
    assert len(done.records) == len([*folder.glob("evaluation*")])
    assert RunFolder(done.folder).read()["published"]["licence"] == "apache-2.0"


def test_the_command(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "[bold]out\x1b[2J"
    said = works("export", run, "--to", "hub", "--out", out, "--license", "mit")
    assert "\x1b" not in said
    assert "records: none" in said
    assert rm.from_pretrained(out).digest == rm.load_run(run).digest
    assert refused("export", run, "--to", "hub", "-o", out).endswith("(--force)\n")
    assert refused("export", run, "-o", tmp_path / "net.pt", "--half").endswith("leave it out (--half)\n")
