"""Publishing: what goes out and what does not, and which folders are left alone."""

from __future__ import annotations

import errno
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import robustmetric as rm
from robustmetric.files import digest_of_entries
from robustmetric.training.folder import RunFolder
from tests.helpers.records import altered, written
from tests.helpers.runs import make_run
from tests.zoo.conftest import ABOUT, about, record_of, texts, with_record


def files(folder: Path) -> list[str]:
    return sorted(str(file.relative_to(folder)) for file in folder.rglob("*") if file.is_file())


def test_what_goes_out(run: Path, tmp_path: Path) -> None:
    record = with_record(run)
    done = rm.publish(run, tmp_path / "out")
    assert files(done.folder) == [
        "README.md", "best.safetensors", "evaluation/record.json", "metrics.csv", "recipe.yaml", "run.json",
    ]  # fmt: skip
    assert rm.load_record(done.folder) == record
    loaded = rm.load_run(done.folder)
    assert (loaded.digest, loaded.chosen) == (rm.load_run(run).digest, "chosen on validation images")
    assert (done.digest, done.name, done.records) == (loaded.digest, "c2f2 HM[S,LGA]&ICS", ("evaluation",))
    assert done.left_out == {}
    assert done.beside == ()
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_no_path_goes_out(run: Path, tmp_path: Path) -> None:
    with_record(run, skipped=["/home/somebody/secret/birds/wren/9.jpg"])
    best = run / "best.safetensors"
    save_file(load_file(best), best, metadata={"made in": "/home/somebody/secret"})
    done = rm.publish(run, tmp_path / "given" / "away")
    assert b"somebody" not in (done.folder / best.name).read_bytes()
    for name, text in texts(done.folder).items():
        for trace in ("somebody", "secret", "/home", str(tmp_path)):
            assert trace not in text, name
    found = RunFolder(done.folder).read()
    assert found["skipped"] == ["3.jpg", "4.jpg"]
    assert found["origin"] == {**ABOUT["origin"], "files": ["nets.py"]}  # type: ignore[dict-item]
    assert found["starts"][0]["command"] == [
        "train", "--data", "folder", "--root", "birds", "--out=a", "--set", "weights=first.safetensors",
        "--defense", "HM[S,LGA]&ICS",
    ]  # fmt: skip
    recipe = rm.load_run(done.folder).recipe
    assert (recipe.root, recipe.weights) == (None, Path("first.safetensors"))
    assert recipe.model_dump(exclude={"root", "weights"}) == rm.load_run(run).recipe.model_dump(
        exclude={"root", "weights"}
    )
    assert rm.load_record(done.folder).data.skipped == ["9.jpg"]  # under a digest that fits


def test_half_precision_comes_back_rounded(run: Path, tmp_path: Path) -> None:
    with_record(run)
    done = rm.publish(run, tmp_path / "out", half=True)
    whole, halves = load_file(run / "best.safetensors"), load_file(done.folder / "best.safetensors")
    assert {value.dtype for value in halves.values()} == {torch.float16}
    loaded = rm.load_run(done.folder).network.state_dict()
    for name, value in whole.items():
        assert loaded[name].dtype == torch.float32
        assert torch.equal(loaded[name], value.half().float())
    (why,) = done.left_out.values()
    assert done.records == ()
    assert done.digest == rm.load_run(done.folder).digest != rm.load_run(run).digest
    assert why == (
        f"it is of other weights, whose SHA-256 is {rm.load_run(run).digest[:12]}…, and these have "
        f"{done.digest[:12]}…"
    )
    written(record_of(done.folder), tmp_path / "scores")
    again = rm.publish(done.folder, records=[tmp_path / "scores"])
    assert (again.digest, again.records, again.left_out) == (done.digest, ("evaluation-scores",), {})


def test_what_half_precision_cannot_hold(run: Path, tmp_path: Path) -> None:
    tensors = load_file(run / "best.safetensors")
    first = next(iter(tensors))
    rm.save_weights({**tensors, first: tensors[first] + 7e4}, run / "best.safetensors")
    with pytest.raises(rm.UserError, match=f"{first} has values beyond 65,504, which half precision cannot"):
        rm.publish(run, tmp_path / "out", half=True)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_that_was_moved_works_without_the_images(run: Path, tmp_path: Path) -> None:
    done = rm.publish(run, tmp_path / "out")
    expected = rm.load_run(run)
    shutil.rmtree(run)
    moved = shutil.move(done.folder, tmp_path / "räume und mehr")
    loaded = rm.load_run(moved)
    images = torch.rand(3, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    assert torch.equal(loaded.embed(images), expected.embed(images))
    rm.export(loaded, tmp_path / "net.pt", to="torchscript")
    digits = rm.data.load("digits", split="test")
    pixels = torch.from_numpy(digits.pixels[:40]).permute(0, 3, 1, 2) / 255  # type: ignore[index]
    record = rm.evaluate(
        loaded.network, pixels, digits.labels[:40], steps=1, queries=4, attacks=["ES"], checks="none"
    )
    assert record.network.sha256 == loaded.digest


def test_the_weights_that_are_asked_for(run: Path, tmp_path: Path) -> None:
    last = rm.publish(run, tmp_path / "out", weights="last")
    assert rm.load_run(last.folder).chosen == "last weights"
    assert last.digest == rm.load_run(run, "last").digest
    with pytest.raises(rm.UserError, match="the weights are last or best, not 'first'"):
        rm.publish(run, tmp_path / "other", weights="first")  # type: ignore[arg-type]


NETS = """
from torch import nn
from layers import flat

def small(channels=1):
    return nn.Sequential(flat(), nn.Linear(channels * 64, 8))
"""


def own_run(folder: Path, model: str = "code/nets.py:small") -> Path:
    run = make_run(folder, model=model, dim=None, about=about())
    (run / "code").mkdir()
    (run / "code" / "nets.py").write_text(NETS)
    (run / "code" / "layers.py").write_text("from torch import nn\n\ndef flat():\n    return nn.Flatten()\n")
    torch.manual_seed(0)
    rm.save_weights(torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 8)), run / "last.safetensors")
    return run


def test_a_network_of_a_file(tmp_path: Path) -> None:
    run = own_run(tmp_path / "run")
    with pytest.raises(rm.UserError, match="brings code that did not come from you"):
        rm.publish(run, tmp_path / "out")
    done = rm.publish(run, tmp_path / "out", trust=True)
    assert {"code/nets.py", "code/layers.py"} <= {*files(done.folder)}
    assert "model: code/nets.py:small " in (done.folder / "recipe.yaml").read_text()
    shutil.rmtree(run)
    assert rm.load_run(done.folder, trust=True).digest == done.digest
    assert "The folder `code` holds Python files that are run" in (done.folder / "README.md").read_text()


def test_an_option_that_names_a_path_is_refused(tmp_path: Path) -> None:
    run = own_run(tmp_path / "run", "code/nets.py:small(channels='/home/somebody/x')")
    with pytest.raises(rm.UserError, match="names a path of this machine in its options, which cannot be"):
        rm.publish(run, tmp_path / "out", trust=True)


def test_records_by_their_paths(run: Path, tmp_path: Path) -> None:
    first, second = record_of(run), record_of(run, protocol="reference")
    written(first, tmp_path / "some scores"), written(second, tmp_path / "x" / "some scores")
    written(first, tmp_path / "evaluation-again")
    with_record(run, protocol="reference")
    done = rm.publish(
        run,
        tmp_path / "out",
        records=[tmp_path / "some scores", tmp_path / "x" / "some scores", tmp_path / "evaluation-again"],
    )
    assert done.records == ("evaluation", "evaluation-some-scores")  # each once
    more = altered(first, queries={"count": 3})
    written(more, tmp_path / "y" / "some scores")
    again = rm.publish(done.folder, records=[tmp_path / "y" / "some scores"])
    assert again.records == (*done.records, "evaluation-some-scores-2")
    assert rm.load_record(done.folder / "evaluation-some-scores-2") == more


def test_a_record_of_before_is_whole_again(run: Path, tmp_path: Path) -> None:
    """It has fewer entries than are written today, so that its digest would not fit."""
    content = json.loads(record_of(run).model_dump_json(by_alias=True))
    del content["suite"], content["sha256"]
    (run / "evaluation").mkdir()
    text = json.dumps({**content, "sha256": digest_of_entries(content)})
    (run / "evaluation" / "record.json").write_text(text)
    done = rm.publish(run, tmp_path / "out")
    found, before = rm.load_record(done.folder), rm.load_record(run)
    assert found.model_dump(exclude={"sha256"}) == before.model_dump(exclude={"sha256"})


def test_a_record_of_other_weights_that_was_asked_for(run: Path, tmp_path: Path) -> None:
    written(record_of(run), tmp_path / "scores")
    with pytest.raises(
        rm.UserError, match=r"scores does not count: it is of other weights, .* evaluate what"
    ):
        rm.publish(run, tmp_path / "out", weights="last", records=[tmp_path / "scores"])
    assert not (tmp_path / "out").exists()


def test_a_damaged_record_is_left_out(run: Path, tmp_path: Path) -> None:
    with_record(run)
    with_record(run, "evaluation-strict")
    file = run / "evaluation-strict" / "record.json"
    file.write_text(file.read_text().replace("61.2", "99.2"))
    done = rm.publish(run, tmp_path / "out")
    assert done.records == ("evaluation",)
    assert "record.json is damaged, or was changed by hand" in done.left_out["evaluation-strict"]


def test_damaged_weights_are_not_published(run: Path, tmp_path: Path) -> None:
    content = bytearray((run / "best.safetensors").read_bytes())
    content[-1] ^= 1
    (run / "best.safetensors").write_bytes(content)
    with pytest.raises(
        rm.UserError, match=r"best\.safetensors is damaged: its tensors do not match the digest"
    ):
        rm.publish(run, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_record_that_does_not_count_keeps_its_place(run: Path, tmp_path: Path) -> None:
    """A new one of the same name goes elsewhere; one that is refused changes nothing."""
    done = rm.publish(run, tmp_path / "out")
    other = record_of(run)
    foreign = altered(other, network={"sha256": "f" * 64})
    written(foreign, done.folder / "evaluation"), written(other, tmp_path / "evaluation")
    written(foreign, tmp_path / "foreign")
    before = texts(done.folder)
    with pytest.raises(rm.UserError, match="foreign does not count"):
        rm.publish(done.folder, records=[tmp_path / "foreign"], licence="mit")
    assert texts(done.folder) == before
    assert rm.publish(done.folder, records=[tmp_path / "evaluation"]).records == ("evaluation-2",)
    assert rm.load_record(done.folder / "evaluation") == foreign


def test_a_published_folder_is_brought_up_to_date(run: Path, tmp_path: Path) -> None:
    done = rm.publish(run, tmp_path / "out", licence="MIT")
    before = texts(done.folder)
    assert "Nothing has been measured" in before["README.md"]
    record = with_record(done.folder, "evaluation-strict", skipped=["/home/somebody/secret/1.png"])
    again = rm.publish(done.folder)
    assert again.records == ("evaluation-strict",)
    assert again.beside == ("evaluation-strict/queries.safetensors",)
    assert (done.folder / "evaluation-strict" / "queries.safetensors").exists()
    after = texts(done.folder)
    assert "secret" not in after.pop("evaluation-strict/record.json")
    assert {name for name in before if before[name] != after[name]} == {"README.md", "run.json"}
    assert f"| R@1 ↑ | {record.show('R@1')} |" in after["README.md"]
    assert "license: mit\n" in after["README.md"]
    assert rm.publish(done.folder, done.folder).records == again.records
    assert rm.publish(done.folder, licence="apache-2.0").folder == done.folder
    assert "license: apache-2.0\n" in (done.folder / "README.md").read_text()
    with pytest.raises(rm.UserError, match="out keeps the weights that it was published with: publish its"):
        rm.publish(done.folder, half=True)
    with pytest.raises(rm.UserError, match="run has not been published yet: say where to, DIR"):
        rm.publish(run)
    with pytest.raises(rm.UserError, match="run is the run itself: give another folder"):
        rm.publish(run, run)


def test_words_of_a_persons_own_are_not_lost(run: Path, tmp_path: Path) -> None:
    done = rm.publish(run, tmp_path / "out")
    card = done.folder / "README.md"
    written_first = card.read_text(encoding="utf-8")
    card.write_bytes(written_first.replace("\n", "\r\n").encode())
    rm.publish(done.folder)  # other ends of lines are no words
    card.write_text(f"{written_first}My words.\n", encoding="utf-8")
    before = texts(done.folder)
    said = r"README\.md is not the card that was written last: .* write the card anew by --force \(in Python"
    with pytest.raises(rm.UserError, match=said):
        rm.publish(done.folder, licence="mit")
    with pytest.raises(
        rm.UserError, match=r"out is there already, with a README\.md that was changed by hand"
    ):
        rm.publish(run, done.folder)
    assert texts(done.folder) == before
    rm.publish(done.folder, force=True)
    assert card.read_text(encoding="utf-8") == written_first
    rm.publish(done.folder)
    card.unlink()
    rm.publish(done.folder)
    assert card.read_text(encoding="utf-8") == written_first


def test_a_card_of_before_is_written_anew(run: Path, tmp_path: Path) -> None:
    """Nothing says what its card was."""
    done = rm.publish(run, tmp_path / "out")
    folder = RunFolder(done.folder)
    folder.write({**folder.read(), "published": {"licence": "mit", "robustmetric": "0.1.0"}})
    (done.folder / "README.md").write_text("Another card.\n")
    (done.folder / "recipe.yaml").write_text(f"# a remark\n{(done.folder / 'recipe.yaml').read_text()}")
    rm.publish(done.folder)
    assert "license: mit\n" in (done.folder / "README.md").read_text(encoding="utf-8")


def test_a_card_that_was_written_before_run_json_is_no_change(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same command goes through after it was stopped between the two."""
    done = rm.publish(run, tmp_path / "out")

    def stopped(*arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(RunFolder, "write", stopped)
        with pytest.raises(KeyboardInterrupt):
            rm.publish(done.folder, licence="mit")
    rm.publish(done.folder, licence="mit")
    assert rm.publish(done.folder).records == ()


def test_a_recipe_that_was_changed_is_refused(run: Path, tmp_path: Path) -> None:
    done = rm.publish(run, tmp_path / "zoo" / "any" / "out")
    file = done.folder / "recipe.yaml"
    text = file.read_text(encoding="utf-8")
    file.write_text(text.replace("seed: 7", "seed: 8"), encoding="utf-8")
    said = r"recipe\.yaml is not the recipe that this run began with: seed is 8, was 7; restore it"
    for act in (
        lambda: rm.publish(done.folder, force=True),
        lambda: rm.publish(done.folder, tmp_path / "more"),
        lambda: rm.load_zoo("folder/HM[S,LGA]&ICS", tmp_path / "zoo"),
    ):
        with pytest.raises(rm.UserError, match=said):
            act()
    file.write_bytes(text.replace("\n", "\r\n").encode())
    assert rm.load_zoo("folder/HM[S,LGA]&ICS", tmp_path / "zoo").digest == done.digest


def test_replacing_keeps_the_records_of_the_same_weights(run: Path, tmp_path: Path) -> None:
    first = rm.publish(run, tmp_path / "out", half=True, licence="mit")
    record = with_record(first.folder)
    (first.folder / "evaluation" / "queries.safetensors").unlink()
    with_record(run)  # of the same name, and of the weights before they were rounded
    again = rm.publish(run, first.folder, half=True, force=True)
    assert (again.digest, again.records) == (first.digest, ("evaluation",))
    assert rm.load_record(first.folder) == record
    card = (first.folder / "README.md").read_text(encoding="utf-8")
    assert "license: mit\n" in card
    assert f"| R@1 ↑ | {record.show('R@1')} |" in card
    assert "license: gpl-3.0\n" in published_card(run, first.folder, half=True, licence="gpl-3.0")
    other = rm.publish(run, first.folder, force=True)
    assert other.records == ("evaluation",)
    assert rm.load_record(first.folder) != record


def published_card(run: Path, place: Path, **how: object) -> str:
    done = rm.publish(run, place, force=True, **how)  # type: ignore[arg-type]
    return (done.folder / "README.md").read_text(encoding="utf-8")


def test_what_was_published_can_be_published_again(run: Path, tmp_path: Path) -> None:
    with_record(run)
    first = rm.publish(run, tmp_path / "first", licence="mit")
    second = rm.publish(first.folder, tmp_path / "second")
    assert texts(first.folder) == texts(second.folder)
    assert files(first.folder) == files(second.folder)


def test_folders_that_hold_something_are_left_alone(run: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    rm.publish(run, out)  # an empty one is taken
    said = "out is there already: give another folder, or replace it by --force"
    with pytest.raises(rm.UserError, match=said):
        rm.publish(run, out)
    assert rm.publish(run, out, weights="last", force=True).folder == out
    assert files(out) == ["README.md", "last.safetensors", "metrics.csv", "recipe.yaml", "run.json"]
    (out / "mine.txt").touch()
    with pytest.raises(rm.UserError, match=r"out holds more than was published: mine\.txt; move that, or"):
        rm.publish(run, out, force=True)
    other = make_run(tmp_path / "other", "last", about=about())
    for place in (other, run / "metrics.csv", tmp_path / "file"):
        (tmp_path / "file").touch()
        with pytest.raises(rm.UserError):
            rm.publish(run, place, force=True)
    with pytest.raises(rm.UserError, match="other is there already, and was not published: give another"):
        rm.publish(run, other, force=True)
    assert files(other) == ["last.safetensors", "recipe.yaml", "run.json"]
    with pytest.raises(rm.UserError, match="are in each other: give another folder"):
        rm.publish(run, run / "inside")
    with pytest.raises(rm.UserError, match="are in each other: give another folder"):
        rm.publish(run, tmp_path, force=True)


def test_what_is_no_run_or_has_no_weights(run: Path, tmp_path: Path) -> None:
    with pytest.raises(
        FileNotFoundError, match=r"nowhere is no run, it has no recipe\.yaml: give the folder"
    ):
        rm.publish(tmp_path / "nowhere", tmp_path / "out")
    for name in ("last", "best"):
        (run / f"{name}.safetensors").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"there are no weights .*: the run has not been validated yet"
    ):
        rm.publish(run, tmp_path / "out")
    (run / "last.ckpt").unlink()
    with pytest.raises(
        FileNotFoundError, match=r"there are no weights .*: the folder holds no weights; take a"
    ):
        rm.publish(run, tmp_path / "out")
    for text in ("", "Apache 2.0", "mit\n", "a" * 65):
        with pytest.raises(rm.UserError, match=r"a licence is an identifier such as apache-2\.0"):
            rm.publish(run, tmp_path / "out", licence=text)
    assert not (tmp_path / "out").exists()


def test_a_full_disk(run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = rm.publish(run, tmp_path / "out", weights="last")
    kept = texts(before.folder)

    def full(*arguments: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("robustmetric.zoo.publishing.save_weights", full)
    with pytest.raises(rm.UserError, match=r"out cannot be written \(No space left on device\): make room; "):
        rm.publish(run, tmp_path / "out", force=True)
    assert texts(before.folder) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_folder_that_cannot_be_put_in_its_place(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = rm.publish(run, tmp_path / "out", weights="last")
    kept = texts(before.folder)

    def broken(draft: Path, final: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr("robustmetric.zoo.publishing.put_in_place", broken)
    with pytest.raises(rm.UserError, match="look after the disk; then run it again"):
        rm.publish(run, tmp_path / "out", force=True)
    assert texts(before.folder) == kept
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "run"]


def test_a_run_of_before_keeps_what_it_would_look_up(tmp_path: Path) -> None:
    """Without a run.json, the shape of the images is looked up where they are, once."""
    run = make_run(tmp_path / "run", "last", "best", data="digits", validation=0.1)
    done = rm.publish(run, tmp_path / "out")
    content = json.loads((done.folder / "run.json").read_text())
    assert content["images"] == {"height": 8, "width": 8, "channels": 1}
    assert rm.load_run(done.folder).chosen == rm.load_run(run).chosen == "chosen on validation images"
