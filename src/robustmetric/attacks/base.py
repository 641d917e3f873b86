"""What every attack on a ranking is: what a query aims at, what is minimised, what is reported."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, get_args

import torch
from torch import Tensor

from robustmetric.attacks.columns import Column
from robustmetric.attacks.draws import Draws
from robustmetric.errors import UserError, describe, shorten
from robustmetric.gallery import ByRow, Gallery, Queries, nearest
from robustmetric.labels import WHOLE
from robustmetric.registry import Contract, Registry, lookup, registry

Protocol = Literal["strict", "reference"]
"""By the definitions, or as published figures were made, where the two differ."""

Appraisal = tuple[Tensor, Tensor | None]
"""The objective (B,), and which queries (B,) surely are where the attack wants them; None if none ever is."""


@dataclass(frozen=True, eq=False)
class Target(ByRow):
    """What each query's perturbation aims at: positions `index` (B, W) in the gallery.

    `extra` (B, …) is what else an objective needs, computed once and not in each step.

    >>> Target(torch.tensor([[3], [4]]))[torch.tensor([1])].index
    tensor([[4]])
    """

    index: Tensor
    extra: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Attack(Contract, ABC):
    """An attack on a ranking, without state: what a query aims at, what is minimised, what is reported.

    A new attack is a class with a `name`, its `columns` and the methods `objective` and `measure`, and with
    `select` if it aims at images. All values are per query: B `queries` with embeddings `z` (B, D) are
    perturbed together, with `draws` of their own; each has a `target`, positions `index` (B, W) in the
    `gallery`. An evaluation calls the methods through `checked_select` and the like, which check what they
    return.

    The `protocol` strict follows the definitions; reference is what published figures were made with, where
    the two differ.

    >>> from robustmetric.sphere import pair_distance
    >>> from robustmetric.attacks import DISTANCE, choose
    >>> class Blend(Attack):
    ...     name = "blend"
    ...     columns = (Column("blend", "higher", DISTANCE),)
    ...     def select(self, queries, gallery, *, draws):
    ...         return choose(draws.uniform(1), gallery, queries.own, strict=True)
    ...     def objective(self, z, target, queries, gallery):
    ...         return pair_distance(z, (gallery.z[target.index[:, 0]] + queries.z) / 2)
    ...     def measure(self, z, target, queries, gallery):
    ...         return {"blend": self.objective(z, target, queries, gallery)}
    >>> Blend()
    Blend(protocol='strict')
    """

    protocol: Protocol = "strict"
    signatures = (
        "select(queries, gallery, *, draws)",
        "aim(index, queries, gallery)",
        "objective(z, target, queries, gallery)",
        "appraise(z, target, queries, gallery)",
        "measure(z, target, queries, gallery)",
        "start(images, *, draws)",
    )
    name: ClassVar[str]
    """The name in tables, records and on the command line."""
    columns: ClassVar[tuple[Column, ...]]
    """What `measure` returns, in order."""
    perturbs: ClassVar[str] = "query"
    """What the perturbed image is: "query", or a "candidate" that is ranked for the images it aims at."""
    read_early: ClassVar[tuple[str, ...]] = ()
    """Columns that are read one step before the last."""
    same_columns: ClassVar[tuple[str, ...]] = ()
    """Columns of other attacks that say the same of a query, by the definitions."""

    def __post_init__(self) -> None:
        lookup("protocol", self.protocol, dict.fromkeys(get_args(Protocol)))

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Return what each of B `queries` aims at: (B, W) positions in the `gallery`; by default none, W = 0.

        Random numbers come from `draws`, which has a stream for each query.
        """
        return torch.empty(len(queries), 0, dtype=torch.long, device=queries.own.device)

    def aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Return what the objective needs in each step, prepared once for B `queries`.

        They aim at the positions `index` (B, W) in the `gallery`.
        """
        return Target(index)

    @abstractmethod
    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Return (B,) values, to be minimised over the perturbed queries' embeddings `z` (B, D).

        `queries` has the benign embeddings, `target` what they aim at in the `gallery`.
        """

    def appraise(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Appraisal:
        """Return the objective (B,), and which queries (B,) surely are where the attack wants them.

        `z` (B, D) are the embeddings of the `queries` now, `target` is what they aim at in the `gallery`. In
        doubt the search continues. The second is None if no column has a `success_value`.
        """
        value = self.checked_objective(z, target, queries, gallery)
        if not self.can_win:
            return value, None
        with torch.no_grad():
            return value, self.succeeded(self.checked_measure(z, target, queries, gallery))

    @abstractmethod
    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        """Return the (B,) values of each column by name, for embeddings `z` (B, D); NaN if undefined.

        `queries` has the benign embeddings, `target` what they aim at in the `gallery`.
        """

    def start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        """Return where the search begins, with numbers from `draws`; None at the `images` (B, C, H, W)."""
        return None

    def counts(self, images: int) -> dict[str, int]:
        """Return its options that are numbers of images in a gallery of N `images`, by name."""
        return {}

    def check_fits(self, images: int) -> None:
        """Reject a gallery with too few `images`, N, to find the targets in."""
        counts, most = self.counts(images), images - 2
        if sum(counts.values()) > most:
            given = " and ".join(f"{option} is {count}" for option, count in counts.items())
            raise UserError(f"{given}, too many for a gallery of {images} images; give at most {most}")

    def attempts(self, targets: int) -> tuple[Attack, ...]:
        """Return attacks with the same aim, each with another objective: `targets` of them by class."""
        return (self,)

    def succeeded(self, values: dict[str, Tensor]) -> Tensor:
        """Return which queries (B,) are where the attack wants them, by their `values` (B,) by column."""
        ends = {c.name: c.success_value for c in self.columns if c.success_value is not None}
        return torch.stack([values[name] == end for name, end in ends.items()]).all(0)

    @property
    def can_win(self) -> bool:
        """Whether some column has a `success_value`."""
        return any(column.success_value is not None for column in self.columns)

    @property
    def drawn_as(self) -> str:
        """The name that targets are drawn by: attacks with the same name have the same targets."""
        return self.name

    @property
    def strict(self) -> bool:
        """Whether the definitions are followed to the letter."""
        return self.protocol == "strict"

    def asking(self, queries: Queries, gallery: Gallery) -> Queries:
        """Return `queries` with their places in the `gallery`: for the reference, the nearest image."""
        return queries if self.strict else replace(queries, own=nearest(queries.z, gallery, 1)[:, 0])

    # What the methods above return is checked here: one value per query, which costs next to nothing.

    def check(self) -> None:
        """Reject an attack with a name or columns that cannot be used."""
        name, columns = getattr(self, "name", None), getattr(self, "columns", None)
        listed = columns if isinstance(columns, tuple) else ()
        names = [column.name for column in listed if isinstance(column, Column)]
        for member, value, fits, wanted in (
            ("name", name, isinstance(name, str) and name, "a text"),
            ("columns", columns, 0 < len({*names}) == len(listed), "a tuple of Columns of different names"),
            ("read_early", self.read_early, {*self.read_early} <= {*names}, "names of its columns"),
            ("perturbs", self.perturbs, self.perturbs in ("query", "candidate"), "'query' or 'candidate'"),
        ):
            self._require(member, bool(fits), repr(value), f"be {wanted}")

    def checked_select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        """Call `select`."""
        index, last = self.select(queries, gallery, draws=draws), len(gallery) - 1
        wanted = f"return integers of shape ({len(queries)}, W), positions in the gallery from 0 to {last}"
        rows = isinstance(index, Tensor) and index.ndim == 2 and len(index) == len(queries)
        self._require("select", rows and index.dtype in WHOLE, index, wanted)
        outside = index[(index < 0) | (index > last)].tolist()
        self._require("select", not outside, f"positions {shorten(outside)}", wanted)
        return index

    def checked_aim(self, index: Tensor, queries: Queries, gallery: Gallery) -> Target:
        """Call `aim`."""
        target = self.aim(index, queries, gallery)
        self._require("aim", isinstance(target, Target), target, "return a Target, such as Target(index)")
        return target

    def checked_objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        """Call `objective`."""
        return self._checked_value("objective", self.objective(z, target, queries, gallery), z)

    def checked_appraise(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Appraisal:
        """Call `appraise`."""
        found = self.appraise(z, target, queries, gallery)
        pair = isinstance(found, tuple) and len(found) == 2
        self._require("appraise", pair, found, "return the values, and which queries succeeded, or None")
        value, won = found
        bools = isinstance(won, Tensor) and won.dtype == torch.bool and won.shape == (len(z),)
        wanted = f"return None next to the values, or ({len(z)},) bools if a column has a success_value"
        self._require("appraise", won is None or (bools and self.can_win), won, wanted)
        return self._checked_value("appraise", value, z), won

    def checked_measure(
        self, z: Tensor, target: Target, queries: Queries, gallery: Gallery
    ) -> dict[str, Tensor]:
        """Call `measure`; the columns come in their order."""
        found = self.measure(z, target, queries, gallery)
        names = [column.name for column in self.columns]
        wanted = f"return a dict of {', '.join(names)}, each floats of shape ({len(z)},), NaN where undefined"
        self._require("measure", isinstance(found, dict), found, wanted)
        self._require("measure", {*found} == {*names}, f"columns {', '.join(map(str, found))}", wanted)
        for name, value in found.items():
            floats = is_floats(value, (len(z),))
            self._require("measure", floats, f"{describe(value)} for {name}", wanted)
            finite = not value.isinf().any() or not z.isfinite().all()
            self._require("measure", finite, f"infinity for {name}", wanted)
        return {name: found[name] for name in names}

    def checked_start(self, images: Tensor, *, draws: Draws) -> Tensor | None:
        """Call `start` for `images` (B, C, H, W)."""
        begin = self.start(images, draws=draws)
        fits = begin is None or (is_floats(begin, images.shape) and bool(begin.isfinite().all()))
        wanted = f"return None, or finite floats of shape {tuple(images.shape)}, as the images"
        self._require("start", fits, begin, wanted)
        return begin

    def _checked_value(self, method: str, value: Tensor, z: Tensor) -> Tensor:
        wanted = f"return finite floats of shape ({len(z)},), computed from z by torch, one for each query"
        self._require(method, is_floats(value, (len(z),)), value, wanted)
        cut_off = z.requires_grad and torch.is_grad_enabled() and not value.requires_grad
        self._require(method, not cut_off, "values without a gradient", wanted)
        # A finite sum has finite terms, and is quicker to look at. Broken embeddings are the network's fault
        # and reported elsewhere.
        finite = math.isfinite(value.detach().sum()) or value.isfinite().all() or not z.isfinite().all()
        self._require(method, bool(finite), "NaN or infinity", wanted)
        return value

    def _require(self, member: str, fits: bool, got: object, wanted: str) -> None:
        """Reject what a method returned, or an attribute, unless it `fits`; text in `got` describes it."""
        if not fits:
            verb = "returned" if callable(getattr(type(self), member, None)) else "is"
            said = got if isinstance(got, str) else describe(got)
            raise UserError(f"{type(self).__name__}.{member} {verb} {said}; it must {wanted}")


ATTACKS: Registry[Attack] = registry("attack", Attack)


def is_floats(value: object, shape: tuple[int, ...]) -> bool:
    """Return whether `value` is a tensor of floats with this `shape`."""
    return isinstance(value, Tensor) and value.is_floating_point() and value.shape == shape
