"""The folder of a run: whether it can be taken, and what is written there beside the weights."""

from __future__ import annotations

import json
import platform
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from robustmetric.files import is_draft, write_atomically
from robustmetric.training.recipe import Recipe, dump_recipe, load_recipe
from robustmetric.validate import UserError


def check_folder(recipe: Recipe, out: Path, resume: bool) -> None:
    """Refuse a folder that holds another run or anything else, or that cannot be written to."""
    kept = out / "recipe.yaml"
    if kept.exists():
        if not resume:
            raise UserError(f"{out} holds a run already: continue it with --resume, or give another --out")
        before = load_recipe(kept)
        differing = [
            k for k in Recipe.model_fields if k != "epochs" and getattr(before, k) != getattr(recipe, k)
        ]
        if differing:
            told = ", ".join(f"{k} was {getattr(before, k)!r}, is {getattr(recipe, k)!r}" for k in differing)
            raise UserError(
                f"{out} holds another run: {told}; resume with its own recipe or give another --out"
            )
    elif out.exists() and (not out.is_dir() or any(not is_draft(path) for path in out.iterdir())):
        raise UserError(f"{out} is not empty and holds no run: give another --out")
    check_writable(out)


def check_writable(out: Path) -> None:
    """Refuse a folder that cannot be made or written to, without making it.

    >>> check_writable(Path("/dev/null/run"))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: the folder /dev/null/run cannot be written to (Not a directory): give another ...
    """
    try:
        if out.is_symlink() and not out.exists():
            raise FileNotFoundError(None, "a link that leads nowhere")
        there = next(path for path in (out.absolute(), *out.absolute().parents) if path.exists())
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise UserError(
            f"the folder {out} cannot be written to ({error.strerror or error}): give another --out"
        ) from None


def begin(recipe: Recipe, out: Path, skipped: list[str], choice: Mapping[str, Any]) -> None:
    """Write down what is about to happen: the recipe as resolved, and `run.json`."""
    out.mkdir(parents=True, exist_ok=True)
    for rest in filter(is_draft, out.iterdir()):
        rest.unlink()
    write_atomically(out / "recipe.yaml", lambda file: file.write(dump_recipe(recipe).encode()))
    about = {"python": platform.python_version(), "platform": platform.platform()}
    for package in ("robustmetric", "torch", "lightning", "numpy", "pillow"):
        try:
            about[package] = version(package)
        except PackageNotFoundError:
            about[package] = "not installed"
    before = read_run(out)
    starts, chosen = before.get("starts"), before.get("choice")
    starts = [*(starts if isinstance(starts, list) else []), {"command": sys.argv[1:], **about}]
    choice = {**(chosen if isinstance(chosen, dict) else {}), **choice}
    _write(out, {"seed": recipe.seed, "skipped": skipped, "choice": choice, "starts": starts})


def finish(out: Path, choice: Mapping[str, Any]) -> None:
    """Add to `run.json` how the weights were chosen."""
    _write(out, {**read_run(out), "choice": dict(choice)})


def read_run(out: Path) -> dict[str, Any]:
    """Read `run.json`; one that is not there or not in order is no reason not to go on.

    >>> read_run(Path("nowhere"))
    {}
    """
    try:
        found = json.loads((out / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def chosen_on(run: Path, recipe: Recipe) -> str:
    """Say which images a run chose its best weights on: "validation images" or "test images".

    >>> chosen_on(Path("nowhere"), Recipe(validation=0))
    'test images'
    """
    found = read_run(run)
    choice = found.get("choice")
    if isinstance(choice, dict) and "images" in choice:
        return str(choice["images"])
    # A run.json without it is of a time when test images chose.
    return "validation images" if recipe.validation and not found else "test images"


def _write(out: Path, content: dict[str, Any]) -> None:
    text = json.dumps(content, indent=1)
    write_atomically(out / "run.json", lambda file: file.write(text.encode()))
