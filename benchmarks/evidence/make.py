"""Make the evidence: train and evaluate what is missing, one after the other, and keep the records.

    python -m benchmarks.evidence.make --root fashion-mnist=DIR --root mnist=DIR

Ctrl-C stops it, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from benchmarks.evidence.plan import KINDS, NETWORKS, RESULTS, SAMPLERS, Kind, Network, Samplers, tasks
from robustmetric.evaluation import load_record
from robustmetric.hub import publish
from robustmetric.training import load_run
from robustmetric.training.checkpoint import reached
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import dump_recipe

LICENCE = "apache-2.0"


class DifferentWeightsError(RuntimeError):
    """A training came out differently than before."""


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
        run(network.resume(str(folder.path)))
    return folder.path


def evaluated(network: Network, kind: Kind, root: str, work: Path) -> None:
    """Make a record of a network, and keep it; a network of the zoo is evaluated as it is kept."""
    if network.record(kind).is_file():
        return
    place, made = RESULTS / network.name, work / network.name / f"evaluation-{kind}"
    if network.kept:
        if not RunFolder(place).exists:
            publish(trained(network, root, work), place, weights="last", half=True, licence=LICENCE)
        run(network.evaluate(kind, root, str(place), str(made)))
        publish(place, place, records=[made], force=True)
        return
    source = trained(network, root, work)
    same(network, source)
    run(network.evaluate(kind, root, str(source), str(made)))
    keep(source, place)
    network.record(kind).parent.mkdir()
    shutil.copy(made / "record.json", network.record(kind))


def same(network: Network, source: Path) -> None:
    """Refuse weights that are not those of the records that are kept already."""
    digest = load_run(source, weights="last").digest
    for kind in KINDS:
        if network.record(kind).is_file() and load_record(network.record(kind)).network.sha256 != digest:
            raise DifferentWeightsError(
                f"the weights in {source} are not those of {network.record(kind)}: another processor, or "
                f"number of threads, rounds differently. To measure these, delete {RESULTS / network.name}"
            )


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
    jobs: list[tuple[str, Callable[[], None]]] = [
        (f"{network.name}, {kind}", partial(evaluated, network, kind, roots[network.data], given.work))
        for network, kind in tasks()
        if network.data in roots
    ]
    jobs += [(s.name, partial(measured, s, roots[s.data], given.work)) for s in SAMPLERS if s.data in roots]
    failed = []
    for name, make in jobs:
        try:
            make()
        except subprocess.CalledProcessError as error:
            if error.returncode in (130, 143):  # it was stopped
                sys.exit(error.returncode)
            failed.append(name)
        except DifferentWeightsError as error:
            failed.append(f"{name}: {error}")
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
