"""What attacks and searches of anybody's must return: a breach names the method and what was expected.

Evaluations ask attacks and searches through these functions. They look at a value for each query, and at a
search's images once: that costs next to nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from robustmetric.attacks.base import RankingAttack, Target
from robustmetric.attacks.columns import Column
from robustmetric.attacks.draws import Draws
from robustmetric.attacks.gallery import Gallery, Queries
from robustmetric.attacks.search import Search
from robustmetric.perturb import Budget, Objective
from robustmetric.validate import UserError, check_signature


def checked_columns(attack: RankingAttack) -> tuple[Column, ...]:
    """Return the columns that an `attack` declares, if they are columns and their names differ.

    What else it says of itself is checked as well.

    >>> from robustmetric.attacks import TargetedMismatch
    >>> [column.name for column in checked_columns(TargetedMismatch())]
    ['TMA']
    """
    columns, wanted = attack.columns, "a tuple of Column, at least one, each of another name"
    if not isinstance(columns, tuple) or not columns or not all(isinstance(c, Column) for c in columns):
        raise _breach(attack, "columns", repr(columns), wanted)
    names = [column.name for column in columns]
    if len(set(names)) < len(names):
        raise _breach(attack, "columns", f"the names {', '.join(names)}", wanted)
    if unknown := [name for name in attack.read_early if name not in names]:
        raise _breach(attack, "read_early", repr(unknown[0]), f"names of its columns: {', '.join(names)}")
    if attack.perturbs not in (sides := ("query", "candidate")):
        raise _breach(attack, "perturbs", repr(attack.perturbs), " or ".join(map(repr, sides)))
    return columns


def checked_signatures(part: RankingAttack | Search) -> None:
    """Refuse an attack or a search, `part`, with a method that cannot be called as it will be.

    >>> from robustmetric.attacks import PGD
    >>> checked_signatures(PGD())
    """
    written = _ATTACK if isinstance(part, RankingAttack) else _SEARCH
    for method, parameters in written.items():
        check_signature(f"{type(part).__name__}.{method}", getattr(part, method), parameters)
    if not isinstance(part.name, str) or not part.name:
        raise _breach(part, "name", repr(part.name), "a text")


_ATTACK = {
    "select": "queries, gallery, *, draws",
    "aim": "index, queries, gallery",
    "objective": "z, target, queries, gallery",
    "measure": "z, target, queries, gallery",
    "start": "images, *, draws",
}
_SEARCH = {"__call__": "images, objective, budget, *, draws, start"}


def checked_select(attack: RankingAttack, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
    """Return what B `queries` aim at, (B, W) positions in the `gallery`, chosen by an `attack` with `draws`.

    >>> from robustmetric.attacks import TargetedMismatch
    >>> class Astray(TargetedMismatch):
    ...     def select(self, queries, gallery, *, draws):
    ...         return queries.own[:, None] + 4
    >>> z = torch.eye(5)
    >>> queries, gallery = Queries(z[:2], torch.arange(2), torch.arange(2)), Gallery(z, torch.arange(5))
    >>> checked_select(Astray(), queries, gallery, draws=Draws(0, "astray", [0, 1]))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: Astray.select returned positions from 4 to 5; it must return integers of shape
    (2, W), a row for each query: positions in the gallery, from 0 to 4
    """
    index = attack.select(queries, gallery, draws=draws)
    wanted = (
        f"integers of shape ({len(queries)}, W), a row for each query: positions in the gallery, from 0 to "
        f"{len(gallery) - 1}"
    )
    whole = isinstance(index, Tensor) and not index.is_floating_point() and index.dtype != torch.bool
    if not whole or index.is_complex() or index.ndim != 2 or len(index) != len(queries):
        raise _breach(attack, "select", _described(index), wanted)
    if index.numel():
        low, high = (int(end) for end in index.aminmax())
        if low < 0 or high >= len(gallery):
            raise _breach(attack, "select", f"positions from {low} to {high}", wanted)
    return index


def checked_aim(attack: RankingAttack, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
    """Return what an `attack` prepares once for `queries` that aim at `index` (B, W) in the `gallery`."""
    target = attack.aim(index, queries, gallery)
    if not isinstance(target, Target):
        raise _breach(attack, "aim", _described(target), "a Target, such as Target(index)")
    return target


def checked_objective(
    attack: RankingAttack, z: Tensor, target: Target, queries: Queries, gallery: Gallery
) -> Tensor:
    """Return an `attack`'s (B,) values to be minimised: finite, and with a gradient if `z` (B, D) has one.

    `queries` are the B queries that the embeddings are of, `target` is what they aim at in the `gallery`.
    """
    return _checked_value(attack, "objective", attack.objective(z, target, queries, gallery), z)


def checked_appraise(
    attack: RankingAttack, z: Tensor, target: Target, queries: Queries, gallery: Gallery
) -> tuple[Tensor, Tensor | None]:
    """Return an `attack`'s (B,) values as `checked_objective` does, and which queries (B,) are lost to it.

    `queries` are the B queries that the embeddings `z` (B, D) are of, `target` is what they aim at in the
    `gallery`. None in place of the second says that the attack always wants more.
    """
    if type(attack).appraise is RankingAttack.appraise:  # most attacks write their objective alone
        value = checked_objective(attack, z, target, queries, gallery)
        with torch.no_grad():
            values = checked_measure(attack, z, target, queries, gallery) if attack.can_win else None
        return value, None if values is None else attack.lost(values)
    found = attack.appraise(z, target, queries, gallery)
    if not isinstance(found, tuple) or len(found) != 2:
        raise _breach(attack, "appraise", _described(found), "the values, and which queries are lost")
    value, won = found
    value = _checked_value(attack, "appraise", value, z)
    wanted = f"beside the values None, or bools of shape ({len(z)},)"
    if won is not None and not (
        isinstance(won, Tensor) and won.dtype == torch.bool and won.shape == (len(z),)
    ):
        raise _breach(attack, "appraise", _described(won), wanted)
    if won is not None and not attack.can_win:
        raise _breach(attack, "appraise", "which queries are lost", "None there, or give a column a lost")
    return value, won


def _checked_value(attack: RankingAttack, method: str, value: Tensor, z: Tensor) -> Tensor:
    wanted = f"finite floats of shape ({len(z)},), a value for each query"
    if not _floats(value, (len(z),)):
        raise _breach(attack, method, _described(value), wanted)
    if z.requires_grad and torch.is_grad_enabled() and not value.requires_grad:
        raise _breach(
            attack, method, "values without a gradient", f"{wanted}, computed from z by torch alone"
        )
    # A finite sum has finite terms, and is quicker to look at. Embeddings that are no numbers are the
    # network's fault, and told elsewhere.
    if not math.isfinite(value.detach().sum()) and not value.isfinite().all() and z.isfinite().all():
        raise _breach(attack, method, "NaN or infinity", wanted)
    return value


def checked_measure(
    attack: RankingAttack, z: Tensor, target: Target, queries: Queries, gallery: Gallery
) -> dict[str, Tensor]:
    """Return the (B,) values of each column that an `attack` declares, in that order; NaN where is none.

    `z` (B, D) are the embeddings of the B `queries` now, `target` is what they aim at in the `gallery`.
    """
    found = attack.measure(z, target, queries, gallery)
    names = [column.name for column in attack.columns]
    wanted = f"a dict of its columns, {', '.join(names)}, each with floats of shape ({len(z)},)"
    if not isinstance(found, dict):
        raise _breach(attack, "measure", _described(found), wanted)
    if {*found} != {*names}:
        got = f"the names {', '.join(map(str, found)) or 'of nothing'}"
        raise _breach(attack, "measure", got, f"{wanted}; declare in columns what it reports")
    for name in names:
        if not _floats(found[name], (len(z),)):
            raise _breach(attack, "measure", f"{_described(found[name])} for {name}", wanted)
        if found[name].isinf().any() and z.isfinite().all():
            raise _breach(attack, "measure", f"infinity for {name}", f"{wanted}, NaN where there is none")
    return {name: found[name] for name in names}


def checked_start(attack: RankingAttack, images: Tensor, *, draws: Draws) -> Tensor | None:
    """Return where the search of an `attack` on `images` (B, C, H, W) begins, drawn with `draws`.

    None is at the images themselves.
    """
    begin = attack.start(images, draws=draws)
    if begin is not None and not _like(begin, images):
        wanted = f"None, or finite floats of shape {tuple(images.shape)}, as the images"
        raise _breach(attack, "start", _described(begin), wanted)
    return begin


def checked_search(
    search: Search,
    images: Tensor,
    objective: Objective,
    budget: Budget,
    *,
    draws: Draws,
    start: Tensor | None = None,
) -> Tensor:
    """Return the perturbed `images` (B, C, H, W) that a `search` finds, without a gradient.

    It minimises the `objective` within the `budget` with random numbers from `draws`, and begins at `start`
    if that is given.

    >>> from robustmetric.attacks import PGD
    >>> budget = Budget(eps=0.25, alpha=0.25, steps=1)
    >>> lower = lambda x, rows: x.sum((1, 2, 3))
    >>> checked_search(PGD(), torch.ones(1, 1, 1, 2), lower, budget, draws=Draws(0, "x", [0]))
    tensor([[[[0.7500, 0.7500]]]])
    """
    if budget.norm not in search.norms:
        raise UserError(
            f"{search.name} keeps to budgets of {' and '.join(search.norms)} alone, not of {budget.norm}: "
            "search with apgd or square",
            parameter="norm",
        )
    moved = search(images, objective, budget, draws=draws, start=start)
    if not _like(moved, images):
        wanted = f"finite floats of shape {tuple(images.shape)}, as the images"
        # What a transfer returns is what the search in its brackets found.
        inside = getattr(search, "search", None)
        raise _breach(inside if isinstance(inside, Search) else search, "__call__", _described(moved), wanted)
    return moved.detach()


def _floats(value: object, shape: tuple[int, ...]) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape


def _like(value: Tensor, images: Tensor) -> bool:
    return _floats(value, images.shape) and bool(value.isfinite().all())


def _described(value: object) -> str:
    """Describe what was returned in place of what was expected."""
    if not isinstance(value, Tensor):
        return f"a {type(value).__name__}" if value is not None else "None"
    broken = value.is_floating_point() and not value.isfinite().all()
    kind = f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    return f"{kind} with NaN or infinity" if broken else kind


def _breach(part: RankingAttack | Search, method: str, got: str, wanted: str) -> UserError:
    verb = ("is", "be") if method in ("columns", "read_early", "perturbs", "name") else ("returned", "return")
    return UserError(f"{type(part).__name__}.{method} {verb[0]} {got}; it must {verb[1]} {wanted}")
