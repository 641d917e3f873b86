"""Certify networks."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from robustmetric.cli import options
from robustmetric.cli.app import app
from robustmetric.cli.progress import Progress
from robustmetric.cli.request import Request, Tested, takes
from robustmetric.cli.show import interval, show_weights
from robustmetric.cli.terminal import Terminal
from robustmetric.errors import UserError
from robustmetric.evaluation import Certificate, Certification, CertifyPlan
from robustmetric.evaluation.certificate import FORMAT
from robustmetric.evaluation.intervals import Score
from robustmetric.evaluation.job import open_folder
from robustmetric.report.records import data_of


@app.command()
@takes(
    CertifyPlan,
    *("sigma", "radii", "queries", "samples", "choose", "gallery_samples", "alpha", "attack_samples"),
    *("steps", "search", "seed", "batch"),
    alpha=options.SETTINGS["failure_probability"],
)
def certify(
    tested: Tested,
    settings: dict[str, Any],
    *,
    skip_attack: options.SkipAttack = False,
    out: Annotated[Path | None, options.out("Folder of the certificate; RUN/certificate by default.")] = None,
) -> None:
    """Certify R@1 of a network that is smoothed by noise, and attack it.

    The truth is between the two. The same command resumes what was stopped.
    """
    if "sigma" not in settings:
        raise UserError("give the standard deviation of the noise, such as 0.25", parameter="sigma")
    plan = CertifyPlan.make(**settings, attack=not skip_attack)
    request = Request.of(tested, {})
    out = tested.folder(out, "certificate")
    finished, console = open_folder(FORMAT, out, plan), Terminal()
    with Progress(console) as progress:
        networks = request.networks(tried=finished, gradient=plan.attack)
        subject = request.subject(networks, request.images(progress))
        certificate = Certification(subject, plan, out, progress, progress.say).run()
    show_certificate(console, certificate)
    console.say(f"the certificate is in {out}")


def show_certificate(console: Terminal, certificate: Certificate) -> None:
    """Print what was certified, a row for each radius, and what that says."""
    settings, count = certificate.settings, certificate.queries
    heads, rows = ["radius (L2)", "certified R@1", "95 %"], []
    if settings.attack:
        heads += ["attacked R@1", "95 % ", "at most"]
    for bound in certificate.bounds:
        cells = [f"{bound.radius:g}", _value(bound.certified), interval(bound.certified)]
        if bound.attacked is not None and bound.upper is not None:
            cells += [_value(bound.attacked), interval(bound.attacked), _value(bound.upper)]
        rows.append(cells)
    console.table(heads, rows)
    console.say(
        f"{certificate.network.name}: R@1 of the smoothed network {_value(certificate.recall)} "
        f"({interval(certificate.recall)}), abstained {_value(certificate.abstained)}, certified radius "
        f"{certificate.radius.value or 0:.3f} in the mean and {certificate.median or 0:.3f} in the median; "
        f"{count.count} of {count.of} images of {certificate.data.classes} classes; {data_of(certificate)}; "
        f"σ = {settings.sigma:g}, {settings.samples:,} samples"
    )
    for bound in certificate.bounds:
        console.say(certificate.says(bound))
    if count.left_out:
        console.say(f"{count.left_out} queries have no image of their class to find: left out")
    if (certificate.abstained.value or 0.0) > 50:
        console.say("most queries abstained: give more --samples")
    if (limit := certificate.limit or 0.0) <= max(settings.radii):
        console.say(
            f"with σ = {settings.sigma:g} and {settings.samples:,} samples no radius beyond {limit:.3g} can "
            "be certified, whatever the network: give more --samples or a larger --sigma"
        )
    show_weights(console, certificate)


def _value(score: Score) -> str:
    return "-" if score.value is None else f"{score.value:.1f}"
