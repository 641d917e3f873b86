"""Pictures of an evaluation in one file: what its attacks did to some queries, and a map of embeddings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Literal, get_args

import numpy as np
import torch
from pydantic import Field, FiniteFloat
from sklearn.decomposition import PCA
from torch import Tensor, nn

from robustmetric.attacks import Attack
from robustmetric.errors import UserError
from robustmetric.evaluation import Evaluation, Record, run_attack
from robustmetric.evaluation.document import FrozenModel, Sealed, read_json, write_json
from robustmetric.evaluation.job import Progress
from robustmetric.files import AGAIN
from robustmetric.report.cards import Album, Picture, Why, harm_of
from robustmetric.text import printable

PICTURES = "pictures.json"
SCHEMA: Literal["robustmetric/pictures/1"] = "robustmetric/pictures/1"
EACH = 2  # queries of an attack that are the worst, the middle, and drawn
_POINTS = 400  # of a map, at most


class Map(FrozenModel):
    """Embeddings in the plane of their two largest principal components.

    `points` are some images of the gallery with the place of their class in `classes`, `explained` the shares
    of the variance, and `moves` by attack where the pictured queries were and where they went.
    """

    points: list[tuple[FiniteFloat, FiniteFloat, int]]
    classes: list[str]
    explained: tuple[FiniteFloat, FiniteFloat]
    moves: dict[str, list[tuple[FiniteFloat, FiniteFloat, FiniteFloat, FiniteFloat]]]


class Pictures(Sealed):
    """All pictures of a record, whose digest is `record`."""

    schema_: Literal["robustmetric/pictures/1"] = Field(SCHEMA, alias="schema")
    record: str | None
    pictures: list[Picture]
    map: Map


def choose(attack: Attack, arrays: Mapping[str, Tensor], *, seed: int, each: int = EACH) -> dict[int, Why]:
    """Return which queries of an `attack` to show, by their number, and why.

    `arrays` are the per-query arrays of a record. `each` of them were changed the most for the worse, as many
    are in the middle of that order, and as many are drawn of the others from the `seed`. Among those that
    were changed alike, the objective says whom the attack moved more. A query without values is left out.

    >>> import robustmetric as rm
    >>> values = {"before": torch.full((9,), 100.0), "after": torch.tensor([0.0, 50.0] + [100.0] * 7)}
    >>> arrays = {f"GTM/{when}/GTM": value for when, value in values.items()} | {"number": torch.arange(9)}
    >>> arrays |= {f"GTM/objective/{when}": torch.zeros(9) for when in ("first", "last")}
    >>> choose(rm.attack("GTM"), arrays, seed=0, each=1)
    {0: 'worst', 4: 'median', 6: 'random'}
    """
    own = {name.removeprefix(f"{attack.name}/"): values.double() for name, values in arrays.items()}
    values = {c: (own[f"before/{c.name}"], own[f"after/{c.name}"]) for c in attack.columns}
    first, last = own["objective/first"], own["objective/last"]
    harm = torch.zeros_like(first) + harm_of(values)
    known = (~harm.isnan()).nonzero()[:, 0].tolist()
    order = sorted(known, key=lambda row: (-float(harm[row]), float(last[row] - first[row]), row))
    chosen: dict[int, Why] = dict.fromkeys(order[:each], "worst")
    begin = max(each, (len(order) - each) // 2)
    chosen |= dict.fromkeys(order[begin : begin + each], "median")
    rest = [row for row in order if row not in chosen]
    drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:each].tolist()
    chosen |= dict.fromkeys((rest[place] for place in drawn), "random")
    return {int(arrays["number"][row]): why for row, why in chosen.items()}


def make_pictures(
    evaluation: Evaluation,
    record: Record,
    arrays: Mapping[str, Tensor],
    out: Path,
    progress: Progress | None = None,
) -> Pictures:
    """Attack some queries of a finished evaluation again, and write pictures of them into the folder `out`.

    `record` and `arrays` are what it found, `evaluation` is the same one, made without a folder. The draws
    of an attack depend on the query alone, so it does the same again, but for rounding. Pictures that are
    there already stay; damaged ones are made again.
    """
    try:
        return load_pictures(out, record)
    except (OSError, UserError):
        pass
    plan, seed = evaluation.plan, evaluation.plan.threat.seed
    shown: list[Picture] = []
    moves: dict[str, tuple[Tensor, Tensor]] = {}
    with evaluation.frozen():
        evaluation.embed()
        view = evaluation.view
        album = Album(view, evaluation.subject.data)
        for place, goal in enumerate(plan.attacks):
            if progress is not None:
                progress("pictures", place, len(plan.attacks))
            if not (chosen := choose(goal, arrays, seed=seed)):
                continue
            ends = []
            for part in torch.tensor([*chosen]).split(evaluation.threat.batch):
                result = run_attack(view, goal, part, evaluation.threat, surrogate=evaluation.surrogate)
                shown += album.pictures(goal, part, result, chosen)
                ends.append(torch.stack([view.asking(part).z, result.z]))
            before, after = torch.cat(ends, dim=1)
            moves[goal.name] = before, after
    found = Pictures(
        schema=SCHEMA,
        record=record.sha256,
        pictures=sorted(shown, key=lambda picture: get_args(Why).index(picture.why)),
        map=draw_map(view.gallery.z, view.gallery.labels, evaluation.subject.data.classes, moves, seed=seed),
    ).sealed()
    write_json(out / PICTURES, found, AGAIN)
    if progress is not None:
        progress("pictures", len(plan.attacks), len(plan.attacks))
    return found


def load_pictures(folder: Path, record: Record) -> Pictures:
    """Read the pictures in the `folder` of a `record`; damaged ones, and those of another, are refused."""
    found = read_json(folder / PICTURES, Pictures, "list of pictures", SCHEMA)
    if found.record != record.sha256:
        raise UserError(f"{folder / PICTURES} is of another record")
    return found


def draw_map(
    z: Tensor,
    labels: Tensor,
    names: Sequence[str] | None,
    moves: Mapping[str, tuple[Tensor, Tensor]],
    *,
    seed: int,
) -> Map:
    """Return the map of a gallery of embeddings `z` (N, D) with `labels` (N,), at most 400 drawn by `seed`.

    `names` are those of the classes; without them they are numbers. `moves` by attack are the embeddings
    (Q, D) of queries before and after.

    >>> made = draw_map(torch.eye(3), torch.tensor([7, 7, 9]), None, {}, seed=0)
    >>> len(made.points), made.classes
    (3, ['7', '9'])
    """
    drawn = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[:_POINTS].sort().values

    def plane(z: Tensor) -> np.ndarray:
        return nn.functional.pad(z.cpu().double(), (0, max(0, 2 - z.shape[1]))).numpy()

    with np.errstate(invalid="ignore"):  # of a network that has collapsed
        axes = PCA(2, svd_solver="full").fit(plane(z[drawn.to(z.device)]))

    def flat(z: Tensor) -> list[tuple[float, float]]:
        return [(round(x, 4), round(y, 4)) for x, y in axes.transform(plane(z)).tolist()]

    present, place = labels.cpu()[drawn].unique(return_inverse=True)
    first, second = np.nan_to_num(axes.explained_variance_ratio_).round(4).tolist()
    return Map(
        points=[(x, y, k) for (x, y), k in zip(flat(z[drawn.to(z.device)]), place.tolist(), strict=True)],
        classes=[str(label) if names is None else printable(names[label]) for label in present.tolist()],
        explained=(first, second),
        moves={
            name: [(*a, *b) for a, b in zip(flat(before), flat(after), strict=True)]
            for name, (before, after) in moves.items()
        },
    )
