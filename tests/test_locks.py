"""A folder or a file belongs to one program at a time."""

from __future__ import annotations

import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from robustmetric.errors import UserError
from robustmetric.locks import LOCK, InUseError, claimed, locked
from tests.helpers.processes import die, forked, needs_fork


def test_the_lock_names_its_holder_and_goes_with_it(tmp_path: Path) -> None:
    with locked(tmp_path / "new" / "run", "a training"):
        found = (tmp_path / "new" / "run" / LOCK).read_text()
        assert found.startswith(f"a training by process {os.getpid()} on {socket.gethostname()}")
    assert not (tmp_path / "new").exists()


def test_what_was_written_stays(tmp_path: Path) -> None:
    with locked(tmp_path / "run", "a training"):
        (tmp_path / "run" / "note").write_text("kept")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["note"]


@needs_fork
@pytest.mark.parametrize("what", [locked, claimed])
def test_a_second_process_is_told_who_holds_it(tmp_path: Path, what: Callable[..., object]) -> None:
    said, place = tmp_path / "said", tmp_path / "place"
    if what is locked:
        place.mkdir()

    def second() -> None:
        try:
            with what(place, "an evaluation"):  # type: ignore[attr-defined]
                said.write_text("inside")
        except InUseError as error:
            said.write_text(str(error))

    with what(place, "a training"):  # type: ignore[attr-defined]
        assert forked(second)[0] == 0
        assert f"a training by process {os.getpid()}" in said.read_text()
    assert forked(second)[0] == 0
    assert said.read_text() == "inside"


@needs_fork
def test_the_lock_of_a_killed_process_is_reported_and_taken_over(tmp_path: Path) -> None:
    def first() -> None:
        with locked(tmp_path, "a training"):
            die()

    assert forked(first)[0] == -9
    said: list[str] = []
    with locked(tmp_path, "an evaluation", said.append):
        assert (tmp_path / LOCK).read_text().startswith("an evaluation")
    (line,) = said
    assert "a training by process" in line
    assert "has ended" in line


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_a_link_is_no_lock(tmp_path: Path, link: Callable[[Path, Path], None]) -> None:
    precious, run = tmp_path / "precious.txt", tmp_path / "run"
    precious.write_text("mine")
    run.mkdir()
    link(precious, run / LOCK)
    with pytest.raises(UserError, match="is a link"), locked(run, "a training"):
        pass
    assert precious.read_text() == "mine"


def test_a_lock_that_cannot_be_written_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(UserError, match="make room"), locked(tmp_path / "new" / "run", "a training"):
        pass
    assert list(tmp_path.iterdir()) == []


def test_an_output_file_is_replaced_only_if_asked(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("old")
    with pytest.raises(UserError, match="exists already") as caught, claimed(page, "a report"):
        pass
    assert caught.value.parameter == "force"
    with claimed(page, "a report", force=True):
        page.write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize("place", [".", "missing/page.html"])
def test_an_output_that_is_no_file_is_refused(tmp_path: Path, place: str) -> None:
    with pytest.raises(UserError) as caught, claimed(tmp_path / place, "a report", force=True):
        pass
    assert caught.value.parameter == "out"
    assert list(tmp_path.iterdir()) == []
