"""The options of the command line: each is declared once, with its help, for all commands that use it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from robustmetric.errors import UserError, fraction

# What is imported here must be quick to import: names from elsewhere are repeated, and a test compares them.

PANELS = NETWORK, IMAGES, ATTACK, OUTPUT, MACHINE = "Network", "Images", "Attack", "Output", "Machine"
"""The panels of the help, in its order."""


def option(panel: str, told: str, *names: str, **how: Any) -> Any:
    """Declare an option in a panel of the help, by default named as its parameter."""
    return typer.Option(*names, help=told, rich_help_panel=panel, **how)


def level(text: str) -> float:
    """Read a number such as 8/255 or 0.03.

    >>> level("51/255")
    0.2
    """
    value = fraction(text)
    if not isinstance(value, float):
        raise typer.BadParameter(f"{text!r} is no number such as 8/255 or 0.03")
    return value


def number(panel: str, told: str, *names: str, **how: Any) -> Any:
    """Declare an option that takes a number such as 8/255."""
    return option(panel, told, *names, parser=level, metavar="<number>", **how)


# The network
Run = Annotated[Path, typer.Argument(help="Run folder.")]
Model = Annotated[str | None, option(NETWORK, "c2f2, resnet18, resnet50, timm:NAME or FILE.py:NAME.")]
Weights = Annotated[str | None, option(NETWORK, "Weights file; of a run also last or best.")]
Dim = Annotated[int | None, option(NETWORK, "Embedding size of a network by name.")]
Surrogate = Annotated[Path | None, option(NETWORK, "Run folder of the network that transfer attacks use.")]
Trust = Annotated[bool, option(NETWORK, "Run the code that a run or a recipe brings along.", "--trust")]

# The images
Data = Annotated[
    str | None,
    option(
        IMAGES,
        "cars, csv, cub, digits, fashion-mnist, folder, inshop, market1501, mnist, sop or FILE.py:NAME.",
    ),
]
Root = Annotated[Path | None, option(IMAGES, "Dataset directory.")]
Split = Annotated[Literal["test", "all"], option(IMAGES, "Test images, or all.")]
Gallery = Annotated[Path | None, option(IMAGES, "Rank these images: a folder of classes or a CSV file.")]
QueriesFrom = Annotated[Path | None, option(IMAGES, "Query with these images: a folder or a CSV file.")]
Size = Annotated[int | None, option(IMAGES, "Resize images to SIZE×SIZE.")]
Resize = Annotated[int | None, option(IMAGES, "Resize images before cropping.")]
Crop = Annotated[int | None, option(IMAGES, "Crop the middle CROP×CROP.")]
Fit = Annotated[Literal["squeeze", "crop", "pad"] | None, option(IMAGES, "How an image becomes a square.")]
Cache = Annotated[Path | None, option(IMAGES, "Folder of decoded images.")]
SkipBroken = Annotated[bool, option(IMAGES, "Leave out images that cannot be read.", "--skip-broken")]

# The attack
SETTINGS: dict[str, Any] = {
    "attacks": Annotated[
        str,
        option(ATTACK, "Attacks, such as CA+,QA-(m=5),ES or FILE.py:NAME.", show_default="all of the ERS"),
    ],
    "suite": Annotated[str, option(ATTACK, "worst-case runs many strong attacks as well.")],
    "protocol": Annotated[
        Literal["strict", "reference"], option(ATTACK, "Rules of the attacks; reference is as published.")
    ],
    "eps": Annotated[
        float,
        number(ATTACK, "ε, the largest change of a pixel.", show_default="of the data"),
    ],
    "norm": Annotated[Literal["linf", "l2"], option(ATTACK, "Norm of a change; l2 is that of the image.")],
    "alpha": Annotated[float, number(ATTACK, "α, the step size.", show_default="3/255")],
    "steps": Annotated[int, option(ATTACK, "η, the number of steps.")],
    "search": Annotated[str, option(ATTACK, "pgd, apgd, nes, spsa, square, transfer or FILE.py:NAME.")],
    "queries": Annotated[int, option(ATTACK, "Number of images that are attacked.", show_default="all")],
    "seed": Annotated[int, option(ATTACK, "Random seed.")],
    "checks": Annotated[str, option(ATTACK, "Checks: none, quick or full, and others by name.")],
    "batch": Annotated[int, option(MACHINE, "Images per batch.")],
    # of certify
    "sigma": Annotated[
        float, number(ATTACK, "σ, the deviation of the noise, such as 0.25.", show_default=False)
    ],
    "radii": Annotated[str, option(ATTACK, "L2 radii, such as 0.25,0.5.", show_default="σ/4, σ/2, σ")],
    "samples": Annotated[int, option(ATTACK, "Noisy copies of a query.")],
    "choose": Annotated[int, option(ATTACK, "Noisy copies that choose its rivals.")],
    "gallery_samples": Annotated[int, option(ATTACK, "Noisy copies of each ranked image.")],
    "attack_samples": Annotated[int, option(ATTACK, "Noisy copies that an attack sees.")],
    "failure_probability": Annotated[
        float, number(ATTACK, "Failure probability per certificate.", "--failure-probability")
    ],
    # of verify
    "count": Annotated[int, option(IMAGES, "Number of pairs that are drawn, half of them same.")],
    "far": Annotated[float, number(ATTACK, "FAR that the threshold is chosen for.", show_default="0.01")],
    "threshold": Annotated[
        float, number(ATTACK, "Distance up to which a pair is same.", show_default="chosen by the FAR")
    ],
}
"""The fields of the plans of evaluate, certify, verify and attack."""
AttackName = Annotated[str, option(ATTACK, "Name of the attack, such as ES.", "--attack")]
SkipAttack = Annotated[bool, option(ATTACK, "Attack nothing.", "--skip-attack")]

# The output and the machine
Force = Annotated[bool, option(OUTPUT, "Overwrite the output file.", "--force")]
Device = Annotated[Literal["auto", "cpu", "cuda", "mps"], option(MACHINE, "Where networks run.")]
Devices = Annotated[int, option(MACHINE, "Worker processes that share the work.")]
On = Annotated[Literal["local", "ray"], option(MACHINE, "Where workers run: here or as tasks of Ray.")]
Address = Annotated[str | None, option(MACHINE, "Ray cluster, HOST:PORT or auto.", show_default="one here")]


def out(told: str, **how: Any) -> Any:
    """Declare where output goes."""
    return option(OUTPUT, told, "--out", "-o", **how)


def check_address(on: str, address: str | None) -> None:
    """Reject the address of a cluster that is not used."""
    if address is not None and on != "ray":
        raise UserError(f"an address is for --on ray, not for {on}", parameter="address")
