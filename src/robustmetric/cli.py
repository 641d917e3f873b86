"""The command line."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.defenses.base import Network
from robustmetric.defenses.est import shift
from robustmetric.perturb import Budget, frozen
from robustmetric.retrieval import recall_at_1

app = typer.Typer(no_args_is_help=True, add_completion=False)


@app.callback()
def main() -> None:
    """Embedding networks that keep their ranking under adversarial perturbation."""


@dataclass(frozen=True)
class _Score:
    clean: float
    attacked: float


EPS = 0.2
EPOCHS = 8
PAIRS = 64
TRAINING = 1000


@app.command()
def demo(
    seed: int = typer.Option(0, help="Starts every random draw."),
) -> None:
    """Train a plain and a defended network on scikit-learn's digits, attack both, compare."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    console = Console()
    console.print(
        f"{TRAINING} digits to learn from, {len(labels) - TRAINING} others to query; "
        f"ε = {EPS:g}, pixels are in \\[0, 1]"
    )
    table = Table("defense", "R@1 on clean images", "R@1 under the ES attack")
    columns = [TextColumn("{task.description:<26}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()]
    with Progress(*columns, console=console) as progress:
        for name in ("N/A[S]", "HM[S,LGA]&ICS"):
            model = _train(name, images[:TRAINING], labels[:TRAINING], seed, progress)
            score = _score(model, images[TRAINING:], labels[TRAINING:], seed, progress)
            table.add_row(name, f"{100 * score.clean:.1f} %", f"{100 * score.attacked:.1f} %")
    console.print(table)


def _train(name: str, images: Tensor, labels: Tensor, seed: int, progress: Progress) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = rm.model("c2f2", size=8)
    defense = rm.defense(name, eps=EPS, alpha=EPS / 4, steps=8, seed=seed)
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-3)
    generator = torch.Generator().manual_seed(seed)
    task = progress.add_task(f"train {name}", total=EPOCHS * -(-len(images) // PAIRS))
    for _ in range(EPOCHS):
        for anchor in torch.randperm(len(images), generator=generator).split(PAIRS):
            # Each anchor's partner is another image of its class.
            mates = (labels[anchor, None] == labels).double()
            mates[torch.arange(len(anchor)), anchor] = 0
            partner = torch.multinomial(mates, 1, generator=generator)
            batch = torch.cat([anchor[:, None], partner], dim=1).flatten()
            loss = defense(model, images[batch], labels[batch]).loss
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            progress.advance(task)
    return model


def _score(model: nn.Module, images: Tensor, labels: Tensor, seed: int, progress: Progress) -> _Score:
    """R@1 with clean queries and with queries whose embeddings were moved as far as the budget allows."""
    generator = torch.Generator().manual_seed(seed)
    budget = Budget(eps=EPS, alpha=EPS / 10, steps=32)
    network, moved = Network(model), []
    with frozen(model), torch.no_grad():
        gallery = network(images)
        for part in progress.track(list(torch.arange(len(images)).split(256)), description="attack"):
            x = shift(network, images[part], gallery[part], budget, generator=generator)
            moved.append(network(x))
    return _Score(recall_at_1(gallery, labels), recall_at_1(gallery, labels, torch.cat(moved)))
