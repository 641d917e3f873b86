"""What an attack found: values of each query before, after and in between."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor

Values = dict[str, Tensor]
"""(Q,) values by column."""

_WHEN = {"before": "before", "after": "after", "rounded": "8-bit"}  # as they are called in files
_PLAIN = {
    "number": "number", "target": "target", "first": "objective/first", "last": "objective/last",
    "best": "objective/best", "change": "change", "outside": "outside",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Found:
    """What an attack found for Q queries, in the order of their `number` (Q,).

    `before`, `after` and `rounded` are the values (Q,) of each of the attack's columns: of the images as they
    were, perturbed, and perturbed and rounded to 8 bits. `first`, `last` and `best` are the objective (Q,) at
    the image, at the perturbed image and at the best point on the way, where that is known. `target` (Q, W)
    are positions in the gallery, `change` (Q,) is the largest change of a pixel and `outside` (Q,) how far
    pixels leave [0, 1].

    >>> zero = torch.zeros(2)
    >>> tensors = dict.fromkeys(["number", "target", "change", "outside"], zero)
    >>> tensors |= {f"objective/{when}": zero for when in ("first", "last", "best")}
    >>> tensors |= {f"{when}/X": zero for when in ("before", "after", "8-bit")}
    >>> found = Found.from_tensors(tensors, ["X"])
    >>> found.after, sorted(found.tensors()) == sorted(tensors)
    ({'X': tensor([0., 0.])}, True)
    """

    number: Tensor
    target: Tensor
    before: Values
    after: Values
    rounded: Values
    first: Tensor
    last: Tensor
    best: Tensor
    change: Tensor
    outside: Tensor

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor], columns: Sequence[str]) -> Found:
        """Return what the method `tensors` wrote of an attack with these `columns`."""
        plain = {field: tensors[key] for field, key in _PLAIN.items()}
        values = {field: {name: tensors[f"{key}/{name}"] for name in columns} for field, key in _WHEN.items()}
        return cls(**plain, **values)  # type: ignore[arg-type]

    @classmethod
    def join(cls, parts: Sequence[Found]) -> Found:
        """Return the queries of several `parts`, one part after the other."""

        def joined(values: Sequence[Tensor | Values]) -> Tensor | Values:
            if isinstance(values[0], dict):
                return {name: torch.cat([part[name] for part in values]) for name in values[0]}  # type: ignore[index]
            return torch.cat(values)  # type: ignore[arg-type]

        return cls(**{f.name: joined([getattr(p, f.name) for p in parts]) for f in fields(cls)})  # type: ignore[arg-type]

    def tensors(self) -> dict[str, Tensor]:
        """Return all as tensors by name, on the CPU, floats in double precision."""
        named = {key: getattr(self, field) for field, key in _PLAIN.items()}
        for field, key in _WHEN.items():
            named |= {f"{key}/{name}": value for name, value in getattr(self, field).items()}
        # Copies, because safetensors refuses two names for one tensor.
        kept = {n: v.cpu().clone(memory_format=torch.contiguous_format) for n, v in named.items()}
        return {n: v.double() if v.is_floating_point() else v for n, v in kept.items()}
