"""Certify networks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.table import Table

from robustmetric.cli.app import app, stoppable
from robustmetric.cli.options import Tested, takes
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request
from robustmetric.cli.terminal import wide
from robustmetric.errors import UserError, fraction
from robustmetric.evaluation import Certificate, Certification, CertifyPlan
from robustmetric.evaluation.certificate import FORMAT
from robustmetric.evaluation.intervals import Score
from robustmetric.evaluation.job import open_folder
from robustmetric.report.records import data_of
from robustmetric.training.folder import RunFolder


def _option(name: str, default: Any = ...) -> Any:
    """Make the option of a plan's field, with its description as help."""
    field = CertifyPlan.model_fields[name]
    told = str(field.description).partition("; ")[0]
    return typer.Option(
        field.default if default is ... else default,
        help=(told[:1].upper() + told[1:] if told[:1].isascii() else told) + ".",
    )


@app.command()
@takes()
def certify(
    tested: Tested,
    settings: dict[str, object],
    *,
    sigma: str | None = _option("sigma", None),
    radii: str | None = typer.Option(
        None, help="Lengths of perturbations (L2), such as 0.25,0.5,1; by default σ/4, σ/2 and σ."
    ),
    queries: int | None = typer.Option(None, help="Number of images that query; by default all."),
    samples: int = _option("samples"),
    choose: int = _option("choose"),
    gallery_samples: int = _option("gallery_samples"),
    alpha: str = _option("alpha", f"{CertifyPlan.model_fields['alpha'].default:g}"),
    attack: bool = typer.Option(True, help="Attack the queries, for the upper bounds."),
    attack_samples: int = _option("attack_samples"),
    steps: int = _option("steps"),
    search: str = _option("search"),
    seed: int = _option("seed"),
    batch: int = _option("batch"),
    out: Path | None = typer.Option(None, help="Folder of the certificate; by default RUN/certificate."),
) -> None:
    """Certify R@1 of a network that is smoothed by noise, and attack it: the truth is between.

    Ctrl-C or SIGTERM stops it; the same command resumes.
    """
    console = wide()
    if sigma is None:
        raise UserError("how much noise? give its deviation, such as 0.25", parameter="sigma")
    plan = CertifyPlan.make(
        sigma=fraction(sigma),
        radii=radii,
        queries=queries,
        samples=samples,
        choose=choose,
        gallery_samples=gallery_samples,
        alpha=fraction(alpha),
        attack=attack,
        attack_samples=attack_samples,
        steps=steps,
        search=search,
        seed=seed,
        batch=batch,
    )
    request = Request.of(tested, settings)
    if out is None:
        if tested.run is None:
            raise UserError("say where the certificate goes: give a folder", parameter="out")
        out = RunFolder(tested.run).path / "certificate"
    finished = open_folder(FORMAT, out, plan)
    with stoppable(console, "what is finished is kept: the same command resumes"), Progress(console) as watch:
        networks = request.networks(tried=finished, gradient=attack)
        images = request.images(watch)
        if request.source.weights is None:
            watch.say("no weights were given: the network is as it is made")
        certificate = Certification(request.subject(networks, images), plan, out, watch, watch.say).run()
    show_certificate(console, certificate)
    console.print(f"the certificate is in {out}")


def show_certificate(console: Console, certificate: Certificate) -> None:
    """Print what was certified, a line for each radius, and what that says."""
    settings = certificate.settings
    headings = ["radius (L2)", "certified R@1", "95 %"]
    if settings.attack:
        headings += ["attacked R@1", "95 %", "at most"]
    table = Table(*headings)
    for bound in certificate.bounds:
        cells = [f"{bound.radius:g}", _value(bound.certified), _interval(bound.certified)]
        if bound.attacked is not None and bound.upper is not None:
            cells += [_value(bound.attacked), _interval(bound.attacked), _value(bound.upper)]
        table.add_row(*cells)
    console.print(table)
    told = [
        f"{certificate.network.name}: R@1 of the smoothed network {_value(certificate.recall)} "
        f"({_interval(certificate.recall)}), abstained {_value(certificate.abstained)}, certified radius "
        f"{_value(certificate.radius, 3)} in the mean and {certificate.median or 0:.3f} in the median; "
        f"{certificate.queries.count} of {certificate.queries.of} images of {certificate.data.classes} "
        f"classes; {data_of(certificate)}; σ = {settings.sigma:g}, {settings.samples:,} samples",
        *(certificate.says(bound) for bound in certificate.bounds),
    ]
    if certificate.queries.left_out:
        told.append(f"{certificate.queries.left_out} queries have no image of their class to find: left out")
    if (certificate.abstained.value or 0.0) > 50:
        console.print("most queries abstained: give more --samples", highlight=False)
    limit = certificate.limit or 0.0
    if limit <= max(settings.radii):
        told.append(
            f"with σ = {settings.sigma:g} and {settings.samples:,} samples no radius beyond {limit:.3g} can "
            "be certified, whatever the network: more samples or a larger sigma would allow it"
        )
    for line in told:
        console.print(line, highlight=False, soft_wrap=not console.is_terminal)


def _value(score: Score, digits: int = 1) -> str:
    return "-" if score.value is None else f"{score.value:.{digits}f}"


def _interval(score: Score) -> str:
    return " to ".join("-" if v is None else f"{v:.1f}" for v in (score.low, score.high))
