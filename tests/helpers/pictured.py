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
from robustmetric.report.pictures import FOLDER, LIST, SCHEMA, K, Pictures, encoded


def noise(seed: int, size: int = 8, channels: int = 1) -> Tensor:
    return torch.rand(channels, size, size, generator=torch.Generator().manual_seed(seed))


def pictured(
    folder: Path,
    record: Record,
    attacks: Sequence[str] = ("ES",),
    each: int = 2,
    *,
    image: bytes | None = None,
) -> Path:
    """Write pictures of attacks, `each` worst, median and random ones, beside a record in its folder.

    All show the same `image`, a grey one of 8×8 if none is given, in files of their own.
    """
    place = folder / FOLDER
    place.mkdir(parents=True, exist_ok=True)
    content = image or encoded(noise(0))

    def file(stem: str) -> str:
        (place / f"{stem}.png").write_bytes(content)
        return f"{stem}.png"

    def item(number: int) -> dict[str, Any]:
        return {"name": f"image {number}", "label": str(number % 10), "image": file(f"image-{number:06d}")}

    def one(attack: int, why: str, number: int) -> dict[str, Any]:
        stem = f"attack-{attack:02d}-{number:06d}"
        columns = [n for n in record.scores if n.partition(":")[0] == attacks[attack]]
        listed = [{**item(k), "distance": 0.1 * k, "right": k % 2 == 0} for k in range(K)]
        return {
            "attack": attacks[attack], "why": why, "number": number, "query": item(number),
            "perturbed": file(f"{stem}-perturbed"), "difference": file(f"{stem}-difference"), "factor": 10.0,
            "change": 8 / 255, "targets": [item(number + 1)], "asker": None,
            "values": {name: [100.0, 0.0] for name in columns}, "before": listed, "after": listed[::-1],
            "place": [1, 2], "harm": float(number),
        }  # fmt: skip

    whys = [(why, k) for k, why in enumerate(("worst", "median", "random"))]
    pictures = [
        one(attack, why, 100 * attack + 10 * k + number)
        for why, k in whys
        for attack in range(len(attacks))
        for number in range(each)
    ]
    points = [[0.1 * k, -0.1 * k, k % 3] for k in range(9)]
    moves = {attack: [[0.0, 0.0, 0.5, 0.5]] for attack in attacks}
    shown = {"points": points, "classes": ["a", "b", "c"], "explained": [0.5, 0.2], "moves": moves}
    made = Pictures.model_validate(
        {"schema": SCHEMA, "record": record.sha256, "k": K, "pictures": pictures, "map": shown}
    )
    return seal(folder, made.model_dump(mode="json", by_alias=True))


def seal(folder: Path, content: dict[str, Any]) -> Path:
    """Write a list of pictures with the digest that fits, and return its file."""
    file = folder / FOLDER / LIST
    file.write_text(json.dumps({**content, "sha256": digest_of_entries(content)}), encoding="utf-8")
    return file
