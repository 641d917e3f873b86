"""robustmetric's Lightning module and loaders with a Trainer of your own, on scikit-learn's digits.

python examples/lightning_trainer.py --epochs 4
"""

from __future__ import annotations

import argparse
from pathlib import Path

import lightning

import robustmetric as rm
from robustmetric.data import load
from robustmetric.data.cache import cached
from robustmetric.data.pairs import ImageLoader, PairLoader
from robustmetric.training.module import MetricModule


def main() -> None:
    """Train, and score the network before and after."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--data", default="digits", help="a data set that robustmetric knows")
    parser.add_argument("--root", type=Path, help="where its files are")
    parser.add_argument("--cache", type=Path, default=Path("cache"), help="where decoded images are kept")
    parser.add_argument("--size", type=int, default=8, help="height and width that images are brought to")
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="images, two a pair")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--defense", default="HM[S,LGA]&ICS")
    parser.add_argument("--eps", type=float, default=0.2, help="the largest change of a pixel in [0, 1]")
    parser.add_argument("--steps", type=int, default=8, help="steps of the perturbation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    size = (args.size, args.size)
    train, test = (
        cached(load(args.data, args.root, split), args.cache, size=size, channels=1)
        for split in ("train", "test")
    )
    lightning.seed_everything(args.seed, verbose=False)
    module = MetricModule(
        rm.model("c2f2", size=args.size, dim=128),  # or any nn.Module: images in [0, 1] to vectors
        rm.defense(args.defense, eps=args.eps, alpha=args.eps / 4, steps=args.steps),
        lr=args.lr,
        seed=args.seed,
    )
    trainer = lightning.Trainer(
        max_epochs=args.epochs,
        devices=1,
        num_sanity_val_steps=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )
    pairs = PairLoader(
        train.pixels,
        train.labels,
        pairs=args.batch // 2,
        seed=args.seed,
        # With these, a checkpoint of this Trainer goes on with the batch that comes next.
        progress=lambda: (
            trainer.current_epoch,
            trainer.fit_loop.epoch_loop.batch_progress.current.ready,
        ),
    )
    tests = ImageLoader(test.pixels, test.labels, batch=256)

    (before,) = trainer.validate(module, tests, verbose=False)
    print(f"untrained  R@1 {before['R@1']:.1f}  mAP {before['mAP']:.1f}")
    trainer.fit(module, pairs, tests)
    after = trainer.callback_metrics
    print(f"trained    R@1 {after['R@1']:.1f}  mAP {after['mAP']:.1f}")


if __name__ == "__main__":
    main()
