"""Make the evidence: train and evaluate what is missing, one after the other, and keep the records.

    python -m benchmarks.evidence.make --root fashion-mnist=DIR --root mnist=DIR

Ctrl-C stops it, and the same command goes on from there.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from benchmarks.evidence.plan import KINDS, RESULTS, SAMPLERS, Kind, Network, Samplers, tasks
from robustmetric.evaluation import load_record
from robustmetric.hub import publish
from robustmetric.training import load_run
from robustmetric.training.folder import RunFolder
from robustmetric.training.recipe import dump_recipe

LICENCE = "apache-2.0"


class DifferentWeightsError(RuntimeError):
    """A training came out differently than before."""


def run(arguments: Sequence[str]) -> None:
    """Run a command of the package in a process of its own."""
    print("robustmetric", *arguments, flush=True)
    subprocess.run([sys.executable, "-m", "robustmetric", *arguments], check=True)  # noqa: S603


def evaluated(network: Network, kind: Kind, root: str, work: Path) -> None:
    """Make a record of a network, and keep it; a network that is kept is evaluated as it is kept."""
    if network.record(kind).is_file():
        return
    place, source, made = (
        RESULTS / network.name,
        work / network.name,
        work / network.name / f"evaluation-{kind}",
    )
    if not (network.kept and RunFolder(place).exists):
        run([*network.train(root, str(source)), "--resume"])
    if network.kept:
        if not RunFolder(place).exists:
            publish(source, place, weights="last", half=True, licence=LICENCE)
        run(network.evaluate(kind, root, str(place), str(made)))
        publish(place, place, records=[made], force=True)
        return
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


def main() -> None:
    """Make everything of the data sets whose roots are given."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--root", action="append", required=True, metavar="DATA=DIR")
    parser.add_argument("--work", type=Path, default=Path("runs/evidence"), help="folder of the trainings")
    given = parser.parse_args()
    roots: dict[str, str] = dict(text.split("=", 1) for text in given.root)
    jobs = [(network.data, partial(evaluated, network, kind, work=given.work)) for network, kind in tasks()]
    jobs += [(one.data, partial(measured, one, work=given.work)) for one in SAMPLERS]
    failed = []
    for data, make in jobs:
        try:
            if data in roots:
                make(root=roots[data])
        except subprocess.CalledProcessError as error:
            if error.returncode in (130, 143):  # it was stopped
                sys.exit(error.returncode)
            failed.append(" ".join(error.cmd[2:]))
        except DifferentWeightsError as error:
            failed.append(str(error))
    if failed:
        sys.exit(f"failed: {'; '.join(failed)}")


if __name__ == "__main__":
    main()
