"""What an attack found, as a value, as tensors by name, and put together of parts."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from safetensors.torch import load, save

from robustmetric.evaluation import Found

COLUMNS = ["ES:D", "ES/R", "8-bit/x"]  # names with what stands between the parts of a key


def make(count: int, seed: int = 0, width: int = 2) -> Found:
    generator = torch.Generator().manual_seed(seed)

    def some() -> torch.Tensor:
        return torch.rand(count, generator=generator)

    return Found(
        number=torch.arange(count) + 10 * seed,
        target=torch.randint(9, (count, width), generator=generator),
        **{when: {name: some() for name in COLUMNS} for when in ("before", "after", "rounded")},  # type: ignore[arg-type]
        **{name: some() for name in ("first", "last", "best", "change", "outside")},  # type: ignore[arg-type]
    )


def same(one: Found, other: Found) -> bool:
    """Compare all values, floats as doubles."""
    for field in fields(Found):
        a, b = getattr(one, field.name), getattr(other, field.name)
        pairs = [(a[n], b[n]) for n in a] if isinstance(a, dict) else [(a, b)]
        if isinstance(a, dict) and list(a) != list(b):
            return False
        if not all(x.shape == y.shape and torch.equal(x.double(), y.double()) for x, y in pairs):
            return False
    return True


@pytest.mark.parametrize("width", [0, 1, 3])
def test_tensors_and_back(width: int) -> None:
    found = make(4, width=width)
    tensors = load(save(found.tensors()))
    back = Found.from_tensors(tensors, COLUMNS)
    assert same(back, found)
    assert back.after["ES:D"].dtype == torch.float64
    assert back.target.dtype == back.number.dtype == torch.int64


def test_tensors_have_the_names_of_the_files() -> None:
    assert set(make(1).tensors()) == {
        "number", "target", "objective/first", "objective/last", "objective/best", "change", "outside",
        *(f"{when}/{name}" for when in ("before", "after", "8-bit") for name in COLUMNS),
    }  # fmt: skip


def test_one_tensor_under_two_names_can_be_written() -> None:
    found = make(3)
    shared = replace(found, best=found.last, rounded=found.after)
    assert same(Found.from_tensors(load(save(shared.tensors())), COLUMNS), shared)


def test_parts_are_put_one_behind_the_other() -> None:
    parts = [make(3, 0), make(1, 1), make(2, 2)]
    whole = Found.join(parts)
    assert whole.number.tolist() == [0, 1, 2, 10, 20, 21]
    begin = 0
    for part in parts:
        rows = slice(begin, begin + len(part.number))
        begin = rows.stop
        for name in COLUMNS:
            assert torch.equal(whole.rounded[name][rows], part.rounded[name])
        assert torch.equal(whole.target[rows], part.target)
        assert torch.equal(whole.best[rows], part.best)
    assert same(Found.join([parts[0]]), parts[0])


def test_columns_that_are_not_there_are_missed() -> None:
    with pytest.raises(KeyError, match="before/other"):
        Found.from_tensors(make(2).tensors(), ["other"])
