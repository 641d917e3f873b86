"""Pictures of an evaluation: what its attacks did to some queries, as small images and a list of them."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import torch
from PIL import Image
from pydantic import Field, ValidationError
from torch import Tensor

from robustmetric.attacks import RankingAttack
from robustmetric.evaluation.evaluate import Evaluation
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.record import Record
from robustmetric.evaluation.scene import Scene, run_attack
from robustmetric.evaluation.schema import Number, Part
from robustmetric.evaluation.shots import Ranked, Shot, take_shots
from robustmetric.evaluation.subject import Subject
from robustmetric.files import DamagedError, digest_of_entries, write_atomically, writing
from robustmetric.validate import UserError

FOLDER, LIST = "pictures", "pictures.json"
SCHEMA: Literal["robustmetric/pictures/1"] = "robustmetric/pictures/1"
K = 5  # of a ranking
EACH = 2  # queries of an attack that are the worst, the middle, and drawn
_SIZE = 112  # of a picture, in pixels: larger images are reduced
_POINTS = 400  # of the map
_AGAIN = "then run the same command again"

Why = Literal["worst", "median", "random"]


class Item(Part):
    """An image: what it is called, its class, and the file of its picture."""

    name: str
    label: str
    image: str


class Listed(Item):
    """An image in a ranking: its distance, whether it is right, and whether it is the perturbed one."""

    distance: float
    right: bool
    itself: bool = False


class Picture(Part):
    """A query under an attack; see `robustmetric.evaluation.shots.Shot`.

    `why` says how it was chosen. `difference` is the change, `factor` times as large, around a middle grey.
    """

    attack: str
    why: Why
    number: int
    query: Item
    perturbed: str
    difference: str
    factor: float
    change: float = Field(description="the largest change of a pixel")
    targets: list[Item]
    asker: Item | None = Field(description="who queries, if the perturbed image is ranked")
    values: dict[str, tuple[Number, Number]] = Field(description="of each column, before and after")
    before: list[Listed]
    after: list[Listed]
    place: tuple[int | None, int | None]
    harm: float = Field(description="how much the attack changed for the worse, in points of 100")


class Map(Part):
    """Embeddings in the plane of their two largest principal components.

    `points` are some images of the gallery with their class's place in `classes`, `explained` the shares of
    the variance, and `moves` by attack where the pictured queries were and where they went.
    """

    points: list[tuple[float, float, int]]
    classes: list[str]
    explained: tuple[float, float]
    moves: dict[str, list[tuple[float, float, float, float]]]


class Pictures(Part):
    """All pictures of a record, whose digest is `record`."""

    schema_: Literal["robustmetric/pictures/1"] = Field(SCHEMA, alias="schema")
    record: str | None
    k: int
    pictures: list[Picture]
    map: Map
    sha256: str | None = None


def choose(
    attack: RankingAttack, arrays: Mapping[str, Tensor], *, seed: int, each: int = EACH
) -> dict[int, tuple[Why, float]]:
    """Return which queries of an `attack` to show, by their number: why, and how much harm was done to them.

    `arrays` are the per-query arrays of a record. `each` of them were changed the most for the worse, as many
    are in the middle of that order, and as many are drawn of the others from the `seed`.

    >>> import robustmetric as rm
    >>> values = {"before": torch.full((9,), 100.0), "after": torch.tensor([0.0, 50.0] + [100.0] * 7)}
    >>> arrays = {f"GTM/{when}/GTM": value for when, value in values.items()} | {"number": torch.arange(9)}
    >>> arrays |= {f"GTM/objective/{when}": torch.zeros(9) for when in ("first", "last")}
    >>> choose(rm.attack("GTM"), arrays, seed=0, each=1)
    {0: ('worst', 100.0), 4: ('median', 0.0), 6: ('random', 0.0)}
    """
    numbers = arrays["number"]
    harm = torch.zeros(len(numbers), dtype=torch.float64)
    for column in attack.columns:
        before, after = (
            arrays[f"{attack.name}/{when}/{column.name}"].double() for when in ("before", "after")
        )
        if column.better is not None:
            worse = before - after if column.better == "higher" else after - before
            harm += column.unit.points * worse
    falls = arrays[f"{attack.name}/objective/first"] - arrays[f"{attack.name}/objective/last"]
    known = (~harm.isnan()).nonzero()[:, 0].tolist()
    order = sorted(known, key=lambda row: (-float(harm[row]), -float(falls[row]), row))
    chosen: dict[int, Why] = dict.fromkeys(order[:each], "worst")
    begin = max(each, (len(order) - each) // 2)
    chosen |= dict.fromkeys(order[begin : begin + each], "median")
    rest = [row for row in order if row not in chosen]
    drawn = torch.randperm(len(rest), generator=torch.Generator().manual_seed(seed))[:each].tolist()
    chosen |= dict.fromkeys((rest[place] for place in drawn), "random")
    return {int(numbers[row]): (why, float(harm[row])) for row, why in chosen.items()}


def make_pictures(
    evaluation: Evaluation,
    record: Record,
    arrays: Mapping[str, Tensor],
    out: Path,
    progress: Callable[[str, float, int], None] | None = None,
) -> Pictures:
    """Attack some queries of a finished evaluation again, and write pictures of them into `out`/pictures.

    `record` and `arrays` are what it found, `evaluation` is the same one, made without a folder. The draws
    of an attack depend on the query alone, so that it does what it did. `progress` is told the stage, how
    many of its attacks are done, and how many there are.
    """
    plan, subject = evaluation.plan, evaluation.subject
    folder = out / FOLDER
    with writing(folder, _AGAIN):
        folder.mkdir(parents=True, exist_ok=True)
        for old in folder.iterdir():
            old.unlink()
    shown: list[Picture] = []
    moves: dict[str, list[tuple[Tensor, Tensor]]] = {}
    with subject.frozen():
        evaluation.embed()
        scene, materials = evaluation.materials.scene, evaluation.materials
        album = _Album(folder, scene, subject)
        for place, goal in enumerate(plan.goals):
            if progress is not None:
                progress("pictures", place, len(plan.goals))
            chosen = choose(goal, arrays, seed=plan.seed)
            if not chosen:
                continue
            numbers = torch.tensor(sorted(chosen))
            outcome = run_attack(
                scene,
                goal,
                numbers,
                plan.budget,
                materials.search,
                seed=plan.seed,
                surrogate=materials.surrogate,
            )
            origin = scene.queries.z[numbers.to(scene.device)]
            moves[goal.name] = list(zip(origin.cpu(), outcome.z.cpu(), strict=True))
            for shot in take_shots(scene, goal, numbers, outcome, K):
                shown.append(album.paste(shot, place, *chosen[shot.number]))
    order: tuple[Why, ...] = ("worst", "median", "random")
    shown.sort(key=lambda p: plan.attacks.index(p.attack) if p.attack in plan.attacks else 0)
    shown.sort(key=lambda p: order.index(p.why))
    found = Pictures(
        schema=SCHEMA, record=record.sha256, k=K, pictures=shown, map=_map(scene, subject, moves, plan.seed)
    )
    entries = found.model_dump(mode="json", by_alias=True)
    found = found.model_copy(update={"sha256": digest_of_entries(entries)})
    text = json.dumps(found.model_dump(mode="json", by_alias=True), indent=1, ensure_ascii=False) + "\n"
    with writing(folder / LIST, _AGAIN):
        write_atomically(folder / LIST, lambda file: file.write(text.encode()))
    if progress is not None:
        progress("pictures", len(plan.goals), len(plan.goals))
    return found


def load_pictures(folder: Path, record: Record) -> Pictures:
    """Read the list of pictures in the `folder` of a `record`; those of another one are refused.

    >>> load_pictures(Path("nowhere"), None)
    Traceback (most recent call last):
    ...
    FileNotFoundError: there are no pictures in nowhere
    """
    file = folder / FOLDER / LIST
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        found = Pictures(**content)
    except FileNotFoundError:
        raise FileNotFoundError(f"there are no pictures in {folder}") from None
    except (OSError, ValueError, TypeError, RecursionError) as error:
        told = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise UserError(f"{file} is no list of pictures: {told}") from None
    if found.sha256 != digest_of_entries(content):
        raise DamagedError(f"{file} is damaged, or was changed by hand: its digest does not match")
    if found.record != record.sha256:
        raise UserError(f"{file} is of another record")
    return found


class _Album:
    """Writes the pictures of shots into a folder, each image once."""

    def __init__(self, folder: Path, scene: Scene, subject: Subject) -> None:
        self.folder, self.subject, self.labels = folder, subject, scene.gallery.labels.cpu()
        self.ranked: Images = scene.images if scene.ranked is None else scene.ranked
        self.apart = scene.ranked is not None

    def paste(self, shot: Shot, place: int, why: Why, harm: float) -> Picture:
        """Write the pictures of a shot of the `place`-th attack."""
        stem = f"attack-{place:02d}-{shot.number:06d}"
        factor = nice_factor(shot.change)
        query_file = f"{'query' if self.apart else 'image'}-{shot.number:06d}"
        query = Item(
            name=self.subject.origin.called(shot.number),
            label=self._class(int(self.subject.labels[shot.number])),
            image=self._keep(query_file, shot.image),
        )
        perturbed = self._keep(f"{stem}-perturbed", shot.perturbed)

        def listed(ranked: Ranked) -> Listed:
            item = (
                query.model_copy(update={"image": perturbed})
                if ranked.itself
                else self._item(ranked.position)
            )
            return Listed(
                **item.model_dump(), distance=ranked.distance, right=ranked.right, itself=ranked.itself
            )

        before = [listed(ranked) for ranked in shot.before]
        # Before the attack it is there as it was.
        before = [
            entry.model_copy(update={"image": query.image}) if entry.itself else entry for entry in before
        ]
        return Picture(
            attack=shot.attack,
            why=why,
            number=shot.number,
            query=query,
            perturbed=perturbed,
            difference=self._keep(f"{stem}-difference", amplified(shot.image, shot.perturbed, factor)),
            factor=factor,
            change=shot.change,
            targets=[self._item(position) for position in shot.targets[:K]],
            asker=None if shot.asker is None else self._item(shot.asker),
            values=dict(shot.values),
            before=before,
            after=[listed(ranked) for ranked in shot.after],
            place=shot.place,
            harm=harm,
        )

    def _item(self, position: int) -> Item:
        image = self.ranked[torch.tensor([position])][0]
        return Item(
            name=self.subject.origin.called(position, gallery=self.apart),
            label=self._class(int(self.labels[position])),
            image=self._keep(f"{'gallery' if self.apart else 'image'}-{position:06d}", image),
        )

    def _class(self, label: int) -> str:
        return str(label) if self.subject.classes is None else self.subject.classes[label]

    def _keep(self, stem: str, image: Tensor) -> str:
        """Write an image (C, H, W) in [0, 1] unless it is there; return the name of its file."""
        small = max(image.shape[1:]) <= _SIZE
        path = self.folder / f"{stem}.{'png' if small else 'webp'}"
        if not path.exists():
            content = encoded(image)
            with writing(path, _AGAIN):
                write_atomically(path, lambda file: file.write(content))
        return path.name


def encoded(image: Tensor) -> bytes:
    """Return an `image` (C, H, W) in [0, 1] as a PNG, or as a reduced WebP where it is large.

    >>> encoded(torch.zeros(1, 8, 8))[1:4], encoded(torch.zeros(3, 224, 224))[8:12]
    (b'PNG', b'WEBP')
    """
    pixels = (image.clamp(0, 1) * 255).round().to(torch.uint8).permute(1, 2, 0).cpu().numpy()
    picture = Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels)
    buffer = io.BytesIO()
    if max(picture.size) <= _SIZE:
        picture.save(buffer, "PNG", optimize=True)
    else:
        picture.thumbnail((_SIZE, _SIZE))
        picture.save(buffer, "WEBP", quality=82, method=6)
    return buffer.getvalue()


def nice_factor(change: float) -> float:
    """Return the largest of 1, 2, 5, 10, … by which a `change` of pixels grows to at most 1/2.

    >>> nice_factor(8 / 255), nice_factor(77 / 255), nice_factor(0.0)
    (10.0, 1.0, 1.0)
    """
    if not 0 < change <= 0.5:
        return 1.0
    steps = [float(f"{digit}e{power}") for power in range(7) for digit in (1, 2, 5)]
    return max(step for step in steps if step * change <= 0.5)


def amplified(image: Tensor, perturbed: Tensor, factor: float) -> Tensor:
    """Return the change from `image` to `perturbed` (C, H, W), `factor` times as large, around 1/2.

    >>> amplified(torch.zeros(1, 1, 2), torch.tensor([[[0.0, 0.01]]]), 20)
    tensor([[[0.5000, 0.7000]]])
    """
    return (0.5 + factor * (perturbed - image)).clamp(0, 1)


def _map(
    scene: Scene, subject: Subject, moves: Mapping[str, Sequence[tuple[Tensor, Tensor]]], seed: int
) -> Map:
    """Project a sample of the gallery, and where the queries went, on the two largest components."""
    z, labels = scene.gallery.z.cpu().double(), scene.gallery.labels.cpu()
    drawn = torch.randperm(len(z), generator=torch.Generator().manual_seed(seed))[:_POINTS].sort().values
    centre = z[drawn].mean(0)
    _, spread, axes = torch.linalg.svd(z[drawn] - centre, full_matrices=False)
    axes = axes[:2]
    # The sign of a component is arbitrary: its largest entry is positive.
    axes = axes * axes.gather(1, axes.abs().argmax(1, keepdim=True)).sign()
    if len(axes) < 2:
        axes = torch.cat([axes, torch.zeros(2 - len(axes), axes.shape[1], dtype=axes.dtype)])

    def flat(point: Tensor) -> tuple[float, float]:
        x, y = ((point.double() - centre) @ axes.T).tolist()
        return round(x, 4), round(y, 4)

    shares = [*(spread.square() / spread.square().sum().clamp_min(1e-30)).tolist(), 0.0, 0.0]
    present = labels[drawn].unique().tolist()
    place = {label: k for k, label in enumerate(present)}
    return Map(
        points=[(*flat(z[row]), place[int(labels[row])]) for row in drawn.tolist()],
        classes=[str(n) if subject.classes is None else subject.classes[n] for n in present],
        explained=(round(shares[0], 4), round(shares[1], 4)),
        moves={name: [(*flat(a), *flat(b)) for a, b in some] for name, some in moves.items()},
    )
