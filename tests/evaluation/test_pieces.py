"""The pieces of an evaluation: their files, what they are kept as, and how they are made."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from robustmetric.evaluation import Check, Evaluation, Record, Verdict
from robustmetric.evaluation.pieces import AttackPiece, CheckPiece, EmbedPiece, RetrievalPiece
from robustmetric.evaluation.staged import Piece
from robustmetric.evaluation.store import PARTS, Store
from robustmetric.registry import register
from tests.evaluation.conftest import make_network
from tests.helpers.networks import Counted

Tiny = Callable[..., Evaluation]


def pieces_of(evaluation: Evaluation) -> list[Piece[Any, Any]]:
    return [piece for stage in evaluation.materials.stages for piece in stage.pieces]


def test_stages_and_files_of_an_evaluation(tiny: Tiny) -> None:
    evaluation = tiny(attacks=["ES", "CA+(w=3)"], queries=20, batch=16, checks="none,8-bit")
    stages = {stage.name: [piece.file for piece in stage.pieces] for stage in evaluation.materials.stages}
    assert stages == {
        "embed": ["embed-00000.safetensors"],
        "retrieval": ["retrieval.safetensors"],
        "ES": ["attack-00-00000.safetensors", "attack-00-00001.safetensors"],
        "CA+(w=3)": ["attack-01-00000.safetensors", "attack-01-00001.safetensors"],
        "checks": ["check-collapse.json", "check-8-bit.json"],
    }
    for stage in evaluation.materials.stages:
        assert {piece.stage for piece in stage.pieces} == {stage.name}


def test_a_surrogate_is_embedded_too(tiny: Tiny, network: nn.Module) -> None:
    evaluation = tiny(attacks=["ES"], search="transfer", surrogate=network)
    assert [piece.file for piece in evaluation.materials.stages[0].pieces] == [
        "embed-00000.safetensors",
        "surrogate-00000.safetensors",
    ]


def test_many_images_are_embedded_in_parts(tiny: Tiny) -> None:
    images, labels = torch.rand(1030, 1, 6, 6), torch.arange(1030) % 5
    evaluation = tiny(images=images, labels=labels, attacks=["ES"], queries=2)
    first, second = evaluation.materials.stages[0].pieces
    assert [piece.file for piece in (first, second)] == ["embed-00000.safetensors", "embed-00001.safetensors"]
    with evaluation.subject.frozen():
        evaluation.embed()
    assert [len(evaluation.store.get(piece)["z"]) for piece in (first, second)] == [1024, 6]
    assert len(evaluation.materials.scene.gallery) == 1030


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("8-bit", "check-8-bit.json"),
        ("here/own.py:odd", "check-odd.json"),
        ("own.py:odd(most=2, why='a b/c')", "check-odd_most_2__why__a_b_c__.json"),
    ],
)
def test_the_file_of_a_check_is_a_plain_name(name: str, file: str) -> None:
    assert CheckPiece(name).file == file


def test_each_piece_comes_back_as_it_was_made(tiny: Tiny) -> None:
    evaluation = tiny(attacks=["ES"], queries=6, checks="quick")
    with evaluation.subject.frozen():
        for piece in pieces_of(evaluation):
            made = piece.make(evaluation.materials)
            content = piece.encode(made)
            back = piece.decode(content)
            if isinstance(piece, CheckPiece):
                assert piece.file.endswith(".json")
                assert json.loads(content)["name"] == piece.name
                assert back == made
            else:
                assert piece.file.endswith(".safetensors")
                assert back.keys() == made.keys()
                for name, value in made.items():
                    assert torch.equal(back[name].nan_to_num(7), value.nan_to_num(7)), name
                    assert back[name].dtype == value.dtype
            evaluation.store.keep(piece, made)
    kinds = {type(piece) for piece in pieces_of(evaluation)}
    assert kinds == {EmbedPiece, RetrievalPiece, AttackPiece, CheckPiece}


@pytest.mark.parametrize("figure", [0.5, float("nan"), -1e-9])
def test_a_verdict_comes_back_in_full(figure: float) -> None:
    check = Check(name="odd", status="warn", figure=figure, limit='η ≤ 3 "or" so', says="ε\nµ [bold]")
    piece = CheckPiece("odd")
    assert piece.decode(piece.encode(check)) == check


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b"{}", b'{"name": "odd"}', b"\xff\xfe", b"no safetensors"]
)
def test_damaged_bytes_are_a_value_error(content: bytes) -> None:
    for piece in (CheckPiece("odd"), EmbedPiece("embed", 0), RetrievalPiece()):
        with pytest.raises(ValueError, match=r".") as damaged:
            piece.decode(content)
        assert "\n" not in str(damaged.value)


@pytest.mark.parametrize("content", [b"{", b"[]", b'{"name": "collapse"}', b""])
def test_a_damaged_check_is_named_and_only_it_is_made_anew(
    content: bytes, tiny: Tiny, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    how: dict[str, Any] = {"attacks": ["ES"], "queries": 6, "checks": "quick"}
    wanted = tiny(out=tmp_path / "whole", **how).run()

    def stop(*_: object) -> Record:
        raise KeyboardInterrupt

    out = tmp_path / "out"
    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[Evaluation.__module__], "build_record", stop)
        with pytest.raises(KeyboardInterrupt):
            tiny(out=out, **how).run()
    file = out / PARTS / "check-budget.json"
    file.write_bytes(content)
    made: list[str] = []
    keep = Store.keep

    def counted(store: Store, piece: Any, value: Any) -> None:
        made.append(piece.file)
        keep(store, piece, value)

    monkeypatch.setattr(Store, "keep", counted)
    said: list[str] = []
    record = tiny(out=out, report=said.append, **how).run()
    assert [line for line in said if str(file) in line and "made anew" in line] == said != []
    assert made == ["check-budget.json"]
    assert record == wanted
    assert (out / "record.json").read_bytes() == (tmp_path / "whole" / "record.json").read_bytes()


def test_findings_hold_what_the_pieces_found(tiny: Tiny) -> None:
    seen: list[Any] = []

    @register("check", "look")
    def look(findings: Any) -> Verdict:
        seen.append(findings)
        return Verdict("pass", 0, "", "")

    evaluation = tiny(attacks=["ES", "GTM"], queries=20, batch=8, checks="none,look")
    record = evaluation.run()
    (findings,) = seen
    assert list(findings.found) == ["ES", "GTM"]
    assert torch.equal(findings.found["ES"]["number"], findings.numbers)
    assert torch.equal(findings.numbers, evaluation.plan.draw(40))
    assert float(findings.found["GTM"]["after/GTM"].mean()) == pytest.approx(record["GTM"])
    assert findings.recall == pytest.approx(record["R@1"])
    assert (findings.attacks, findings.budget) == (evaluation.plan.goals, evaluation.plan.budget)


@pytest.mark.slow
def test_costs_are_the_passes_through_the_network(tiny: Tiny, monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact where no query drops out, and about right of checks."""
    network, spent, kept = Counted(make_network()), {}, Store.keep

    def keep(store: Store, piece: Any, value: Any) -> None:
        spent[piece.file] = network.forwards + 2 * network.backwards
        network.forwards = network.backwards = 0
        kept(store, piece, value)

    monkeypatch.setattr(Store, "keep", keep)
    for search in ("pgd", "nes(samples=2)"):
        evaluation = tiny(network, attacks=["ES", "TMA"], search=search, checks="quick")
        evaluation.probe()
        network.forwards = network.backwards = 0
        monkeypatch.setattr(evaluation, "probe", lambda: None)
        evaluation.run()
        costs = {piece.file: piece.cost(evaluation.materials) for piece in pieces_of(evaluation)}
        exact = [file for file in costs if not file.startswith("check-")]
        assert [costs[file] for file in exact] == [spent[file] for file in exact]
        assert sum(costs.values()) == pytest.approx(sum(spent.values()), rel=0.25)
