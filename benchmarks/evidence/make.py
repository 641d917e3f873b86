"""Make the evidence: train and evaluate what is missing, one after the other, and keep the records.

    python -m benchmarks.evidence.make --root fashion-mnist=DIR --root mnist=DIR

Ctrl-C stops it, and the same command goes on from there. All of it takes some twelve hours on two cores.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from robustmetric.zoo.publish import publish

from benchmarks.evidence.plan import NETWORKS, RESULTS, SAMPLERS, Kind, Network, Samplers, tasks
from robustmetric.training.checkpoint import reached
from robustmetric.training.recipe import dump_recipe
from robustmetric.training.runs import RunFolder


def run(arguments: Sequence[str]) -> None:
    """Run a command of the package in a process of its own, and say how long it took."""
    print("robustmetric", *arguments, flush=True)
    begun = time.monotonic()
    subprocess.run([sys.executable, "-m", "robustmetric", *arguments], check=True)  # noqa: S603
    print(f"took {time.monotonic() - begun:,.0f} s", flush=True)


def trained(network: Network, root: str, work: Path) -> Path:
    """Train a network as far as it is not trained yet; return the folder of its run."""
    folder = RunFolder(work / network.name)
    if not folder.exists:
        run(network.train(root, str(folder.path)))
    elif not folder.last.is_file() or reached(folder.checkpoint).done < network.epochs:
        run(["train", "--out", str(folder.path), "--resume"])
    return folder.path


def evaluated(network: Network, kind: Kind, root: str, work: Path) -> None:
    """Make a record of a network, and keep it; a network of the zoo is evaluated as it is kept."""
    if network.record(kind).is_file():
        return
    place = RESULTS / network.name
    if network.kept and RunFolder(place).last.is_file():
        source = place
    else:
        source = trained(network, root, work)
        publish(source, place, weights="last", half=True) if network.kept else keep(source, place)
        source = place if network.kept else source
    made = work / network.name / f"evaluation-{kind}"
    run(network.evaluate(kind, root, str(source), str(made)))
    network.record(kind).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(made / "record.json", network.record(kind))
    if network.kept:
        publish(place, place)  # the card has the record's scores now


def keep(source: Path, place: Path) -> None:
    """Keep the recipe and the log of a training whose weights are not kept."""
    place.mkdir(parents=True, exist_ok=True)
    folder = RunFolder(source)
    shutil.copy(folder.metrics, place)
    here = folder.recipe({"root": None})  # wherever the images were
    (place / folder.recipe_file.name).write_text(dump_recipe(here), encoding="utf-8")


def measured(samplers: Samplers, root: str, work: Path) -> None:
    """Measure the samplers, and keep what came out."""
    if samplers.result.is_file() or (
        samplers.network is not None and not (RESULTS / samplers.network.name).is_dir()
    ):
        return
    run(samplers.reproduce(root, str(work / samplers.name)))
    (found,) = (work / samplers.name).glob("*/cell.json")
    samplers.result.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(found, samplers.result)


def main(arguments: Sequence[str] | None = None) -> None:
    """Make everything of the data sets whose roots are given."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", action="append", required=True, metavar="DATA=DIR")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="where trainings are")
    given = parser.parse_args(arguments)
    roots: Mapping[str, str] = dict(text.split("=", 1) for text in given.root)
    if unknown := roots.keys() - {network.data for network in NETWORKS}:
        parser.error(f"no network is trained on {', '.join(sorted(unknown))}")
    for network, kind in tasks():
        if network.data in roots:
            evaluated(network, kind, roots[network.data], given.work)
    for samplers in SAMPLERS:
        if samplers.data in roots:
            measured(samplers, roots[samplers.data], given.work)


if __name__ == "__main__":
    main()
