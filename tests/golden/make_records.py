"""Make the records that evaluations are compared with, or compare fresh ones with them to the bit.

    python tests/golden/make_records.py             writes tests/golden/records
    python tests/golden/make_records.py --compare   says of each whether it has the same bits

Versions of libraries are not compared, nor what a record tells besides what it told then; the digest of the
per-query values is. Bits depend on the processor: what holds on any is in test_same_as_before.py.

The records were made once, by the code before evaluation was taken apart. They are made anew only when a
score is meant to change.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import Transfer
from robustmetric.evaluation import Data

HERE = Path(__file__).parent
RECORDS = HERE / "records"
FILES = ("record.json", "queries.safetensors")


def network(*, mirrored: bool = False) -> nn.Sequential:
    """Return the tiny network of the golden figures, or another whose filters are mirrored."""
    layers = nn.Sequential(
        nn.Conv2d(1, 16, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(1568, 64),
    )
    with np.load(HERE / "fashion-tiny.npz") as golden:
        state = {name[4:]: torch.tensor(golden[name]) for name in golden if name[:4] == "net/"}
    if mirrored:
        state = {name: value.flip(3) if value.ndim == 4 else value for name, value in state.items()}
    layers.load_state_dict(state)
    return layers.eval()


def images(count: int) -> tuple[Tensor, Tensor]:
    """Return Fashion-MNIST images (N, 1, 28, 28) and their labels (N,)."""
    with np.load(HERE / "fashion-tiny.npz") as golden:
        pixels, labels = golden["gallery/images"][:count], golden["gallery/labels"][:count]
        return torch.tensor(pixels) / 255, torch.tensor(labels)


Case = dict[str, Any]  # the keyword arguments of rm.evaluate, `model` included
BUDGET: Case = {"eps": 16 / 255, "alpha": 3 / 255, "steps": 8, "checks": "none"}


def strict() -> Case:
    """All ten columns of the ERS, and all checks."""
    x, labels = images(80)
    return {"images": x, "labels": labels, "queries": 16, "batch": 12, "steps": 6, "checks": "full"}


def single() -> Case:
    """The same in single precision, as it is used."""
    return {**strict(), "checks": "quick"}


def reference() -> Case:
    """What published figures were made with."""
    x, labels = images(64)
    return {"images": x, "labels": labels, "queries": 12, "protocol": "reference"}


def options() -> Case:
    """Attacks beside those of the ERS, with options; another seed and batch."""
    x, labels = images(64)
    names = ["SP-QA+", "SP-QA-(m=2)", "CA+(w=3)", "QA-(m=2)"]
    return {"images": x, "labels": labels, "attacks": names, "queries": 13, "seed": 5, "batch": 5}


def sides() -> Case:
    """A separate gallery, in which some queries are, and cameras."""
    x, labels = images(100)
    own = torch.arange(40) - 24
    return {
        "images": x[:40],
        "labels": labels[:40],
        "gallery": Data(x[24:], labels[24:], cameras=torch.arange(24, 100) % 3),
        "own": torch.where(own < 0, -1, own),
        "cameras": torch.arange(40) % 3,
        "attacks": ["CA-", "QA+", "ES", "LTM", "GTM", "GTT"],
        "queries": 12,
        "checks": "quick",
    }


def transfer() -> Case:
    """Perturbations from another network."""
    x, labels = images(64)
    search = Transfer(surrogate=network(mirrored=True).double())
    return {"images": x, "labels": labels, "search": search, "attacks": ["QA+", "TMA", "ES"], "queries": 12}


def nes() -> Case:
    """A search without gradients."""
    x, labels = images(64)
    names = ["CA+", "ES", "GTM"]
    return {"images": x, "labels": labels, "search": "nes(samples=8)", "attacks": names, "queries": 12}


SIDES = ("images", "labels", "gallery", "own", "cameras")
CASES: dict[str, Callable[[], Case]] = {
    made.__name__: made for made in (strict, single, reference, options, sides, transfer, nes)
}


def in_double(case: Case) -> Case:
    """Let a case compute in double precision, in which every processor's kernels come to the same scores."""
    gallery = case.get("gallery")
    sides = {} if gallery is None else {"gallery": replace(gallery, images=gallery.images.double())}
    return {**case, "images": case["images"].double(), **sides}


def make(name: str, folder: Path) -> None:
    """Evaluate a case; its record and its per-query values are then in the folder."""
    case, model = dict(CASES[name]()), network()
    if name != "single":
        case, model = in_double(case), model.double()
    data = Data(**{key: case.pop(key) for key in SIDES if key in case}, name="fashion")
    rm.evaluate(model, data, **{**BUDGET, **case}, name=name, out=folder)


def read(folder: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a record as JSON has it, without the versions of libraries, and its per-query values."""
    record = json.loads((folder / FILES[0]).read_text(encoding="utf-8"))
    del record["versions"]
    return record, load_file(folder / FILES[1])


def differences(before: Any, after: Any, place: str = "") -> list[str]:
    """Name the places where a JSON value is no longer what it was; what it has besides does not count."""
    if isinstance(before, dict) and isinstance(after, dict):
        lost = [f"{place}/{key} is gone" for key in before if key not in after]
        kept = [key for key in before if key in after]
        return lost + [d for key in kept for d in differences(before[key], after[key], f"{place}/{key}")]
    if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        pairs = enumerate(zip(before, after, strict=True))
        return [d for i, (b, a) in pairs for d in differences(b, a, f"{place}/{i}")]
    return [] if before == after else [f"{place} was {before!r}, is {after!r}"]


def main() -> int:
    """Write the records, or compare fresh ones with them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--compare", action="store_true", help="write nothing; say whether each is bit-equal")
    compare = parser.parse_args().compare
    torch.set_num_threads(1)
    differ = 0
    for name in CASES:
        with tempfile.TemporaryDirectory() as made:
            make(name, Path(made))
            if compare:
                found = differences(read(RECORDS / name)[0], read(Path(made))[0])
                differ += bool(found)
                print("\n  ".join([f"{name}:", *found]) if found else f"{name}: bit-equal")
            else:
                (RECORDS / name).mkdir(parents=True, exist_ok=True)
                for file in FILES:
                    (RECORDS / name / file).write_bytes((Path(made) / file).read_bytes())
                print(f"{name}: written")
    return int(differ > 0)


if __name__ == "__main__":
    raise SystemExit(main())
