"""Damaged files of an evaluation, folders that two want, full disks: all is said, and made good."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.data.pairs import ImageLoader, PairLoader
from robustmetric.evaluation import (
    Certification,
    CertifyPlan,
    Evaluation,
    Plan,
    Subject,
    load_arrays,
    load_record,
)
from robustmetric.evaluation.staged import Staged
from robustmetric.evaluation.store import Store
from robustmetric.evaluation.verify import Verifying
from robustmetric.evaluation.verify_plan import VerifyPlan
from robustmetric.files import DamagedError
from robustmetric.locks import InUseError, locked
from robustmetric.retrieval import check_cameras, check_own, rank
from robustmetric.validate import UserError
from tests.golden.make_records import RECORDS
from tests.helpers.faults import fault

Tiny = Callable[..., Evaluation]
HOW: dict[str, Any] = {"steps": 1, "queries": 8, "batch": 4, "attacks": ["ES", "GTT"], "checks": "quick"}
FILES = ("record.json", "queries.safetensors")


def flip(file: Path, place: float = 0.5, bit: int = 1) -> None:
    content = bytearray(file.read_bytes())
    content[int(place * len(content))] ^= bit
    file.write_bytes(bytes(content))


def contents(folder: Path) -> list[bytes]:
    return [(folder / name).read_bytes() for name in FILES]


@pytest.fixture(scope="module")
def made(tiny: Tiny, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A finished evaluation, and the same one with all its pieces and without a record."""
    folder = tmp_path_factory.mktemp("made")
    tiny(out=folder / "whole", **HOW).run()
    tiny(out=folder / "pieces", **HOW).work(0, 1)
    return folder / "whole", folder / "pieces"


# Pieces


@fault(
    "evaluation",
    "a finished piece has a flipped bit, is cut, empty, overwritten or from an earlier version",
    "the piece is named and made anew; the record has the same bytes",
)
@pytest.mark.parametrize("name", ["embed-00000", "retrieval", "attack-01-00001", "check-noise"])
@pytest.mark.parametrize("place", [0.0, 0.3, 0.97, 0.999])
def test_a_flipped_bit(name: str, place: float, tiny: Tiny, made: tuple[Path, Path], tmp_path: Path) -> None:
    whole, pieces = made
    shutil.copytree(pieces, tmp_path / "out")
    (file,) = (tmp_path / "out" / "parts").glob(f"{name}.*")
    flip(file, place)
    said: list[str] = []
    tiny(out=tmp_path / "out", report=said.append, **HOW).run()
    assert len(said) == 1
    assert str(file) in said[0]
    assert "made anew" in said[0]
    assert contents(tmp_path / "out") == contents(whole)


@fault(
    "evaluation",
    "a finished piece has a flipped bit, is cut, empty, overwritten or from an earlier version",
    "the piece is named and made anew; the record has the same bytes",
)
def test_pieces_that_are_no_pieces(tiny: Tiny, made: tuple[Path, Path], tmp_path: Path) -> None:
    whole, pieces = made
    shutil.copytree(pieces, tmp_path / "out")
    damages: dict[str, Callable[[bytes], bytes]] = {
        "embed-00000": lambda content: content[: len(content) // 2],
        "retrieval": lambda _: b"",
        "attack-00-00000": lambda content: content[: content.rindex(b"\nsha256 ")],
        "attack-01-00001": lambda content: b"\xff" * len(content),
        "check-noise": lambda _: b"{}",
    }
    for name, damage in damages.items():
        (file,) = (tmp_path / "out" / "parts").glob(f"{name}.*")
        file.write_bytes(damage(file.read_bytes()))
    said: list[str] = []
    tiny(out=tmp_path / "out", report=said.append, **HOW).run()
    assert [sum(name in line for line in said) for name in damages] == [1] * len(damages) == [1] * len(said)
    assert contents(tmp_path / "out") == contents(whole)


def staged(kind: str, subject: Subject, out: Path, said: list[str], seed: int = 0) -> Staged[Any, Any]:
    """An evaluation, certification or verification with at least two pieces of most kinds."""
    few: dict[str, Any] = {"steps": 1, "batch": 16, "seed": seed}
    if kind == "verification":
        return Verifying.of(subject, VerifyPlan.make(count=40, **few), out=out, report=said.append)
    if kind == "certification":
        noise = {
            "sigma": 0.1,
            "samples": 50,
            "choose": 5,
            "gallery_samples": 5,
            "attack_samples": 2,
            "queries": 16,
        }
        return Certification(subject, CertifyPlan.make(**noise, **few), out, report=said.append)
    suite = "worst-case(goals='misrank,shift', steps=1, trials=2)"
    plan = Plan.make(**{**HOW, **few, "batch": 4}, search="transfer", suite=suite)
    return Evaluation(subject, plan, out, report=said.append)


@fault(
    "evaluation",
    "the file of another piece, or of the same piece of other work, stands in the place of a finished piece",
    "the piece is named and made anew; the result has the same bytes",
)
@pytest.mark.parametrize("kind", ["evaluation", "certification", "verification"])
@pytest.mark.parametrize("of", ["another piece", "another seed"])
def test_no_piece_stands_in_for_another(
    of: str, kind: str, images: Tensor, labels: Tensor, network: nn.Module, tmp_path: Path
) -> None:
    other = nn.Flatten() if kind == "evaluation" else None
    subject, said = Subject(network, images, labels, surrogate=other), list[str]()
    wanted = staged(kind, subject, tmp_path / "whole", said).run()
    staged(kind, subject, tmp_path / "out", said).work(0, 1)
    staged(kind, subject, tmp_path / "other", said, seed=1).work(0, 1)
    parts = tmp_path / "out" / "parts"
    files = sorted(parts.iterdir(), key=lambda file: (file.suffix, file.name))
    kept = {file.name: file.read_bytes() for file in files}
    assert len(kept) >= 4
    for file, before in zip(files, [files[-1], *files[:-1]], strict=True):
        another = tmp_path / "other" / "parts" / file.name
        file.write_bytes(another.read_bytes() if of == "another seed" else kept[before.name])
    assert staged(kind, subject, tmp_path / "out", said).run() == wanted
    assert len(said) == len(kept)
    assert {name for name in kept if any(name in line and "made anew" in line for line in said)} == {*kept}
    for file in (tmp_path / "whole").iterdir():
        assert (tmp_path / "out" / file.name).read_bytes() == file.read_bytes()


def spoil(
    monkeypatch: pytest.MonkeyPatch, out: Path, victims: list[str], damage: Callable[[Path], None]
) -> None:
    """Let pieces be damaged once, as soon as they are kept."""
    keep = Store.keep

    def spoilt(store: Store, piece: Any, value: Any) -> None:
        keep(store, piece, value)
        for name in [name for name in victims if piece.file.startswith(name)]:
            victims.remove(name)
            damage(out / "parts" / piece.file)

    monkeypatch.setattr(Store, "keep", spoilt)


@fault(
    "evaluation",
    "another program damages or removes finished pieces while an evaluation runs",
    "they are named and made anew when they are read; the record has the same bytes",
)
@pytest.mark.parametrize("damage", [flip, Path.unlink])
def test_damage_in_the_middle(
    damage: Callable[[Path], None],
    tiny: Tiny,
    made: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    victims = ["embed-00000", "retrieval", "attack-00-00001", "check-noise"]
    spoil(monkeypatch, tmp_path / "out", victims, damage)
    said: list[str] = []
    tiny(out=tmp_path / "out", report=said.append, **HOW).run()
    assert not victims
    assert len(said) == 4
    assert all("made anew" in line for line in said)
    assert contents(tmp_path / "out") == contents(made[0])


@fault(
    "evaluation",
    "finished pieces are damaged while several workers share an evaluation",
    "no worker waits for ever; the pieces are made anew, and the record has the same bytes",
)
def test_damage_among_workers(
    tiny: Tiny, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, victims, said = tmp_path / "out", ["embed-00000", "attack-00-00001", "attack-01-00000"], list[str]()
    spoil(monkeypatch, out, victims, flip)
    tiny(out=out, **HOW).begin()
    shared = [tiny(out=out, report=said.append, **HOW) for _ in range(2)]
    workers = [
        threading.Thread(target=one.work, args=(share, 2), daemon=True) for share, one in enumerate(shared)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(120)
    assert not any(worker.is_alive() for worker in workers)
    assert not victims
    tiny(out=out, report=said.append, **HOW).run()
    assert {name for name in ("embed-00000", "attack-00-00001", "attack-01-00000") if name in str(said)}
    assert contents(out) == contents(made[0])


# Records


@fault("records", "a bit of a finished record flips", "it is not shown; the file and the remedy are named")
@pytest.mark.parametrize("place", [0.02, 0.2, 0.4, 0.6, 0.8, 0.99])
@pytest.mark.parametrize("bit", [1, 2, 16])
def test_a_flipped_bit_of_a_record(
    place: float, bit: int, tiny: Tiny, made: tuple[Path, Path], tmp_path: Path
) -> None:
    shutil.copytree(made[0], tmp_path / "out")
    flip(tmp_path / "out" / "record.json", place, bit)
    try:
        found = load_record(tmp_path / "out")
    except UserError:
        pass
    else:  # a bit of the layout of the file
        assert found == load_record(made[0])
        return
    with pytest.raises(UserError, match=r"remove .*record\.json and run the same command again"):
        tiny(out=tmp_path / "out", **HOW).run()


@fault("records", "a figure of a record is changed", "the record is refused as damaged or changed by hand")
def test_a_figure_that_was_changed(made: tuple[Path, Path], tmp_path: Path) -> None:
    content = json.loads((made[0] / "record.json").read_text())
    content["retrieval"]["R@1"]["value"] += 1.0
    (tmp_path / "record.json").write_text(json.dumps(content))
    with pytest.raises(DamagedError, match="is damaged, or was changed by hand"):
        load_record(tmp_path)
    content["retrieval"]["R@1"]["value"] -= 1.0
    (tmp_path / "record.json").write_text(json.dumps(content, indent=4))
    assert load_record(tmp_path) == load_record(made[0]), "the layout is no part of it"


def test_records_of_before_have_no_digest_and_are_read() -> None:
    for folder in RECORDS.iterdir():
        assert load_record(folder).sha256 is None
        assert load_arrays(folder)


@fault(
    "records", "a bit of a record's per-query values flips", "they are not shown; file and remedy are named"
)
def test_a_flipped_bit_of_the_arrays(tiny: Tiny, made: tuple[Path, Path], tmp_path: Path) -> None:
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    flip(out / "queries.safetensors")
    with pytest.raises(UserError, match=r"queries\.safetensors .* remove .*record\.json and run"):
        tiny(out=out, **HOW).run()
    with pytest.raises(DamagedError):
        load_arrays(out)
    (out / "record.json").unlink()
    tiny(out=out, **HOW).run()
    assert contents(out) == contents(made[0]), "what it advises leads to the same record"


NO_JSON = [
    b"",
    b"[]",
    b"{}",
    b"null",
    b"NaN",
    b"\xff\xfe{",
    b'{"settings": {',
    b"9" * 5000,
    b"[" * 10**5,
    b'"x"',
]


@fault(
    "records",
    "record.json or plan.json is empty, cut, not UTF-8, no JSON, a huge number or nested too deeply",
    "the message names the file and what to remove; no traceback",
)
@pytest.mark.parametrize("content", [*NO_JSON, b'{"settings": []}'])
def test_what_is_no_record_and_no_plan(
    content: bytes, tiny: Tiny, made: tuple[Path, Path], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    shutil.copytree(made[0], out)
    (out / "record.json").write_bytes(content)
    with pytest.raises(UserError, match=r"record\.json .* remove .*record\.json and run the same command"):
        tiny(out=out, **HOW).run()
    (out / "plan.json").write_bytes(content)
    with pytest.raises(UserError, match=r"plan\.json is damaged .*: remove .*out and run the same command"):
        tiny(out=out, **HOW).run()


# Locks


@fault(
    "evaluation",
    "a second evaluation of a folder that one is working in",
    "refused; the message says who works there, and the first goes on undisturbed",
)
def test_the_second_is_told_and_the_first_goes_on(
    tiny: Tiny, made: tuple[Path, Path], tmp_path: Path
) -> None:
    out, told = tmp_path / "out", list[str]()

    def second(stage: str, done: float, total: int) -> None:
        if stage == "GTT" and done == 1:
            with pytest.raises(InUseError) as refused:
                tiny(out=out, **HOW).run()
            told.append(str(refused.value))

    tiny(out=out, progress=second, **HOW).run()
    assert len(told) == 1
    assert f"an evaluation by process {os.getpid()}" in told[0]
    assert contents(out) == contents(made[0])
    assert {file.name for file in out.iterdir()} == {*FILES, "plan.json"}


def test_a_finished_record_is_shown_without_a_lock(tiny: Tiny, made: tuple[Path, Path]) -> None:
    with locked(made[0], "something else"):
        assert tiny(out=made[0], **HOW).run() == load_record(made[0])


def test_a_refused_network_leaves_no_folder(tiny: Tiny, tmp_path: Path) -> None:
    with pytest.raises(UserError):
        tiny(torch.nn.Linear(3, 3), out=tmp_path / "a" / "b", **HOW).run()
    assert not (tmp_path / "a").exists()


# Disks


@fault(
    "evaluation",
    "the disk is full, or read-only, while evaluate writes",
    "one sentence with the file; what is finished is kept, and the same command goes on",
)
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EROFS])
def test_a_full_disk(
    code: int, tiny: Tiny, made: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, fsync, calls, stops = tmp_path / "out", os.fsync, 0, list[str]()

    def full(number: int) -> None:
        nonlocal calls
        calls += 1
        if calls % 7 == 0:
            raise OSError(code, os.strerror(code))
        fsync(number)

    monkeypatch.setattr(os, "fsync", full)
    for _ in range(40):
        try:
            tiny(out=out, **HOW).run()
        except UserError as error:
            stops.append(str(error))
            left = [path for path in out.rglob("*") if path.name.endswith(".tmp") or path.name == ".lock"]
            assert not left
        else:
            break
    assert len(stops) > 3
    for line in stops:
        assert line.startswith(str(out))
        assert os.strerror(code) in line
        assert "the same command goes on from there" in line
    assert any("parts" in line for line in stops)
    assert contents(out) == contents(made[0])


# Labels


def loss_of(labels: Tensor, images: Tensor) -> Any:
    step = rm.defense("HM[S,LGA]&ICS", steps=1, seed=0)(rm.model("c2f2", size=8, dim=8), images, labels)
    return step.loss.detach()


LABELLED: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "evaluate": lambda labels, images: rm.evaluate(
        torch.nn.Flatten(), images, labels, steps=1, queries=4, checks="none", attacks=["ES"]
    ).model_dump_json(),
    "gallery": lambda labels, images: rm.evaluate(
        torch.nn.Flatten(), images, torch.arange(20) % 4, gallery=(images, labels), steps=1, queries=4,
        checks="none", attacks=["ES"],
    ).model_dump_json(),
    "defense": loss_of,
    "rank": lambda labels, images: rank(images.flatten(1), labels).first.tolist(),
    "PairLoader": lambda labels, images: [
        labels.tolist() for _, labels in PairLoader(pixels(images), labels, pairs=4, seed=0)
    ],
    "ImageLoader": lambda labels, images: [
        labels.tolist() for _, labels in ImageLoader(pixels(images), labels, batch=8)
    ],
    "cameras": lambda labels, images: check_cameras(labels, labels, len(images), len(images)),
    "own": lambda labels, images: check_own(labels, len(images), len(images)).tolist(),
}  # fmt: skip


def pixels(images: Tensor) -> Any:
    return (images * 255).byte().permute(0, 2, 3, 1).numpy()


@fault(
    "evaluation",
    "labels, cameras or positions as uint16, uint32, uint64, bool or floats",
    "refused in a sentence that says how to convert them, or what they must be",
)
@pytest.mark.parametrize("where", list(LABELLED))
@pytest.mark.parametrize("kind", ["uint16", "uint32", "uint64", "bool", "float32", "complex64"])
def test_labels_that_cannot_be(where: str, kind: str) -> None:
    labels = (torch.arange(20) % 2).to(getattr(torch, kind))
    with pytest.raises(UserError, match=f"integers.*not torch.{kind}.*long|torch.{kind} of .*integers"):
        LABELLED[where](labels, torch.rand(20, 1, 8, 8))


@pytest.mark.parametrize("where", [name for name in LABELLED if name != "defense"])
@pytest.mark.parametrize("kind", ["uint8", "int8", "int16", "int32"])
def test_labels_of_any_integers_are_the_same_labels(where: str, kind: str) -> None:
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    labels = torch.arange(20) % 4
    assert LABELLED[where](labels.to(getattr(torch, kind)), images) == LABELLED[where](labels, images)
