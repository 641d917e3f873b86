"""Finished pieces on disk and in memory, and the folder of an evaluation."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from robustmetric.evaluation.store import PARTS, PLAN, RECORD, Store, check_folder
from robustmetric.files import DamagedError, read_sealed, write_sealed
from robustmetric.validate import UserError
from tests.helpers.faults import fault


@dataclass(frozen=True)
class Word:
    """A piece that is a word."""

    file: str = "word.txt"

    def encode(self, value: str) -> bytes:
        return value.encode()

    def decode(self, content: bytes) -> str:
        return content.decode()  # other bytes raise a ValueError


@pytest.fixture(params=["memory", "folder"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    found = Store(None if request.param == "memory" else tmp_path / "out")
    if found.folder is not None:
        found.begin({"settings": {}})
    return found


def test_what_is_kept_is_had_and_got(store: Store) -> None:
    one, other = Word(), Word("other.txt")
    assert not store.has(one)
    store.keep(one, "yes")
    assert store.has(one)
    assert not store.has(other)
    assert store.get(Word()) == "yes", "a piece is known by its file"
    store.keep(one, "no")
    assert store.get(one) == "no"
    assert store.wait([one])
    assert not store.finished


def test_memory_keeps_the_object_itself() -> None:
    store, value = Store(), "a word of its own"
    store.keep(Word(), value)
    assert store.get(Word()) is value
    store.tidy()
    assert store.has(Word()), "there is nothing to remove"


def test_pieces_are_files_that_appear_whole(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    store.begin({"settings": {"eps": 0.1}})
    assert json.loads((tmp_path / "out" / PLAN).read_text()) == {"settings": {"eps": 0.1}}
    store.keep(Word(), "yes")
    assert [file.name for file in (tmp_path / "out" / PARTS).iterdir()] == ["word.txt"]
    assert read_sealed(tmp_path / "out" / PARTS / "word.txt", store.key(Word())) == b"yes"
    assert Store(tmp_path / "out").get(Word()) == "yes"


def test_a_piece_that_cannot_be_written_leaves_none(tmp_path: Path) -> None:
    class Broken(Word):
        def encode(self, value: str) -> bytes:
            raise OSError("no more space")

    store = Store(tmp_path / "out")
    store.begin({})
    with pytest.raises(OSError, match="no more space"):
        store.keep(Broken(), "yes")
    assert not store.has(Broken())


def test_a_damaged_piece_is_not_read(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    store.begin({})
    store.keep(Word(), "yes")
    file = tmp_path / "out" / PARTS / "word.txt"
    for content in (b"yes", b"", file.read_bytes()[:-1], b"x" + file.read_bytes()):
        file.write_bytes(content)
        with pytest.raises(DamagedError, match="is damaged"):
            store.get(Word())
    write_sealed(file, lambda draft: draft.write(b"\xff"), store.key(Word()))
    with pytest.raises(DamagedError, match=r"is damaged: .*utf-8"):
        store.get(Word())
    file.unlink()
    with pytest.raises(DamagedError, match="is gone"):
        store.get(Word())


def test_waiting_ends_with_the_piece_or_with_the_record(tmp_path: Path) -> None:
    for what, wanted in (("piece", True), ("record", False)):
        store = Store(tmp_path / what)
        store.begin({})

        def later(store: Store = store, what: str = what) -> None:
            time.sleep(0.2)
            if what == "piece":
                store.keep(Word(), "yes")
            else:
                assert store.folder is not None
                (store.folder / RECORD).write_text("{}")

        worker = threading.Thread(target=later)
        worker.start()
        assert store.wait([Word()]) is wanted
        worker.join()
        assert store.finished is not wanted


def test_tidying_leaves_the_plan_and_the_record_alone(tmp_path: Path) -> None:
    store = Store(tmp_path / "out")
    store.begin({})
    store.keep(Word(), "yes")
    (tmp_path / "out" / RECORD).write_text("{}")
    store.tidy()
    assert {file.name for file in (tmp_path / "out").iterdir()} == {PLAN, RECORD}
    store.tidy()


# The folder

IDENTITY: dict[str, Any] = {"settings": {"eps": 0.1, "steps": 2}, "options": {"k": "1"}, "data": "a" * 64}


@fault(
    "evaluation",
    "the pieces' folder of an evaluation from somebody else is a link",
    "refused; nothing there is touched",
)
def test_pieces_are_not_kept_behind_a_link(tmp_path: Path) -> None:
    mine, folder = tmp_path / "mine", tmp_path / "folder"
    mine.mkdir()
    folder.mkdir()
    (mine / "letter.txt").write_text("mine")
    (folder / PARTS).symlink_to(mine)
    with pytest.raises(UserError, match="is a link"):
        check_folder(folder, {})
    Store(folder).tidy()
    assert (mine / "letter.txt").read_text() == "mine"


def begun(folder: Path, identity: dict[str, Any]) -> Path:
    Store(folder).begin(identity)
    return folder


def test_a_folder_that_is_not_there_or_empty_is_free(tmp_path: Path) -> None:
    assert check_folder(tmp_path / "none", IDENTITY) is False
    assert not (tmp_path / "none").exists()
    (tmp_path / "empty").mkdir()
    assert check_folder(tmp_path / "empty", IDENTITY) is False


def test_a_folder_of_the_same_evaluation_goes_on(tmp_path: Path) -> None:
    out = begun(tmp_path / "out", IDENTITY)
    assert check_folder(out, IDENTITY) is True
    assert check_folder(out, {"settings": IDENTITY["settings"]}) is True, "the rest is not compared"


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"settings": {"eps": 0.1, "steps": 3}}, "steps was 2, is 3;"),
        ({"settings": {"eps": 0.1, "steps": 3}, "options": {"k": "2"}}, "steps was 2, is 3; give"),
        ({"options": {"k": "2"}}, "k was '1', is '2'"),
        ({"data": "b" * 64}, "data was 'aaaaaaaaaaaa', is 'bbbbbbbbbbbb'"),
        ({"more": 1}, "more was None, is 1"),
    ],
)
def test_another_evaluation_is_refused_with_what_differs(
    change: dict[str, Any], told: str, tmp_path: Path
) -> None:
    out = begun(tmp_path / "out", IDENTITY)
    with pytest.raises(UserError) as refused:
        check_folder(out, {**IDENTITY, **change})
    assert f"{out} holds another evaluation: {told}" in str(refused.value)
    assert "give another folder" in str(refused.value)
    assert refused.value.parameter == "out"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("thesis.tex", "x", "is not empty and holds no evaluation: give another folder"),
        (PLAN, "{", "plan.json is damaged ("),
        (PLAN, "[1]", "plan.json is damaged (it holds a list)"),
    ],
)
def test_a_folder_of_something_else_is_refused(name: str, content: str, told: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError) as refused:
        check_folder(tmp_path, IDENTITY)
    assert told in str(refused.value)
    assert refused.value.parameter == "out"
    assert (tmp_path / name).read_text() == content


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    with pytest.raises(UserError, match="is a file: give a folder") as refused:
        check_folder(tmp_path / "out", IDENTITY)
    assert refused.value.parameter == "out"
