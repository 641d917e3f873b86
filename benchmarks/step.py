"""One training step of HM[S,LGA]&ICS against the textbook step, and against the bare network passes it needs.

Run with `make bench`. The textbook step follows the paper literally: samplers that loop over anchors, every
triplet in every step, a full backward pass each time, every image of the sextuplet computed where it stands.
Both programs draw the same triplets from the same seed and must agree in their loss. FLOPs are counted;
wall times are medians of steps run in turns.
"""

from __future__ import annotations

import argparse
import copy
import gzip
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

import robustmetric as rm
from robustmetric.defenses.hardness import HardnessManipulation


def textbook_step(model: nn.Module, images: Tensor, labels: Tensor, defense: HardnessManipulation) -> Tensor:
    """Do the step as the paper writes it; `defense` gives the parameters, the state and the seed."""
    budget, margin = defense.budget, defense.margin
    model.eval()
    with torch.no_grad():
        z = F.normalize(model(images))
    dist = torch.cdist(z, z)
    a, p, n = softhard(dist, labels, defense.generator)
    level = float(defense.destination.previous_loss)  # type: ignore[arg-type]
    wanted = -margin * min(margin, level) / margin
    x = images[torch.cat([a, p, n])]
    r = torch.zeros_like(x)
    for _ in range(budget.steps):
        r.requires_grad_()
        ea, ep, en = F.normalize(model(x + r)).chunk(3)
        hardness = (ea - ep).norm(dim=1) - (ea - en).norm(dim=1)
        (wanted - hardness).clamp_min(0).square().sum().backward()
        assert r.grad is not None
        r = (r - budget.stride * r.grad.sign()).detach().clamp(-budget.eps, budget.eps)
        r = (x + r).clamp(0, 1) - x
        model.zero_grad()
    model.train()
    ta, tp, tn = F.normalize(model(x + r)).chunk(3)
    ba, bp = F.normalize(model(images[torch.cat([a, p])])).chunk(2)
    triplet = ((ta - tp).norm(dim=1) - (ta - tn).norm(dim=1) + margin).clamp_min(0).mean()
    structure = ((ba - ta).norm(dim=1) - (ba - bp).norm(dim=1)).clamp_min(0).mean()
    loss: Tensor = triplet + 0.5 * structure
    return loss


def softhard(dist: Tensor, labels: Tensor, generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Sample as a loop over anchors."""
    anchors = list(range(0, len(labels), 2))
    u = torch.rand(len(anchors), generator=generator, dtype=torch.float64)
    v = torch.rand(len(anchors), generator=generator, dtype=torch.float64)
    positives, negatives = [], []
    for k, i in enumerate(anchors):
        same = [j for j in range(len(labels)) if labels[j] == labels[i] and j != i]
        other = [j for j in range(len(labels)) if labels[j] != labels[i]]
        nearest, farthest = min(dist[i, j] for j in other), max(dist[i, j] for j in same)
        hard = [j for j in same if dist[i, j] > nearest] or same
        near = [j for j in other if dist[i, j] < farthest] or other
        positives.append(hard[int(u[k] * len(hard))])
        negatives.append(near[int(v[k] * len(near))])
    return torch.tensor(anchors), torch.tensor(positives), torch.tensor(negatives)


class Pairs:
    """Batches of pairs: two images of one class, then two of another, and so on."""

    def __init__(self, images: Tensor, labels: Tensor, size: int, channels: int, seed: int = 0) -> None:
        self.images, self.labels, self.size, self.channels = images, labels, size, channels
        self.members = {int(c): (labels == c).nonzero().squeeze(1) for c in labels.unique()}
        self.generator = torch.Generator().manual_seed(seed)

    def draw(self, pairs: int) -> tuple[Tensor, Tensor]:
        """Give 2·pairs images and labels."""
        index = []
        for i in torch.randperm(len(self.labels), generator=self.generator)[:pairs].tolist():
            mates = self.members[int(self.labels[i])]
            mates = mates[mates != i]
            index += [i, int(mates[torch.randint(len(mates), (1,), generator=self.generator)])]
        images = self.images[index].float() / 255
        if images.shape[-1] != self.size:
            images = F.interpolate(images, size=(self.size, self.size), mode="bilinear").clamp(0, 1)
        return images.expand(-1, self.channels, -1, -1).contiguous(), self.labels[index]


def load(root: Path) -> tuple[str, Tensor, Tensor]:
    """Give name, images and labels of Fashion-MNIST's training set, or of the digits if it is not there."""
    try:
        pixels = gzip.decompress((root / "train-images-idx3-ubyte.gz").read_bytes())[16:]
        labels = gzip.decompress((root / "train-labels-idx1-ubyte.gz").read_bytes())[8:]
    except FileNotFoundError:
        digits = load_digits()
        images = torch.tensor(digits.images[:, None] * (255 / 16), dtype=torch.uint8)
        return f"scikit-learn's digits (no Fashion-MNIST in {root})", images, torch.tensor(digits.target)
    images = torch.frombuffer(bytearray(pixels), dtype=torch.uint8).view(-1, 1, 28, 28)
    return "Fashion-MNIST", images, torch.frombuffer(bytearray(labels), dtype=torch.uint8).long()


class Passes(nn.Module):
    """A network that notes each batch it computes: how large, with gradients of parameters, of the input."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.noted: list[tuple[int, bool, bool]] = []

    def forward(self, x: Tensor) -> Tensor:
        """Note the batch and compute it."""
        learns = torch.is_grad_enabled() and any(q.requires_grad for q in self.model.parameters())
        self.noted.append((len(x), learns, x.requires_grad))
        z: Tensor = self.model(x)
        return z


def bare(model: nn.Module, images: Tensor, noted: list[tuple[int, bool, bool]]) -> Callable[[], None]:
    """Make a program that does the noted passes and nothing else."""
    batches = [images[torch.arange(size) % len(images)] for size, _, _ in noted]

    def run() -> None:
        for x, (_, learns, moves) in zip(batches, noted, strict=True):
            for q in model.parameters():
                q.requires_grad_(learns)
            model.train(learns)
            with torch.set_grad_enabled(learns or moves):
                leaf = x.clone().requires_grad_(moves)
                z = model(leaf.view_as(leaf))
            if learns:
                z.backward(torch.ones_like(z))
            elif moves:
                torch.autograd.grad(z, leaf, torch.ones_like(z))

    return run


def flops(program: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Count the floating-point operations of a program; give its result too."""
    with FlopCounterMode(display=False) as counter:
        result = program()
    return int(counter.get_total_flops()), result


def seconds(program: Callable[[], object]) -> float:
    """Time a program once."""
    begin = time.perf_counter()
    program()
    return time.perf_counter() - begin


def compare(
    title: str, model: nn.Module, defense: HardnessManipulation, data: Pairs, pairs: int, rounds: int
) -> None:
    """Measure steps of a training under way on fresh batches and print the ratios."""
    ours_flops, text_flops, gap = 0, 0, 0.0
    perturbed: list[float] = []
    ours_time: list[float] = []
    bare_time: list[float] = []
    speed: list[float] = []

    def ours() -> Tensor:
        step = defense(watched, images, labels)
        perturbed.append(step.logs["perturbed"])
        step.loss.backward()
        loss: Tensor = step.loss.detach()
        return loss

    def textbook() -> Tensor:
        loss = textbook_step(model, images, labels, twin)
        loss.backward()
        return loss.detach()

    for _ in range(rounds):
        images, labels = data.draw(pairs)
        watched, start = Passes(model), copy.deepcopy(defense.state_dict())
        twin = copy.deepcopy(defense)
        ours_count, ours_loss = flops(ours)
        text_count, text_loss = flops(textbook)
        ours_flops, text_flops = ours_flops + ours_count, text_flops + text_count
        gap = max(gap, abs(float(ours_loss - text_loss)))
        program = bare(copy.deepcopy(model), images, list(watched.noted))
        after = copy.deepcopy(defense.state_dict())
        for _ in range(3):
            defense.load_state_dict(start)
            ours_time.append(seconds(ours))
            bare_time.append(seconds(program))
        twin.load_state_dict(start)
        speed.append(seconds(textbook) / statistics.median(ours_time[-3:]))
        defense.load_state_dict(after)
        model.zero_grad()
    over = statistics.median(o / b for o, b in zip(ours_time, bare_time, strict=True))
    print(
        f"{title:<30} η={defense.budget.steps:<3} FLOPs {ours_flops / text_flops:5.3f} of the textbook's   "
        f"wall {statistics.median(speed):5.2f}x as fast   {100 * (over - 1):+5.1f} % over the bare passes   "
        f"{100 * statistics.mean(perturbed):3.0f} % of triplets perturbed   losses agree to {gap:.1e}",
        flush=True,
    )


def train(model: nn.Module, defense: rm.Defense, data: Pairs, pairs: int) -> None:
    """Train for 50 steps, so that the triplets are those of a training under way."""
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    for _ in range(50):
        loss = defense(model, *data.draw(pairs)).loss
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()


def manipulation(eps: float, alpha: float, steps: int) -> HardnessManipulation:
    """Make the defense that is measured."""
    defense = rm.defense("HM[S,LGA]&ICS", eps=eps, alpha=alpha, steps=steps)
    assert isinstance(defense, HardnessManipulation)
    return defense


def main() -> None:
    """Print a line for each network and each number of steps."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--root", type=Path, default=Path("/usr/share/datasets/fashion-mnist"))
    parser.add_argument("--only", choices=["c2f2", "resnet18"])
    arguments = parser.parse_args()
    name, images, labels = load(arguments.root)
    print(f"HM[S,LGA]&ICS after 50 training steps on {name}", flush=True)
    for steps in () if arguments.only == "resnet18" else (8, 32):
        torch.manual_seed(0)
        data, model = Pairs(images, labels, 28, 1), rm.model("c2f2")
        defense = manipulation(77 / 255, 3 / 255, steps)
        train(model, defense, data, 56)
        compare("C2F2 28×28, 56 triplets", model, defense, data, 56, rounds=10 if steps == 8 else 5)
    for steps in () if arguments.only == "c2f2" else (8, 32):
        torch.manual_seed(0)
        # Trained without a defense, for time's sake. BatchNorm learns its statistics here and is frozen
        # from then on, as in the recipe that starts from ImageNet's.
        learnt, model = rm.model("resnet18"), rm.model("resnet18", freeze_bn=True)
        data = Pairs(images, labels, 224, 3)
        train(learnt, rm.defense("N/A[S]"), data, 8)
        model.load_state_dict(learnt.state_dict())
        # With so few steps behind it the loss is high and LGA asks for nothing: hold it at its hardest, 0.
        defense = manipulation(8 / 255, 1 / 255, steps)
        defense.destination.update(torch.tensor(0.0))
        defense.eval()
        compare("ResNet-18 224×224, 8 triplets", model, defense, data, 8, rounds=3 if steps == 8 else 1)


if __name__ == "__main__":
    main()
