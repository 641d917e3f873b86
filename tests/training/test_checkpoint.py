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
from tests.helpers.command import refused
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
    assert f"{out / 'last.ckpt'} " in said
    assert "begin a new run in another folder" in said
    assert f"--weights {out / 'last.safetensors'}" in said
    assert "weights_only" not in said
    assert contents(out) == before, "a refused start changes nothing"
    return said


def flipped(whole: bytes, place: int) -> bytes:
    return whole[:place] + bytes([whole[place] ^ 4]) + whole[place + 1 :]


@pytest.mark.parametrize(
    "make",
    [
        lambda whole: whole[: len(whole) // 2],
        *(
            lambda whole, part=part: flipped(whole, int(part * len(whole)))
            for part in (0, 0.02, 0.3, 0.7, 0.999)
        ),
        pytest.param(lambda whole: whole[:-1], id="a byte less"),
        pytest.param(lambda whole: whole[:-73], id="no digest"),
        pytest.param(lambda whole: whole[:-70] + b"X" + whole[-69:], id="no word of a digest"),
        lambda _: b"",
        lambda _: np.random.default_rng(0).bytes(5000),
        pytest.param(lambda _: pickle.dumps({"global_step": 3}), id="a pickle"),
        pytest.param(lambda _: b"PK\x05\x06" + bytes(18), id="an empty archive"),
    ],
)
def test_what_is_damaged_or_no_checkpoint_is_refused(run: Path, make: Callable[[bytes], bytes]) -> None:
    (run / "last.ckpt").write_bytes(make((run / "last.ckpt").read_bytes()))
    assert "damaged" in told_of_the_checkpoint(run)


def test_a_malicious_checkpoint_is_not_run(run: Path, tmp_path: Path) -> None:
    evil = {**torch.load(run / "last.ckpt", weights_only=True), "more": Orders(f"touch {tmp_path / 'owned'}")}
    write_sealed(run / "last.ckpt", lambda file: torch.save(evil, file))
    assert "which was not run" in told_of_the_checkpoint(run)
    assert not (tmp_path / "owned").exists()


def test_a_checkpoint_of_something_else_is_refused(run: Path) -> None:
    write_sealed(run / "last.ckpt", lambda file: torch.save({"global_step": 3}, file))
    assert "is not the checkpoint of a training" in told_of_the_checkpoint(run)
