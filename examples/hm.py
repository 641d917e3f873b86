"""HM[S,LGA]&ICS in one file, with torch alone: Hardness Manipulation for robust deep metric learning.

The method of "Enhancing Adversarial Robustness for Deep Metric Learning" (CVPR 2022), top down.
Each step draws triplets of anchor, positive and negative (S, softhard), perturbs their images until they are
as hard as the gradual adversary asks (LGA), and trains on them, with a term that keeps perturbed anchors near
(ICS, intra-class structure). Run it to train a small network on synthetic images:

    python examples/hm.py

d(x, y) is the Euclidean distance of embeddings on the unit sphere, H = d(a, p) − d(a, n) the hardness of a
triplet, γ the margin of the triplet loss; ε, α and η are size, step and number of steps of a perturbation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass
class HardnessManipulation:
    """The loss of a batch; it remembers the previous loss, which the gradual adversary follows."""

    eps: float = 8 / 255
    alpha: float = 1 / 255
    steps: int = 8
    margin: float = 0.2
    ics: float = 0.5  # λ, the weight of ICS
    generator: torch.Generator = field(default_factory=lambda: torch.Generator().manual_seed(0))
    previous_loss: float = float("inf")

    def __call__(self, model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a `model` on pairs of `images` (2T, C, H, W) in [0, 1] with `labels` (2T,)."""
        # Mine and perturb with the network frozen, in evaluation mode.
        with frozen(model):
            with torch.no_grad():
                z = embed(model, images)
            triplets = softhard(z, labels, self.generator)
            x = self.harden(model, images[triplets], self.destination())

        # Learn from the perturbed triplets, with the network in training mode.
        a_moved, p_moved, n_moved = embed_triplets(model, x)
        loss = hinge(hardness(a_moved, p_moved, n_moved) + self.margin)
        self.previous_loss = loss.item()

        # ICS: the anchor is nearer to its own perturbed image than to its positive. Both are benign.
        z = embed(model, images)
        anchor, positive, _ = triplets.unbind(1)
        return loss + self.ics * hinge(hardness(z[anchor], a_moved, z[positive]))

    def destination(self) -> float:
        """LGA: the hardness to reach, −γ·min(γ, ℓ)/γ, ℓ the previous loss: from −γ to 0 as the loss falls."""
        return -self.margin * min(self.margin, self.previous_loss) / self.margin

    def harden(self, model: nn.Module, x: Tensor, wanted: float) -> Tensor:
        """Perturb triplets `x` (T, 3, C, H, W) by at most ε a pixel until their hardness is `wanted`.

        Projected gradient descent on max(0, wanted − H)². A triplet that is hard enough has a zero gradient
        and stays as it is; robustmetric does not even compute it.
        """
        low, high = (x - self.eps).clamp(0, 1), (x + self.eps).clamp(0, 1)
        stride = self.eps if self.steps == 1 else self.alpha  # a single step is FGSM
        for _ in range(self.steps):
            x = x.detach().requires_grad_()
            shortfall = (wanted - hardness(*embed_triplets(model, x))).clamp_min(0).square().sum()
            (slope,) = torch.autograd.grad(shortfall, x)
            x = (x.detach() - stride * slope.sign()).clamp(low, high)
        return x


def softhard(z: Tensor, labels: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a triplet for each even image of a batch of pairs: (T, 3) positions in `z` (2T, D).

    The positive is farther than the nearest negative, the negative nearer than the farthest positive; where
    there is none, any image of the class, or of another class, is drawn.
    """
    anchor = torch.arange(0, len(labels), 2)
    dist = (z[anchor, None] - z).norm(dim=2)
    other = labels[anchor, None] != labels
    same = (~other).scatter(1, anchor[:, None], False)  # an anchor is not its own positive
    nearest = dist.masked_fill(~other, torch.inf).amin(1, keepdim=True)
    farthest = dist.masked_fill(~same, -torch.inf).amax(1, keepdim=True)
    positive = draw(same & (dist > nearest), same, generator)
    negative = draw(other & (dist < farthest), other, generator)
    return torch.stack([anchor, positive, negative], dim=1)


def draw(wanted: Tensor, fallback: Tensor, generator: torch.Generator) -> Tensor:
    """Draw a column (T,) of each row of the mask `wanted` (T, N), or of `fallback` where it is empty."""
    mask = torch.where(wanted.any(1, keepdim=True), wanted, fallback)
    count = mask.double().cumsum(1)
    u = torch.rand(len(mask), 1, generator=generator, dtype=torch.float64)
    return torch.searchsorted(count, u * count[:, -1:], right=True).squeeze(1)


def embed(model: nn.Module, images: Tensor) -> Tensor:
    """Return the embeddings (N, D) of `images` on the unit sphere."""
    return F.normalize(model(images))


def embed_triplets(model: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
    """Return the embeddings (T, D) of anchors, positives and negatives of triplets `x` (T, 3, C, H, W)."""
    return embed(model, x.flatten(0, 1)).unflatten(0, (-1, 3)).unbind(1)


def hardness(a: Tensor, p: Tensor, n: Tensor) -> Tensor:
    """Return H = d(a, p) − d(a, n) of triplets: (T,)."""
    return torch.linalg.vector_norm(a - p, dim=1) - torch.linalg.vector_norm(a - n, dim=1)


def hinge(x: Tensor) -> Tensor:
    """Return the mean of max(0, x)."""
    return x.clamp_min(0).mean()


@contextmanager
def frozen(model: nn.Module) -> Iterator[None]:
    """Hold a `model` in evaluation mode, its parameters without gradients; restore each of them."""
    modes = [(module, module.training) for module in model.modules()]
    flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    model.eval().requires_grad_(False)
    try:
        yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, learns in flags:
            parameter.requires_grad_(learns)


# --- An example: twelve classes of noisy patterns ---------------------------------------------------------


def make_batch(patterns: Tensor, pairs: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw `pairs` of noisy images of `patterns` (K, 1, 8, 8), and their labels: [a0, p0, a1, p1, …]."""
    labels = torch.randint(len(patterns), (pairs,), generator=generator).repeat_interleave(2)
    noise = torch.randn(len(labels), 1, 8, 8, generator=generator)
    return (patterns[labels] + 0.5 * noise).clamp(0, 1), labels


@torch.no_grad()
def recall_at_1(model: nn.Module, images: Tensor, labels: Tensor) -> float:
    """Return the share of `images` whose nearest other image is of their class, in percent."""
    with frozen(model):
        similarity = (z := embed(model, images)) @ z.T
    nearest = similarity.fill_diagonal_(-torch.inf).argmax(1)
    return 100 * (labels[nearest] == labels).double().mean().item()


def main() -> None:
    """Train a small network for 60 steps."""
    torch.manual_seed(0)
    generator = torch.Generator().manual_seed(1)
    patterns = torch.rand(12, 1, 8, 8, generator=generator)
    model = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 64, 32))
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    method, test = HardnessManipulation(eps=0.1, alpha=0.02), make_batch(patterns, 200, generator)
    print(f"before  R@1 {recall_at_1(model, *test):.1f} %")
    for step in range(1, 61):
        loss = method(model, *make_batch(patterns, 24, generator))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        if step % 20 == 0:
            print(f"step {step:3}  loss {loss.item():.3f}  next destination {method.destination():+.3f}")
    print(f"after   R@1 {recall_at_1(model, *test):.1f} %")


if __name__ == "__main__":
    main()
