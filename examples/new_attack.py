"""An attack of your own, in the same table as others, on scikit-learn's digits.

python examples/new_attack.py --defense "N/A[S]"
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

import torch
from torch import Tensor

import robustmetric as rm
from robustmetric.attacks import Attack, Column, Gallery, Queries, Target, hit_at_1
from robustmetric.training.recipe import load_recipe
from robustmetric.training.run import train


class AwayFromClass(Attack):
    """Move the query away from all other images of its class; reported is R@1."""

    name = "away"
    columns = (Column("away", "higher"),)  # what it reports, and which way is robust

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Minus the mean distance to the class: (B,), to be minimised."""
        mates = gallery.labels == queries.labels[:, None]
        mates &= torch.arange(len(gallery), device=z.device) != queries.own[:, None]
        dist = rm.cross_distance(z, gallery.z)
        return -(dist * mates).sum(1) / mates.sum(1).clamp_min(1)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Whether the nearest other image is still of the class, as 100 or 0: (B,)."""
        return {"away": hit_at_1(z, queries, gallery)}


def main() -> None:
    """Train a network, then attack it with ES, LTM and the new attack."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="images, two a pair")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--defense", default="HM[S,LGA]&ICS")
    parser.add_argument("--eps", type=float, default=0.2, help="the largest change of a pixel in [0, 1]")
    parser.add_argument("--steps", type=int, default=8, help="steps of the perturbation, in both")
    parser.add_argument("--queries", type=int, default=128, help="how many test images to attack")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    names = ("epochs", "batch", "lr", "defense", "eps", "steps", "seed")
    recipe = load_recipe("digits", {name: getattr(args, name) for name in names})
    with tempfile.TemporaryDirectory() as folder:
        model = train(recipe, Path(folder, "run"), progress=False).model
    test = rm.data.load("digits", split="test")
    assert test.pixels is not None  # noqa: S101  (digits come as pixels; see `cached` for files)
    images = torch.from_numpy(test.pixels).permute(0, 3, 1, 2) / 255
    record = rm.evaluate(
        model,
        images,
        test.labels,
        eps=args.eps,
        alpha=2 * args.eps / args.steps,
        steps=args.steps,
        attacks=["ES", "LTM", AwayFromClass()],
        queries=args.queries,
        seed=args.seed,
    )
    print(record)


if __name__ == "__main__":
    main()
