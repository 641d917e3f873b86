"""A defense in a bare training loop, on scikit-learn's digits: python examples/plain_loop.py --epochs 4."""

from __future__ import annotations

import argparse

import torch
from torch import nn

import robustmetric as rm
from robustmetric.data import load
from robustmetric.data.pairs import ImageLoader, PairLoader
from robustmetric.retrieval import retrieval_scores


@torch.no_grad()
def scores(model: nn.Module, loader: ImageLoader) -> str:
    """Let each image of the loader query all others."""
    model.eval()
    found = [(rm.embed(model, images), labels) for images, labels in loader]
    embeddings, labels = (torch.cat(parts) for parts in zip(*found, strict=True))
    result = retrieval_scores(embeddings, labels)
    return f"R@1 {result['R@1']:.1f}  mAP {result['mAP']:.1f}"


def main() -> None:
    """Train, and score the network before and after each epoch."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--epochs", type=int, default=2)
    parser.add_argument("--batch", type=int, default=128, help="images, two a pair")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--defense", default="HM[S,LGA]&ICS")
    parser.add_argument("--eps", type=float, default=0.2, help="the largest change of a pixel in [0, 1]")
    parser.add_argument("--steps", type=int, default=8, help="steps of the perturbation")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    train, test = load("digits", split="train"), load("digits", split="test")
    assert train.pixels is not None  # noqa: S101  (digits come as pixels; see `cached` for files)
    assert test.pixels is not None  # noqa: S101
    pairs = PairLoader(train.pixels, train.labels, pairs=args.batch // 2, seed=args.seed)
    tests = ImageLoader(test.pixels, test.labels, batch=256)

    torch.manual_seed(args.seed)
    model = rm.model("c2f2", size=8, dim=128)  # or any nn.Module: images in [0, 1] to vectors
    defense = rm.defense(args.defense, eps=args.eps, alpha=args.eps / 4, steps=args.steps, seed=args.seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=args.lr)

    print(f"untrained  {scores(model, tests)}")
    for epoch in range(args.epochs):
        model.train()
        losses = []
        for images, labels in pairs:  # each image is an anchor once an epoch
            step = defense(model, images, labels)
            optimiser.zero_grad()
            step.loss.backward()
            optimiser.step()
            losses.append(step.loss.item())
        loss = sum(losses) / len(losses)
        print(f"epoch {epoch + 1:<3}  {scores(model, tests)}  loss {loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
