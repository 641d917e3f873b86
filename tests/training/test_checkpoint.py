"""A checkpoint that is damaged, cut, malicious or of something else is refused, and told how to go on."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from robustmetric.files import write_sealed
from tests.helpers.command import refused, works
from tests.training.conftest import contents, resume


class Orders:
    """What a malicious pickle would do: run a command of the shell."""

    def __init__(self, order: str) -> None:
        self.order = order

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return os.system, (self.order,)


def told_of_the_checkpoint(out: Path) -> str:
    """Resume; return what is said of a checkpoint that is refused, with what can be done instead."""
    before = contents(out)
    said = refused(*resume(out))
    assert f"{out / 'last.ckpt'} is " in said
    assert "begin a new run in another folder" in said
    assert f"--weights {out / 'last.safetensors'}" in said
    assert "weights_only" not in said
    assert contents(out) == before, "a refused start changes nothing"
    return said


@pytest.mark.parametrize("place", [0.0, 0.02, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.999])
def test_a_flipped_bit_is_noticed(run: Path, place: float) -> None:
    content = bytearray((run / "last.ckpt").read_bytes())
    content[int(place * len(content))] ^= 4
    (run / "last.ckpt").write_bytes(content)
    assert "does not match the digest" in told_of_the_checkpoint(run)


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: whole[: len(whole) // 2],
        pytest.param(lambda whole: whole[:-200], id="end"),
        pytest.param(lambda whole: whole[:-1], id="a byte less"),
        pytest.param(lambda whole: whole[:-73], id="no digest"),
        pytest.param(lambda whole: whole[:-70] + b"X" + whole[-69:], id="no word of a digest"),
        lambda _: b"",
        lambda _: np.random.default_rng(0).bytes(5000),
        pytest.param(lambda _: pickle.dumps({"global_step": 3}), id="a pickle"),
        pytest.param(lambda _: b"PK\x05\x06" + bytes(18), id="an empty archive"),
    ],
)
def test_what_is_no_checkpoint_is_refused(run: Path, make: Callable[[bytes], bytes]) -> None:
    (run / "last.ckpt").write_bytes(make((run / "last.ckpt").read_bytes()))
    assert "damaged" in told_of_the_checkpoint(run)


@pytest.mark.parametrize("sealed", [False, True])
def test_a_malicious_checkpoint_is_not_run(run: Path, sealed: bool, tmp_path: Path) -> None:
    evil = {**torch.load(run / "last.ckpt", weights_only=True), "more": Orders(f"touch {tmp_path / 'owned'}")}
    if sealed:
        write_sealed(run / "last.ckpt", lambda file: torch.save(evil, file))
    else:
        torch.save(evil, run / "last.ckpt")
    assert "which was not run" in told_of_the_checkpoint(run)
    assert not (tmp_path / "owned").exists()


SPOILT: dict[str, Callable[[dict[str, Any]], object]] = {
    "no state_dict": lambda found: found.pop("state_dict"),
    "a number as state_dict": lambda found: found.update(state_dict=3),
    "no step": lambda found: found.pop("global_step"),
    "a text as step": lambda found: found.update(global_step="3"),
    "empty loops": lambda found: found["loops"].clear(),
    "no state of the optimiser": lambda found: found["optimizer_states"].clear(),
    "no best": lambda found: found["callbacks"]["Keeper"].pop("best"),
    "no memory of the guard": lambda found: found["callbacks"]["CollapseGuard"].clear(),
    "random states that are none": lambda found: found.update(random_states=[{"python": 3}]),
}


@pytest.mark.parametrize("spoil", SPOILT.values(), ids=SPOILT.keys())
def test_a_checkpoint_of_something_else_is_refused(
    run: Path, spoil: Callable[[dict[str, Any]], object]
) -> None:
    found = torch.load(run / "last.ckpt", weights_only=True)
    spoil(found)
    write_sealed(run / "last.ckpt", lambda file: torch.save(found, file))
    said = refused(*resume(run))
    assert f"{run / 'last.ckpt'} is not the " in said
    assert f"--weights {run / 'last.safetensors'}" in said


def test_a_checkpoint_of_before_has_no_digest_and_is_read(run: Path) -> None:
    found = torch.load(run / "last.ckpt", weights_only=True)
    del found["sealed"]
    torch.save(found, run / "last.ckpt")
    assert "goes on from step 8" in works(*resume(run))
    assert b"\nsha256 " in (run / "last.ckpt").read_bytes()[-80:]


def test_a_logger_asks_for_the_step_of_a_whole_checkpoint_only(run: Path) -> None:
    (run / "last.ckpt").write_bytes(b"")
    assert "last.ckpt is damaged" in refused(*resume(run, 3, "--logger", "csv"))
