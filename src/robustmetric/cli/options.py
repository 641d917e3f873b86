"""The options that commands share, each written once: of the network and the images, and of a plan."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer

from robustmetric.cli.app import FIT, OWN, TRUST
from robustmetric.data import DATA
from robustmetric.data.decode import Fit
from robustmetric.errors import UserError, fraction
from robustmetric.evaluation import Settings
from robustmetric.models import MODELS
from robustmetric.registry import split_names, unknown

ON = typer.Option("local", help="Where workers run: local, as processes here, or ray, as tasks of Ray.")
ADDRESS = typer.Option(
    None, help="The Ray cluster, HOST:PORT or auto; by default Ray is started on this machine alone."
)
RUN = typer.Argument(help="Folder of a run.")
WEIGHTS = typer.Option(None, help="Its weights: last, best or a file; by default those that evaluate takes.")
DEVICE = typer.Option("auto", help="auto, cpu, cuda or mps.")


def check_engine(on: str, address: str | None) -> None:
    """Refuse an engine that is not there, and the address of another one."""
    if on not in (engines := dict.fromkeys(("local", "ray"))):
        raise UserError(unknown("engine", on, engines), parameter="on")
    if address is not None and on != "ray":
        raise UserError(f"an address goes with --on ray, not with {on}", parameter="address")


@dataclass(frozen=True, kw_only=True)
class Tested:
    """What the command line says of a network and its images; an option of each field's name."""

    run: Annotated[Path | None, typer.Argument(help="Folder of a run; or give --model and --weights.")] = None
    data: Annotated[str | None, typer.Option(help=f"{', '.join(sorted(DATA))} {OWN}.")] = None
    root: Annotated[Path | None, typer.Option(help="Where its files are.")] = None
    split: Annotated[
        str, typer.Option(help="Which of its images: test, or all, training images included.")
    ] = "test"
    gallery: Annotated[
        Path | None, typer.Option(help="Rank these instead: a folder of classes or a CSV file.")
    ] = None
    queries_from: Annotated[
        Path | None, typer.Option(help="Query with these instead: a folder of classes or a CSV file.")
    ] = None
    model: Annotated[str | None, typer.Option(help=f"{', '.join(MODELS)}, timm:NAME {OWN}.")] = None
    weights: Annotated[
        str | None,
        typer.Option(
            help="Its weights: safetensors or a torch file; of a run, last or best. By default a run's best "
            "where validation images chose them, else its last."
        ),
    ] = None
    dim: Annotated[int | None, typer.Option(help="Length of its embeddings, of a network by name.")] = None
    size: Annotated[
        int | None, typer.Option(help="Size that images are brought to; resize and crop in one.")
    ] = None
    resize: Annotated[int | None, typer.Option(help="Size that images are brought to, before cropping.")] = (
        None
    )
    crop: Annotated[int | None, typer.Option(help="Size of the middle that is taken of them.")] = None
    fit: Annotated[Fit | None, typer.Option(help=FIT)] = None
    surrogate: Annotated[
        Path | None,
        typer.Option(help="For transfer and the suite: folder of the run that perturbations come from."),
    ] = None
    trust: Annotated[bool, typer.Option("--trust", help=TRUST)] = False
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto"
    cache: Annotated[Path | None, typer.Option(help="Where decoded images are kept.")] = None
    skip_broken: Annotated[
        bool, typer.Option("--skip-broken", help="Leave out images that cannot be read.")
    ] = False

    def __post_init__(self) -> None:
        for name, most in (("size", 4096), ("resize", 4096), ("crop", 4096), ("dim", 65_536)):
            if (getattr(self, name) or 0) > most:
                raise UserError(f"{name} must be at most {most:,}, not {getattr(self, name)}", parameter=name)


def takes(
    *settings: str, transfers: bool = False, **defaults: Any
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a command take the options of `Tested` and those of a plan that `settings` names.

    The command is called with a `Tested` and with the settings of its plan, as far as they were given, before
    its own options. Only a command that `transfers` perturbations takes a surrogate. `defaults` are those of
    settings where they differ from the plan's.
    """

    def decorate(command: Callable[..., None]) -> Callable[..., None]:
        own = list(inspect.signature(command, eval_str=True).parameters.values())[2:]
        hints = get_type_hints(Tested, include_extras=True)
        asked = [f for f in fields(Tested) if transfers or f.name != "surrogate"]
        tested = [_parameter(f.name, hints[f.name], f.default) for f in asked]
        planned = [_of_plan(name, defaults) for name in settings]

        @wraps(command)
        def call(**values: Any) -> None:
            network = Tested(**{f.name: values.pop(f.name) for f in asked})
            plan = {name: _read(name, values.pop(name)) for name in settings}
            command(network, {k: v for k, v in plan.items() if v is not None}, **values)

        parameters = [tested[0], *own, *tested[1:], *planned]
        # The places that a signature is read from.
        call.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
        call.__annotations__ = {p.name: p.annotation for p in parameters}
        return call

    return decorate


def _of_plan(name: str, defaults: Mapping[str, Any]) -> inspect.Parameter:
    """Make the option of a plan's field: its help is the field's description, its default the field's."""
    field = Settings.model_fields[name]
    alpha, attacks = (Settings.model_fields[key].default for key in ("alpha", "attacks"))
    texts = {"eps": None, "alpha": f"{255 * alpha:g}/255", "attacks": ",".join(attacks)}
    default = defaults.get(name, texts.get(name, field.default))
    kind = str if name in texts or name in ("protocol", "norm") else field.annotation
    told = str(field.description)
    if name == "queries":
        told = told.partition("; ")[0] + ("; by default all" if default is None else "")
    told += f", {OWN}." if name in ("search", "attacks", "checks") else "."
    told = told[:1].upper() + told[1:] if told[:1].isascii() else told
    annotation = Annotated[kind if default is not None else kind | None, typer.Option(help=told)]  # type: ignore[operator,valid-type]
    return _parameter(name, annotation, default)


def _parameter(name: str, annotation: Any, default: Any) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def _read(name: str, value: Any) -> Any:
    """Read a setting from its text: levels as fractions, attacks as a list."""
    if name == "attacks":
        return split_names(value)
    if name in ("eps", "alpha") and value is not None:
        level = fraction(value)
        if not isinstance(level, float):
            allowed = "[0, 1]" if name == "eps" else "(0, 1]"
            raise UserError(
                f"{name} must be a number in {allowed} such as 8/255 or 0.03, not {value!r}", parameter=name
            )
        return level
    return value
