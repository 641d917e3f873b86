"""Pictures beside a record, without an attack."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from robustmetric.evaluation import Record
from robustmetric.files import digest_of_entries
from robustmetric.report.cards import K, encoded
from robustmetric.report.pictures import PICTURES, SCHEMA, Pictures


def noise(seed: int, size: int = 8, channels: int = 1) -> Tensor:
    return torch.rand(channels, size, size, generator=torch.Generator().manual_seed(seed))


def a_picture(
    attack: str = "ES", why: str | None = "worst", number: int = 0, **changes: Any
) -> dict[str, Any]:
    """The entries of a picture of an attack."""
    image = encoded(noise(0))

    def item(number: int) -> dict[str, Any]:
        return {"name": f"image {number}", "label": str(number % 10), "image": image}

    listed = [{**item(k), "distance": 0.1 * k, "right": k % 2 == 0} for k in range(K)]
    return {
        "attack": attack, "why": why, "number": number, "query": item(number), "perturbed": image,
        "difference": image, "factor": 10.0, "change": 8 / 255, "targets": [item(number + 1)], "asker": None,
        "values": [[f"{attack} ↑", "100.0", "0.0"]], "before": listed, "after": listed[::-1],
        "place": [1, 2], "harm": float(number), **changes,
    }  # fmt: skip


def pictured(
    folder: Path, record: Record, attacks: Sequence[str] = ("ES",), each: int = 2, **how: Any
) -> Path:
    """Write pictures of attacks, `each` worst, median and random ones, beside a record in its folder."""
    pictures = [
        a_picture(attack, why, 100 * place + 10 * k + number, **how)
        for k, why in enumerate(("worst", "median", "random"))
        for place, attack in enumerate(attacks)
        for number in range(each)
    ]
    points = [[0.1 * k, -0.1 * k, k % 3] for k in range(9)]
    moves = {attack: [[0.0, 0.0, 0.5, 0.5]] for attack in attacks}
    shown = {"points": points, "classes": ["a", "b", "c"], "explained": [0.5, 0.2], "moves": moves}
    made = {"schema": SCHEMA, "record": record.sha256, "pictures": pictures, "map": shown}
    return seal(folder, Pictures.model_validate(made).model_dump(mode="json", by_alias=True))


def seal(folder: Path, content: dict[str, Any]) -> Path:
    """Write pictures with the digest that fits, and return their file."""
    file = folder / PICTURES
    file.write_text(json.dumps({**content, "sha256": digest_of_entries(content)}), encoding="utf-8")
    return file
