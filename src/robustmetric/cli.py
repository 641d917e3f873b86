"""The command line."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import torch
import typer
import yaml
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from sklearn.datasets import load_digits
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.defenses.base import Network
from robustmetric.defenses.est import shift
from robustmetric.perturb import Budget, frozen
from robustmetric.retrieval import recall_at_1
from robustmetric.training import CollapsedError, Stopped, load_recipe, recipe_names

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)


def run() -> None:
    """Run the command line; what a person can mend is said in a line, without a traceback."""
    try:
        app()
    except (ValueError, FileNotFoundError, CollapsedError) as error:
        Console(stderr=True).print(
            f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True
        )
        sys.exit(1)


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


@app.command()
def recipes() -> None:
    """List the recipes that come with the package."""
    table = Table("recipe", "network", "ε", "α", "η", "epochs", "batch", "lr")
    table.columns[0].no_wrap = True
    for name in recipe_names():
        r = load_recipe(name)
        eps, alpha = (f"{255 * v:.3g}/255" for v in (r.eps, r.alpha))
        table.add_row(name, r.model, eps, alpha, str(r.eta), str(r.epochs), str(r.batch), f"{r.lr:g}")
    Console().print(table)


@app.command()
def train(
    data: str = typer.Option(None, help="digits, mnist, fashion-mnist, cub, cars, sop, folder or csv."),
    root: Path = typer.Option(None, help="Where its files are."),
    model: str = typer.Option(None, help="c2f2, resnet18, resnet50, timm:NAME or file.py:function."),
    weights: Path = typer.Option(None, help="Weights to begin with: safetensors or a torch file."),
    defense: str = typer.Option(None, help="The paper's name for it, such as HM[S,LGA]&ICS."),
    eps: str = typer.Option(None, help="ε, the largest change of a pixel: 8/255."),
    alpha: str = typer.Option(None, help="α, the size of a step."),
    eta: int = typer.Option(None, help="η, the number of steps."),
    epochs: int = typer.Option(None, help="How often each image is an anchor."),
    batch: int = typer.Option(None, help="Images in a batch of a worker, two a pair."),
    lr: float = typer.Option(None, help="Learning rate of Adam."),
    seed: int = typer.Option(None, help="Starts every random draw."),
    precision: str = typer.Option(None, help="32-true, bf16-mixed, 16-mixed or 64-true."),
    recipe: str = typer.Option("digits", help="A recipe's name or a YAML file; the options above change it."),
    change: list[str] = typer.Option([], "--set", help="KEY=VALUE: change any other entry of the recipe."),
    out: Path = typer.Option(..., help="Folder of the run."),
    resume: bool = typer.Option(False, "--resume", help="Go on with the run in this folder."),
    cache: Path = typer.Option(None, help="Where decoded images are kept."),
    skip_broken: bool = typer.Option(False, "--skip-broken", help="Leave out images that cannot be read."),
    after_collapse: str = typer.Option("stop", help="When the network collapses: stop or continue."),
    accelerator: str = typer.Option("auto", help="auto, cpu, gpu or mps."),
    devices: int = typer.Option(1, help="Workers on a machine."),
    nodes: int = typer.Option(1, help="Machines."),
    logger: list[str] = typer.Option([], help="tensorboard, csv or wandb, beside metrics.csv."),
) -> None:
    """Train a network; Ctrl-C stops it so that --resume goes on from there."""
    given = {
        "data": data, "root": root, "model": model, "weights": weights, "defense": defense, "eps": eps,
        "alpha": alpha, "eta": eta, "epochs": epochs, "batch": batch, "lr": lr, "seed": seed,
        "precision": precision,
    }  # fmt: skip
    changes = {key: value for key, value in given.items() if value is not None}
    for pair in change:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--set takes KEY=VALUE, such as --set validate_every=5, not {pair!r}")
        changes[key] = yaml.safe_load(value)
    if after_collapse not in ("stop", "continue"):
        raise ValueError(f"--after-collapse is stop or continue, not {after_collapse!r}")
    if resume and (out / "recipe.yaml").exists() and not changes:
        made = load_recipe(out / "recipe.yaml")
    else:
        made = load_recipe(recipe, changes)
    # Lightning takes seconds to import: here, and not when the command line starts.
    from lightning.pytorch.callbacks import RichProgressBar
    from lightning.pytorch.utilities import rank_zero_only

    from robustmetric.training.run import Machines, make_logger
    from robustmetric.training.run import train as run_training

    console = Console(quiet=getattr(rank_zero_only, "rank", 0) != 0)
    try:
        run_training(
            made,
            out,
            resume=resume,
            machines=Machines(accelerator=accelerator, devices=devices, nodes=nodes),
            cache=cache,
            skip_broken=skip_broken,
            callbacks=[RichProgressBar(leave=True)] if console.is_terminal else [],
            loggers=[make_logger(name, out) for name in logger],
            progress=console.is_terminal,
            go_on_after_collapse=after_collapse == "continue",
            report=console.print,
        )
    except Stopped as stopped:
        console.print(f"stopped by {stopped}; go on with: robustmetric train --out {out} --resume")
        raise typer.Exit(130) from None
    console.print(f"done; the run is in {out}")
