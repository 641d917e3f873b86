"""Pictures of an evaluation: what its attacks did to some queries, as small images and a list of them."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import torch
from PIL import Image
from pydantic import Field, FiniteFloat
from torch import Tensor

from robustmetric.attacks import Attack, Column
from robustmetric.errors import UserError
from robustmetric.evaluation.attack import NetworkView, run_attack
from robustmetric.evaluation.data import Data
from robustmetric.evaluation.document import FrozenModel, Number, Sealed, read_json, write_json
from robustmetric.evaluation.evaluate import Evaluation, search_cost
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.job import Progress
from robustmetric.evaluation.record import Record
from robustmetric.files import is_draft, write_atomically, writing
from robustmetric.locks import locked
from robustmetric.report.plane import Map, draw_map
from robustmetric.report.shots import Ranked, Shot, take_shots
from robustmetric.text import printable

FOLDER, LIST = "pictures", "pictures.json"
SCHEMA: Literal["robustmetric/pictures/1"] = "robustmetric/pictures/1"
K = 5  # of a ranking
EACH = 2  # queries of an attack that are the worst, the middle, and drawn
_SIZE = 112  # of a picture, in pixels: larger images are reduced
_AGAIN = "then run the same command again"
_NAME = r"(attack-\d{2,}-\d{6,}-(perturbed|difference)|(image|query|gallery)-\d{6,})\.(png|webp)"

Why = Literal["worst", "median", "random"]
File = Annotated[str, Field(pattern=f"^{_NAME}$")]


class Item(FrozenModel):
    """An image: what it is called, its class, and the file of its picture."""

    name: str
    label: str
    image: File


class Listed(Item):
    """An image in a ranking: its distance, whether it is right, and whether it is the perturbed one."""

    distance: FiniteFloat
    right: bool
    itself: bool = False


class Picture(FrozenModel):
    """A query under an attack; see `robustmetric.report.shots.Shot`.

    `why` says how it was chosen. `difference` is the change, `factor` times as large, around a middle grey.
    """

    attack: str
    why: Why
    number: int
    query: Item
    perturbed: File
    difference: File
    factor: FiniteFloat
    change: FiniteFloat = Field(description="the largest change of a pixel")
    targets: list[Item]
    asker: Item | None = Field(description="who queries, if the perturbed image is ranked")
    values: dict[str, tuple[Number, Number]] = Field(description="of each column, before and after")
    before: list[Listed]
    after: list[Listed]
    place: tuple[int | None, int | None]
    harm: Number = Field(description="how much the attack changed for the worse, in points of 100")


class Pictures(Sealed):
    """All pictures of a record, whose digest is `record`."""

    schema_: Literal["robustmetric/pictures/1"] = Field(SCHEMA, alias="schema")
    record: str | None
    k: int
    pictures: list[Picture]
    map: Map


def harm_of(columns: Sequence[Column], values: Mapping[str, tuple[Any, Any]]) -> Any:
    """Return how much `values`, before and after by column, changed for the worse, in points of 100.

    They are those of the `columns` of an attack, all numbers or all tensors.

    >>> import robustmetric as rm
    >>> harm_of(rm.attack("ES").columns, {"ES:D": (0.0, 0.5), "ES:R": (100.0, 0.0)})
    125.0
    """
    harm: Any = 0.0
    for column in columns:
        before, after = values[column.name]
        if column.better is not None:
            worse = before - after if column.better == "higher" else after - before
            harm = harm + column.unit.points * worse
    return harm


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

    def pair(what: str, *when: str) -> tuple[Tensor, Tensor]:
        before, after = (arrays[f"{attack.name}/{what.format(w)}"].double() for w in when)
        return before, after

    values = {c.name: pair(f"{{}}/{c.name}", "before", "after") for c in attack.columns}
    first, last = pair("objective/{}", "first", "last")
    harm = torch.zeros_like(first) + harm_of(attack.columns, values)
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
    report: Callable[[str], None] = print,
) -> Pictures:
    """Attack some queries of a finished evaluation again, and write pictures of them into `out`/pictures.

    `record` and `arrays` are what it found, `evaluation` is the same one, made without a folder. The draws
    of an attack depend on the query alone, so it does the same again, but for rounding. Pictures that are
    there are replaced; the list of them is written last. `progress` is called with the stage, how many of its
    attacks are done, and how many there are, `report` with a line about a lock that was left.
    """
    plan, folder = evaluation.plan, out / FOLDER
    shown: list[Picture] = []
    moves: dict[str, tuple[Tensor, Tensor]] = {}

    def tell(done: int) -> None:
        if progress is not None:
            progress("pictures", done, len(plan.attacks))

    tell(0)
    with locked(folder, "pictures", report), evaluation.frozen():
        with writing(folder, _AGAIN):
            _clear(folder)
        evaluation.embed()
        view = evaluation.view
        album = _Album(folder, view, evaluation.subject.data)
        for place, goal in enumerate(plan.attacks):
            chosen = choose(goal, arrays, seed=plan.threat.seed)
            if chosen:
                shots, moves[goal.name] = _attacked(evaluation, goal, torch.tensor([*chosen]))
                shown += [album.paste(shot, place, chosen[shot.number], goal.columns) for shot in shots]
            tell(place + 1)
        gallery, classes = view.gallery, album.classes
        found = Pictures(
            schema=SCHEMA,
            record=record.sha256,
            k=K,
            pictures=sorted(shown, key=lambda picture: get_args(Why).index(picture.why)),
            map=draw_map(gallery.z, gallery.labels, classes, moves, seed=plan.threat.seed),
        ).sealed()
        write_json(folder / LIST, found, _AGAIN)
    return found


def picture_costs(evaluation: Evaluation) -> list[int]:
    """Return what the pictures of each attack of an `evaluation` cost: see `Piece.cost`."""
    plan, embedded = evaluation.plan, len(evaluation.subject.data.every)
    shown = min(len(get_args(Why)) * EACH, len(evaluation.numbers))
    each = shown * (search_cost(evaluation.threat) + 1)
    return [each + (0 if place else embedded) for place in range(len(plan.attacks))]


def _clear(folder: Path) -> None:
    """Remove what is ours in a folder; the list first, for without it there are no pictures."""
    (folder / LIST).unlink(missing_ok=True)
    for path in [path for path in folder.iterdir() if is_draft(path) or re.fullmatch(_NAME, path.name)]:
        path.unlink()


def _attacked(
    evaluation: Evaluation, goal: Attack, numbers: Tensor
) -> tuple[list[Shot], tuple[Tensor, Tensor]]:
    """Attack queries of these numbers (Q,): return shots, and their embeddings (Q, D) before and after."""
    view = evaluation.view
    shots: list[Shot] = []
    ends = []
    for part in numbers.split(evaluation.threat.batch):
        outcome = run_attack(view, goal, part, evaluation.threat, surrogate=evaluation.surrogate)
        shots += take_shots(view, goal, part, outcome, K)
        ends.append(outcome.z)
    return shots, (view.queries.z[numbers.to(view.device)], torch.cat(ends))


def load_pictures(folder: Path, record: Record) -> Pictures:
    """Read the list of pictures in the `folder` of a `record`; those of another one are refused.

    >>> load_pictures(Path("nowhere"), None)
    Traceback (most recent call last):
    ...
    FileNotFoundError: there are no pictures in nowhere
    """
    file = folder / FOLDER / LIST
    if not file.is_file():
        raise FileNotFoundError(f"there are no pictures in {folder}")
    try:
        found = read_json(file, Pictures, "list of pictures", SCHEMA)
    except OSError as error:
        raise UserError(f"{file} cannot be read ({error.strerror or error})") from None
    if found.record != record.sha256:
        raise UserError(f"{file} is of another record")
    return found


class _Album:
    """Writes the pictures of shots into a folder, each image once."""

    def __init__(self, folder: Path, view: NetworkView, data: Data) -> None:
        self.folder, self.data = folder, data
        self.ranked: Images = view.images if view.ranked is None else view.ranked
        self.apart = view.ranked is not None
        self.classes = None if data.classes is None else [printable(name) for name in data.classes]

    def paste(self, shot: Shot, place: int, why: Why, columns: Sequence[Column]) -> Picture:
        """Write the pictures of a shot of the `place`-th attack, which has these `columns`."""
        stem = f"attack-{place:02d}-{shot.number:06d}"
        factor = nice_factor(shot.change)
        query = self._item(shot.number, self.data.labels, shot.image)
        perturbed = self._keep(f"{stem}-perturbed", shot.perturbed)
        difference = amplified(shot.image, shot.perturbed, factor)

        def listed(ranking: Sequence[Ranked], itself: str) -> list[Listed]:
            own = query.model_copy(update={"image": itself})
            items = [own if ranked.itself else self._candidate(ranked.position) for ranked in ranking]
            return [
                Listed(**item.model_dump(), distance=one.distance, right=one.right, itself=one.itself)
                for item, one in zip(items, ranking, strict=True)
            ]

        return Picture(
            attack=shot.attack,
            why=why,
            number=shot.number,
            query=query,
            perturbed=perturbed,
            difference=self._keep(f"{stem}-difference", difference, smooth=False),
            factor=factor,
            change=shot.change,
            targets=[self._candidate(position) for position in shot.targets[:K]],
            asker=None if shot.asker is None else self._candidate(shot.asker),
            values=dict(shot.values),
            before=listed(shot.before, query.image),
            after=listed(shot.after, perturbed),
            place=shot.place,
            harm=harm_of(columns, shot.values),
        )

    def _candidate(self, position: int) -> Item:
        image = self.ranked[torch.tensor([position])][0].detach()
        return self._item(position, self.data.ranked.labels, image, ranked=True)

    def _item(self, number: int, labels: Tensor, image: Tensor, *, ranked: bool = False) -> Item:
        """Return an image of the queries or, if `ranked`, of the gallery, which may be the same ones."""
        kind = ("gallery" if ranked else "query") if self.apart else "image"
        label = int(labels[number])
        return Item(
            name=printable(self.data.called(number, gallery=ranked and self.apart)),
            label=str(label) if self.classes is None else self.classes[label],
            image=self._keep(f"{kind}-{number:06d}", image),
        )

    def _keep(self, stem: str, image: Tensor, *, smooth: bool = True) -> str:
        """Write an image (C, H, W) in [0, 1] unless it is there; return the name of its file."""
        small = max(image.shape[1:]) <= _SIZE
        path = self.folder / f"{stem}.{'png' if small else 'webp'}"
        if not path.exists():
            content = encoded(image, smooth=smooth)
            with writing(path, _AGAIN):
                write_atomically(path, lambda file: file.write(content))
        return path.name


def encoded(image: Tensor, *, smooth: bool = True) -> bytes:
    """Return an `image` (C, H, W) in [0, 1] as a PNG, or as a reduced WebP where it is large.

    It is reduced `smooth`, or by leaving out pixels, which shows how much a noise changes single ones.

    >>> encoded(torch.zeros(1, 8, 8))[1:4], encoded(torch.zeros(3, 224, 224))[8:12]
    (b'PNG', b'WEBP')
    """
    picture, buffer = rendered(image), io.BytesIO()
    if max(picture.size) <= _SIZE:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.thumbnail((_SIZE, _SIZE), Image.Resampling.BICUBIC if smooth else Image.Resampling.NEAREST)
        picture.save(buffer, "WEBP", quality=82, method=6)
    return buffer.getvalue()


def rendered(image: Tensor) -> Image.Image:
    """Return an `image` (C, H, W) in [0, 1] as a picture of 8 bits: in colour if C is 3, else grey.

    >>> rendered(torch.ones(3, 4, 6)).mode, rendered(torch.ones(1, 4, 6)).size
    ('RGB', (6, 4))
    """
    shown = image if len(image) in (1, 3) else image.mean(0, keepdim=True)
    pixels = (shown.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    return Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)


def nice_factor(change: float) -> float:
    """Return the largest of 1, 2, 5, 10, … by which a `change` of pixels grows to at most 1/2.

    What 8 bits do not tell from 1/2 is no more than that: a change of ε is, but for rounding, one of ε.

    >>> nice_factor(8 / 255), nice_factor(77 / 255), nice_factor(0.1 + 1e-8), nice_factor(0.0)
    (10.0, 1.0, 5.0, 1.0)
    """
    if not 0 < change <= 0.5:
        return 1.0
    steps = [float(f"{digit}e{power}") for power in range(7) for digit in (1, 2, 5)]
    return max(step for step in steps if step * change <= 0.5 + 0.5 / 255)


def amplified(image: Tensor, perturbed: Tensor, factor: float) -> Tensor:
    """Return the change from `image` to `perturbed` (C, H, W), `factor` times as large, around 1/2.

    >>> amplified(torch.zeros(1, 1, 2), torch.tensor([[[0.0, 0.01]]]), 20)
    tensor([[[0.5000, 0.7000]]])
    """
    return (0.5 + factor * (perturbed - image)).clamp(0, 1)
