"""An evaluation: retrieval and robustness scores of any network on any images, resumable at any moment."""

from __future__ import annotations

import hashlib
import json
import platform
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import KW_ONLY, dataclass
from functools import cached_property, partial
from importlib.metadata import PackageNotFoundError, version
from numbers import Integral
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from robustmetric.attacks import (
    PGD,
    Gallery,
    Protocol,
    Queries,
    RankingAttack,
    Search,
    Transfer,
    attack,
    make_search,
)
from robustmetric.attacks.gallery import count_mates
from robustmetric.distance import embed
from robustmetric.evaluation import record as records
from robustmetric.evaluation.checks import CHECKS, Lab
from robustmetric.evaluation.ers import ERS_ATTACKS, Interval, Values, intervals
from robustmetric.evaluation.record import Check, Record, Settings
from robustmetric.evaluation.scene import Images, Scene, device_of, embed_all, run_attack
from robustmetric.files import is_draft, write_atomically
from robustmetric.perturb import Budget, check_images, differentiate, frozen
from robustmetric.registry import lookup
from robustmetric.retrieval import check_cameras, check_own, nmi, rank
from robustmetric.triplets import check_labels
from robustmetric.validate import UserError, is_number

CheckSet = Literal["none", "quick", "full"]

Progress = Callable[[str, float, int], None]
"""Told the stage (embed, retrieval, an attack's name, checks), how many pieces are done, of how many.

A piece in the making counts by its share.
"""

PLAN = "plan.json"
_EMBEDDED = 1024  # images whose embeddings are kept together


def evaluate(
    model: nn.Module,
    images: Images,
    labels: Tensor,
    *,
    eps: float = 8 / 255,
    alpha: float = 3 / 255,
    steps: int = 32,
    protocol: Protocol = "strict",
    search: str | Search = "pgd",
    attacks: Sequence[str | RankingAttack] = ERS_ATTACKS,
    queries: int | None = None,
    gallery: tuple[Images, Tensor] | None = None,
    own: Tensor | None = None,
    cameras: Tensor | None = None,
    gallery_cameras: Tensor | None = None,
    seed: int = 0,
    batch: int = 128,
    checks: CheckSet = "quick",
    train_classes: Sequence[str] | None = None,
    classes: Sequence[str] | None = None,
    name: str | None = None,
    data: str = "images",
    out: str | Path | None = None,
    progress: Progress | None = None,
) -> Record:
    """Measure how well a network ranks images, and how well it keeps that ranking under attack.

    `images` (N, C, H, W) in [0, 1] with `labels` (N,) each query all others, or the `gallery` (its images
    and labels) if one is given, but for their `own` (N,) position in it, −1 for none. With the `cameras` (N,)
    that took the images, and those of the gallery, what is of a query's class and camera does not count for
    it: the rule of re-identification. `model` is any module that maps images to vectors (N, D): it is held in
    evaluation mode, frozen, and comes back as it was. Every attack perturbs each query by at most `eps` a
    pixel; `queries` draws so many of them from the seed. The record has R@1, R@2, mAP, NMI, mAP@R, the scores
    under attack and, if all ten are there, the ERS, with 95 % intervals over the queries, and the checks of
    how far to trust them.

    With `out`, the record is written there as `record.json` with its per-query values, and whatever is
    finished stays on disk: the same call goes on where an interrupted one stopped. `classes` names the
    labels' classes; with `train_classes` the checks look for classes that the network was trained on.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    >>> record = rm.evaluate(rm.model("c2f2", size=8), images, labels, steps=2, queries=8, checks="none")
    >>> 0 <= record["ERS"] <= 100, record.settings.protocol
    (True, 'strict')
    """
    return Evaluation(
        model,
        images,
        labels,
        eps=eps,
        alpha=alpha,
        steps=steps,
        protocol=protocol,
        search=search,
        attacks=attacks,
        queries=queries,
        gallery=gallery,
        own=own,
        cameras=cameras,
        gallery_cameras=gallery_cameras,
        seed=seed,
        batch=batch,
        checks=checks,
        train_classes=train_classes,
        classes=classes,
        name=name,
        data=data,
        out=out,
        progress=progress,
    ).run()


@dataclass(frozen=True)
class Origin:
    """Where images and weights come from, to be named: files, those left out, how weights were chosen.

    >>> Origin(files=["a.png", "b.png"]).called(1), Origin().called(1)
    ('b.png', 'image 1')
    """

    files: Sequence[str] | None = None
    gallery_files: Sequence[str] | None = None
    skipped: Sequence[str] = ()
    weights: str | None = None

    def called(self, number: int, gallery: bool = False) -> str:
        """Name an image: its file, or its number; of a gallery of its own if so."""
        names = self.gallery_files if gallery else self.files
        if names is not None:
            return names[number]
        return f"{'gallery image' if gallery else 'image'} {number}"


@dataclass(eq=False)
class Evaluation:
    """An evaluation in pieces that several workers can share; the arguments are those of `evaluate`.

    Each finished piece is a file in `out/parts`. `work(k, n)` does the k-th of n shares of all pieces; `run`
    does what is left and puts the record together.

    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    >>> evaluation = Evaluation(nn.Flatten(), images, labels, attacks=["ES", "GTM"], checks="none")
    >>> evaluation.pieces()["GTM"]
    ['attack-01-00000']
    """

    model: nn.Module
    images: Images
    labels: Tensor
    _: KW_ONLY
    eps: float = 8 / 255
    alpha: float = 3 / 255
    steps: int = 32
    protocol: Protocol = "strict"
    search: str | Search = "pgd"
    attacks: Sequence[str | RankingAttack] = ERS_ATTACKS
    queries: int | None = None
    gallery: tuple[Images, Tensor] | None = None
    own: Tensor | None = None
    cameras: Tensor | None = None
    gallery_cameras: Tensor | None = None
    seed: int = 0
    batch: int = 128
    checks: CheckSet = "quick"
    train_classes: Sequence[str] | None = None
    classes: Sequence[str] | None = None
    name: str | None = None
    data: str = "images"
    out: str | Path | None = None
    progress: Progress | None = None
    origin: Origin = Origin()

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise UserError(f"the network must be a torch.nn.Module, not a {type(self.model).__name__}")
        if isinstance(self.attacks, str):
            raise UserError(
                f"attacks is the text {self.attacks!r}; give a list of attacks, such as ['ES', 'GTM']"
            )
        self.budget = Budget(eps=self.eps, alpha=self.alpha, steps=self.steps)
        self.how = make_search(self.search) if isinstance(self.search, str) else self.search
        self.goals = [attack(a, protocol=self.protocol) if isinstance(a, str) else a for a in self.attacks]
        self._check()
        self.batch, self.seed = int(self.batch), int(self.seed)
        self.asked: dict[
            str, int
        ] = {}  # how often the search of a stage's last piece asked for the objective
        self.queries = None if self.queries is None else int(self.queries)
        self.store = Store(None if self.out is None else Path(self.out))
        self.numbers = torch.arange(len(self.images))
        if self.queries is not None:
            order = torch.randperm(len(self.images), generator=torch.Generator().manual_seed(self.seed))
            self.numbers = order[: self.queries].sort().values
        self.settings = Settings(
            protocol=self.protocol,
            eps=float(self.eps),
            alpha=float(self.alpha),
            steps=int(self.steps),
            search=self.how.name,
            attacks=[a.name for a in self.goals],
            queries=self.queries,
            seed=self.seed,
            batch=self.batch,
            checks=self.checks,
        )

    def run(self) -> Record:
        """Do all that is not done yet, and put the record together."""
        if (finished := self.begin()) is not None:
            return finished
        self.tell()  # what there is to do, before anything is done
        with self.frozen():
            if self._share(0, 1):
                return self._record()
        # Another process has finished it meanwhile.
        return records.load_record(Path(str(self.out)))

    def work(self, share: int, shares: int) -> None:
        """Do one share of the pieces, and leave them for `run` to put together."""
        if self.begin() is None:
            with self.frozen():
                self._share(share, shares)

    def pieces(self) -> dict[str, list[str]]:
        """Name the files of all pieces, by stage, in the order of their making."""
        stages = {"embed": [f"embed-{k:05d}" for k in range(-(-self._embedded // _EMBEDDED))]}
        if self.how.network is not None:
            stages["embed"] += [f"surrogate-{k:05d}" for k in range(-(-self._embedded // _EMBEDDED))]
        stages["retrieval"] = ["retrieval"]
        blocks = range(-(-len(self.numbers) // self.batch))
        for k, a in enumerate(self.goals):
            stages[a.name] = [f"attack-{k:02d}-{b:05d}" for b in blocks]
        stages["checks"] = [f"check-{name}" for name in self._checks()]
        return stages

    def _check(self) -> None:
        """Refuse what cannot be evaluated, before anything is computed."""
        lookup("set of checks", self.checks, dict.fromkeys(("none", "quick", "full")))
        sets = [(self.images, self.labels)]
        if self.gallery is not None:
            if not isinstance(self.gallery, tuple | list) or len(self.gallery) != 2:
                raise UserError(
                    f"the gallery is a {type(self.gallery).__name__}; give a pair of its images and labels"
                )
            sets.append(self.gallery)
        shapes = []
        for images, labels in sets:
            if isinstance(images, list | tuple):
                raise UserError(
                    f"the images are a {type(images).__name__}; give one tensor (N, C, H, W), for example by "
                    "torch.stack(images)"
                )
            one = images[torch.arange(min(1, len(images)))]
            check_images(images if isinstance(images, Tensor) and images.ndim != 4 else one)
            shapes.append(tuple(one.shape[1:]))
            check_labels(labels, len(images))
        if shapes[0] != shapes[-1]:
            raise UserError(
                f"queries have shape {shapes[0]} and the images of the gallery {shapes[-1]}: bring them to "
                "one size"
            )
        if len(images) < 5:
            raise UserError(
                f"the gallery has {len(images)} images; give at least 5, for a top 4 besides the query"
            )
        kinds, sizes = labels.unique(return_counts=True)
        if len(kinds) < 2:
            raise UserError(
                f"all {len(labels)} images are of class {int(kinds[0])}; no ranking can be wrong: give at "
                "least two classes"
            )
        if self.gallery is None and int(sizes.max()) < 2:
            raise UserError(
                f"no two of the {len(labels)} images share a class; no query has an answer to find: give at "
                "least two images of some classes"
            )
        if self.gallery is not None and not torch.isin(self.labels, labels).any():
            raise UserError(
                "no query's class is in the gallery: give queries and gallery the same numbers for the same "
                "classes"
            )
        whole = is_number(self.queries, Integral)
        if self.queries is not None and not (whole and 1 <= self.queries <= len(self.images)):
            raise UserError(
                f"queries must be from 1 to the number of images, {len(self.images)}, not {self.queries!r}"
            )
        if not is_number(self.batch, Integral) or self.batch < 1:
            raise UserError(f"batch must be a whole number of at least 1, not {self.batch!r}")
        if not is_number(self.seed, Integral) or not 0 <= self.seed < 2**32:
            raise UserError(f"seed must be a whole number from 0 to {2**32 - 1}, not {self.seed!r}")
        if not self.goals:
            raise UserError(f"no attacks were given; the ERS takes {', '.join(ERS_ATTACKS)}")
        names = [a.name for a in self.goals]
        if taken := {"embed", "retrieval", "checks"} & {*names}:
            raise UserError(f"an attack cannot be called {', '.join(taken)}: give it another name")
        if twice := {n for n in names if names.count(n) > 1}:
            raise UserError(f"an attack was given twice: {', '.join(sorted(twice))}")
        if self.gallery is None and (self.own is not None or self.gallery_cameras is not None):
            raise UserError("own and gallery_cameras describe a gallery, and none is given: pass gallery too")
        ranked = self.cameras if self.gallery is None else self.gallery_cameras
        if (ranked is None) != (self.cameras is None):
            known, missing = (
                ("gallery_cameras", "cameras") if ranked is not None else ("cameras", "gallery_cameras")
            )
            raise UserError(f"{known} are given and {missing} are not: pass both, or none")
        check_cameras(ranked, self.cameras, len(images), len(self.images))
        self.places = check_own(self.own, len(self.images), len(images))
        if self.cameras is not None:
            own = torch.arange(len(images)) if self.gallery is None else self.places
            asked = Queries(torch.empty(len(self.images), 0), self.labels.cpu(), own, self.cameras.cpu())
            seen = Gallery(
                torch.empty(len(images), 0), labels.cpu(), cameras=None if ranked is None else ranked.cpu()
            )
            if not (count_mates(asked, seen, own) > 0).any():
                raise UserError(
                    "no query has an image of its class from another camera, so none has an answer to find: "
                    "look at the cameras, or leave them out"
                )
        if self.cameras is not None and self.protocol == "reference":
            raise UserError(
                "the reference protocol knows no cameras: use the strict protocol, or leave the cameras out"
            )
        if self.gallery is not None and self.protocol == "reference":
            raise UserError(
                "the reference protocol takes the nearest image for the query itself, so its queries must be "
                "in the gallery: use the strict protocol with a gallery of its own"
            )
        for a in self.goals:
            a.check_fits(len(images))
        if other := [a.name for a in self.goals if a.protocol != self.protocol]:
            raise UserError(
                f"{', '.join(other)} follows another protocol than {self.protocol}; the two are never mixed"
            )

    def probe(self) -> None:
        """Embed a batch, and differentiate if the search will: a network that fails leaves no trace."""
        images = self.images[torch.arange(min(self.batch, len(self.images)))]
        for what, model in (("network", self.model), ("surrogate", self.how.network)):
            if model is None:
                continue
            try:
                with frozen(model):
                    with torch.no_grad():
                        embed(model, images.to(device_of(model)))
                    if descends_on(self.how, model):
                        _try_gradient(model, images[:2].to(device_of(model)))
            except (ValueError, OSError):
                raise
            except Exception as error:
                kind = str(images.dtype).removeprefix("torch.")
                kinds = {str(p.dtype).removeprefix("torch.") for p in model.parameters()}
                raise UserError(
                    f"the {what} failed on images of shape {tuple(images.shape)} and type {kind} "
                    f"({type(error).__name__}: {error}); give images of the size and channels that it takes "
                    "(on the command line: --set resize=N --set crop=N) and of the type of its weights "
                    f"({', '.join(sorted(kinds)) or 'it has none'})"
                ) from error

    def begin(self) -> Record | None:
        """Look at the data and the network, write down what is to be done; give a record that is done."""
        plan = {
            "settings": self.settings.model_dump(),
            "options": {"search": _options(self.how), "attacks": {a.name: _options(a) for a in self.goals}},
            "class": type(self.model).__qualname__,
            "network": digest_of(self.model),
            "surrogate": None if self.how.network is None else digest_of(self.how.network),
            "data": self.look.sha256,
            "rules": [_digest_of(t) for t in (self.own, self.cameras, self.gallery_cameras)],
            "names": [self.name, self.data],
            "classes": [_digest(self.classes), _digest(self.train_classes)],
            "versions": versions(),
        }
        folder = self.store.folder
        if folder is None:
            self.probe()
            return None
        if check_folder(folder, plan):
            if (folder / records.RECORD).exists():
                self.store.tidy()
                return records.load_record(folder)
        else:
            self.probe()
            folder.mkdir(parents=True, exist_ok=True)
            text = json.dumps(plan, indent=1, ensure_ascii=False) + "\n"
            write_atomically(folder / PLAN, lambda f: f.write(text.encode()))
        return None

    @cached_property
    def look(self) -> Look:
        """What a first pass over the images finds."""
        return Look.at(self.images, self.labels, self.gallery, self.places)

    def frozen(self) -> ExitStack:
        """Hold all networks of the evaluation in evaluation mode, frozen."""
        stack = ExitStack()
        stack.enter_context(frozen(self.model))
        if self.how.network is not None:
            stack.enter_context(frozen(self.how.network))
        return stack

    def _share(self, share: int, shares: int) -> bool:
        """Make every `shares`-th missing piece and wait for the others; False if a record took them."""
        stages = self.pieces()
        turn = 0
        # Attacks rank all images, and checks compare with all attacks.
        for phase in (["embed"], [s for s in stages if s not in ("embed", "checks")], ["checks"]):
            for stage in phase:
                names = stages[stage]
                for name in names:
                    if turn % shares == share and not self.store.has(name):
                        ticks = _Ticks(self, stage, names)
                        self.store.keep(name, self._make(name, ticks))
                        self.asked[stage] = ticks.asked
                        self._tell(stage, names)
                    turn += 1
            if not self.store.wait([name for stage in phase for name in stages[stage]]):
                return False
        return True

    def embed(self) -> None:
        """Make the embeddings that `scene` and `surrogate` need; call it inside `frozen`."""
        names = self.pieces()["embed"]
        for name in names:
            if not self.store.has(name):
                self.store.keep(name, self._make(name))
            self._tell("embed", names)

    def tell(self) -> None:
        """Report the progress of all stages."""
        for stage, names in self.pieces().items():
            self._tell(stage, names)

    def _tell(self, stage: str, names: Sequence[str], part: float = 0.0) -> None:
        if self.progress is not None:
            self.progress(stage, sum(map(self.store.has, names)) + part, len(names))

    @property
    def _embedded(self) -> int:
        """The number of images to embed: queries first, then a gallery of its own."""
        return len(self.images) + (len(self.gallery[0]) if self.gallery else 0)

    def _make(self, piece: str, tick: _Ticks | None = None) -> dict[str, Tensor]:
        kind, _, place = piece.partition("-")
        if kind in ("embed", "surrogate"):
            model = self.model if kind == "embed" else self.how.network
            assert model is not None  # noqa: S101
            begin = int(place) * _EMBEDDED
            part = torch.arange(begin, min(begin + _EMBEDDED, self._embedded))
            done = None if tick is None else partial(tick, of=len(part))
            return {"z": embed_all(model, self._all, part, self.batch, done).cpu()}
        if kind == "retrieval":
            return self._retrieval()
        if kind == "attack":
            number, block = (int(n) for n in place.split("-"))
            begin = block * self.batch
            return self._attacked(self.goals[number], self.numbers[begin : begin + self.batch], tick)
        check = CHECKS[place](self.lab)
        text = json.dumps(check.model_dump(mode="json"), ensure_ascii=False).encode()
        return {"json": torch.frombuffer(bytearray(text), dtype=torch.uint8)}

    @cached_property
    def _all(self) -> Images:
        return self.images if self.gallery is None else _Joined(self.images, self.gallery[0])

    @cached_property
    def scene(self) -> Scene:
        """The network under attack and its embeddings."""
        return self._scene("embed", self.model)

    @cached_property
    def surrogate(self) -> Scene | None:
        """The network that attacks are searched on, and its embeddings."""
        network = self.how.network
        return None if network is None else self._scene("surrogate", network)

    def _scene(self, kind: str, model: nn.Module) -> Scene:
        names = [n for n in self.pieces()["embed"] if n.startswith(kind)]
        z = torch.cat([self.store.get(n)["z"] for n in names]).to(device_of(model))
        labels = self.labels.to(z.device)
        count = len(self.images)
        cameras, theirs = (
            None if c is None else c.to(z.device) for c in (self.cameras, self.gallery_cameras)
        )
        if self.gallery is None:
            own, gallery = torch.arange(count, device=z.device), Gallery(z, labels, cameras=cameras)
        else:
            own = self.places.to(z.device)
            gallery = Gallery(z[count:], self.gallery[1].to(z.device), cameras=theirs)
        ranked = None if self.gallery is None else self.gallery[0]
        return Scene(model, self.images, Queries(z[:count], labels, own, cameras), gallery, ranked)

    def _retrieval(self) -> dict[str, Tensor]:
        """Rank without attacks: per-query values, and the NMI of the gallery."""
        queries, gallery = self.scene.queries, self.scene.gallery
        if self.gallery is None:
            found = rank(gallery.z, gallery.labels, cameras=gallery.cameras)
        else:
            found = self.scene.rank(queries.z, queries)
        return {
            "query": found.query.cpu(),
            "R@1": 100.0 * (found.first <= 1).cpu().double(),
            "R@2": 100.0 * (found.first <= 2).cpu().double(),
            "mAP": 100.0 * found.average_precision.cpu(),
            "mAP@R": 100.0 * found.average_precision_at_r.cpu(),
            "NMI": torch.tensor([100.0 * nmi(gallery.z, gallery.labels)], dtype=torch.float64),
            "left_out": torch.tensor([found.left_out]),
        }

    def _attacked(
        self, a: RankingAttack, numbers: Tensor, tick: Callable[[], None] | None = None
    ) -> dict[str, Tensor]:
        """Attack a block of queries, and note what the checks will ask for."""
        outcome = run_attack(
            self.scene,
            a,
            numbers,
            self.budget,
            self.how,
            seed=self.seed,
            surrogate=self.surrogate,
            tick=tick,
        )
        images, queries = self.scene.batch(numbers)
        with torch.no_grad():
            rounded = embed(self.model, (outcome.images * 255).round() / 255)
            after_rounding = self.scene.measure(a, rounded, outcome.target, queries)
        change = (outcome.images - images).flatten(1).abs().amax(1)
        low, high = (f(outcome.images.flatten(1), 1) for f in (torch.amin, torch.amax))
        found = {
            "number": numbers,
            "target": outcome.target.index,
            "objective/first": outcome.first,
            "objective/last": outcome.last,
            "objective/best": outcome.best,
            "change": change,
            "outside": torch.maximum(-low, high - 1),
        }
        for when, values in (("before", outcome.before), ("after", outcome.after), ("8-bit", after_rounding)):
            found |= {f"{when}/{name}": value for name, value in values.items()}
        # Copies, because safetensors refuses two names for one tensor.
        kept = {
            name: value.cpu().clone(memory_format=torch.contiguous_format) for name, value in found.items()
        }
        return {n: v.double() if v.is_floating_point() else v for n, v in kept.items()}

    def found(self, a: RankingAttack) -> dict[str, Tensor]:
        """Return the per-query values of an attack, over all its blocks."""
        parts = [self.store.get(n) for n in self.pieces()[a.name]]
        return {name: torch.cat([p[name] for p in parts]) for name in parts[0]}

    def _checks(self) -> list[str]:
        """Name the checks of this evaluation."""
        wanted = {"none": 0, "quick": 1, "full": 2}[self.settings.checks]
        return [name for name, check in CHECKS.items() if check.level <= wanted]

    @cached_property
    def lab(self) -> Lab:
        """What the checks work with."""
        retrieval = self.store.get("retrieval")
        return Lab(
            scene=self.scene,
            surrogate=self.surrogate,
            attacks=self.goals,
            budget=self.budget,
            search=self.how,
            seed=self.seed,
            batch=self.batch,
            level=self.settings.checks,
            numbers=self.numbers,
            found={a.name: self.found(a) for a in self.goals},
            recall=float(retrieval["R@1"].mean()),
            copies=self.look.copies,
            shared=self.look.shared,
            called=self.origin.called,
            classes=self.classes,
            train_classes=self.train_classes,
        )

    def _record(self) -> Record:
        """Put the record together from its pieces."""
        group = None
        if self.protocol == "reference":
            group = 128 if self.look.shape[1:] == [28, 28] else 112
        arrays = {"number": self.numbers}
        after: dict[str, Values] = {}
        before: dict[str, Values] = {}
        for a in self.goals:
            found = self.found(a)
            arrays |= {f"{a.name}/{n}": v for n, v in found.items() if n != "number"}
            for key, value in found.items():
                when, _, name = key.partition("/")
                if when in ("after", "before"):
                    if when == "after" and name in after:
                        raise UserError(f"two attacks report {name}: give one of them another name for it")
                    (after if when == "after" else before)[name] = value.numpy()
        scores, overall, terms = intervals(after, group=group, protocol=self.protocol, seed=self.seed)
        clean, _, _ = intervals(before, group=group, protocol=self.protocol, seed=self.seed, resamples=1)
        retrieval = self.store.get("retrieval")
        arrays |= {f"retrieval/{n}": v for n, v in retrieval.items() if n not in ("NMI", "left_out")}
        per_query = {n: retrieval[n].numpy() for n in ("R@1", "R@2", "mAP", "mAP@R")}
        ranked = {n: i._asdict() for n, i in intervals(per_query, seed=self.seed)[0].items()}
        order = {n: ranked[n] for n in ("R@1", "R@2", "mAP")}
        order["NMI"] = Interval(float(retrieval["NMI"]), np.nan, np.nan)._asdict()
        order["mAP@R"] = ranked["mAP@R"]
        checks = [
            Check(**json.loads(bytes(self.store.get(n)["json"].tolist()))) for n in self.pieces()["checks"]
        ]
        collapsed = next(c for c in checks if c.name == "collapse")
        made: dict[str, Any] = {
            "network": {
                "name": self.name or type(self.model).__name__,
                "parameters": sum(p.numel() for p in self.model.parameters()),
                "sha256": digest_of(self.model),
                "surrogate": None if self.how.network is None else digest_of(self.how.network),
                "weights": self.origin.weights,
            },
            "data": {
                "name": self.data,
                "images": len(self.images),
                "gallery": None if self.gallery is None else len(self.gallery[0]),
                "classes": len(self.labels.unique()),
                "shape": self.look.shape,
                "sha256": self.look.sha256,
                "cameras": self.cameras is not None,
                "skipped": list(self.origin.skipped),
            },
            "settings": self.settings,
            "queries": {
                "count": len(self.numbers),
                "of": len(self.images),
                "left_out": int(retrieval["left_out"]),
            },
            "retrieval": order,
            "scores": {n: {**i._asdict(), "before": clean[n].value} for n, i in scores.items()},
            "ers": None,
            "checks": checks,
            "versions": versions(),
        }
        if overall is not None:
            valid = collapsed.status != "fail"
            made["ers"] = {
                **overall._asdict(),
                "terms": terms,
                "valid": valid,
                "why": "" if valid else collapsed.says,
            }
        return self.store.finish(made, arrays)


def check_folder(folder: Path, plan: dict[str, Any]) -> bool:
    """Refuse a folder with anything else than this evaluation in it; tell whether that has begun there.

    A `plan` may name some of what an evaluation depends on: the rest is not compared.

    >>> check_folder(Path("nowhere"), {})
    False
    """
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file: give a folder for the record")
    file = folder / PLAN
    if not file.exists():
        others = folder.exists() and any(not is_draft(path) for path in folder.iterdir())
        if others and not file.exists():
            raise UserError(f"{folder} is not empty and holds no evaluation: give another --out folder")
        return False
    try:
        before = json.loads(file.read_text(encoding="utf-8"))
        if not isinstance(before, dict):
            raise UserError(f"it holds a {type(before).__name__}")
    except ValueError as error:
        raise UserError(
            f"{file} is damaged ({error}): give another --out folder, or remove this one"
        ) from None
    now = json.loads(json.dumps(plan))
    before = {key: before.get(key) for key in now}
    options = [plan.pop("options", None) for plan in (before, now)]
    if differing := [*_differences(before, now)] or [*_differences(*options)]:
        raise UserError(
            f"{folder} holds another evaluation: {'; '.join(differing)}; give another --out "
            "folder, or remove this one"
        )
    return True


@dataclass(frozen=True)
class Look:
    """What a first pass over the images finds: their shape, a digest, and which are copies of another.

    `copies` are pairs within the gallery, `shared` are queries and their copies in a gallery of its own.
    """

    shape: list[int]
    sha256: str
    copies: list[tuple[int, int]]
    shared: list[tuple[int, int]]

    @classmethod
    def at(cls, images: Images, labels: Tensor, separate: tuple[Images, Tensor] | None, own: Tensor) -> Look:
        """Look at all images once, and refuse those that are not in [0, 1]; `own` is where queries may be."""
        whole = hashlib.sha256()
        shape: list[int] = []
        keys: list[list[bytes]] = []
        for some, classes in [(images, labels)] + ([separate] if separate else []):
            keys.append([])
            whole.update(classes.cpu().to(torch.int64).numpy().tobytes())
            for part in torch.arange(len(some)).split(256):
                batch = some[part]
                check_images(batch)
                shape = shape or list(batch.shape[1:])
                whole.update(f"{tuple(batch.shape)} {batch.dtype}".encode())
                content = batch.detach().cpu().to(torch.float32).contiguous().numpy()
                whole.update(content.tobytes())
                keys[-1] += [hashlib.blake2b(image, digest_size=16).digest() for image in content]
        first: dict[bytes, int] = {}
        copies = [
            (first[key], place) for place, key in enumerate(keys[-1]) if first.setdefault(key, place) != place
        ]
        # Those that are known to be in there do not find themselves; copies of them are the gallery's.
        shared = [
            (n, first[key])
            for n, (key, place) in enumerate(zip(keys[0], own.tolist(), strict=True))
            if separate and place < 0 and key in first
        ]
        return cls(shape, whole.hexdigest(), copies, shared)


class _Ticks:
    """Tells of a piece in the making: by how often its search has asked, of how often the last one did."""

    def __init__(self, evaluation: Evaluation, stage: str, names: Sequence[str]) -> None:
        self.evaluation, self.stage, self.names = evaluation, stage, names
        self.asked, self.told = 0, time.monotonic()

    def __call__(self, count: int = 1, of: int | None = None) -> None:
        self.asked += count
        expected = of or self.evaluation.asked.get(self.stage, self.evaluation.budget.steps)
        if time.monotonic() - self.told > 0.5:
            self.told = time.monotonic()
            self.evaluation._tell(self.stage, self.names, min(self.asked / expected, 0.99))


class _Joined:
    """Queries and gallery one behind the other."""

    def __init__(self, first: Images, second: Images) -> None:
        self.first, self.second = first, second

    def __len__(self) -> int:
        return len(self.first) + len(self.second)

    def __getitem__(self, index: Tensor) -> Tensor:
        ours = index < len(self.first)
        parts = [self.first[index[ours]]] if ours.any() else []
        if not ours.all():
            parts.append(self.second[index[~ours] - len(self.first)])
        return torch.cat(parts)


class Store:
    """Finished pieces by name: files in `folder/parts`, or in memory without a folder."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._memory: dict[str, dict[str, Tensor]] = {}

    def has(self, name: str) -> bool:
        """Tell whether a piece is finished."""
        return name in self._memory if self.folder is None else self._file(name).exists()

    def keep(self, name: str, piece: dict[str, Tensor]) -> None:
        """Keep a piece; on disk it appears complete or not at all."""
        if self.folder is None:
            self._memory[name] = piece
            return
        self._file(name).parent.mkdir(exist_ok=True)
        write_atomically(self._file(name), lambda file: file.write(save(piece)))

    def get(self, name: str) -> dict[str, Tensor]:
        """Return a finished piece."""
        if self.folder is None:
            return self._memory[name]
        try:
            return load_file(self._file(name))
        except SafetensorError as error:
            raise UserError(
                f"{self._file(name)} is damaged ({error}); remove it and start again: only it is made anew"
            ) from None

    def wait(self, names: Sequence[str]) -> bool:
        """Wait for pieces of other workers; tell that they are there, and not gone into a record."""
        for name in names:
            while not self.has(name):
                if self.folder is not None and (self.folder / records.RECORD).exists():
                    return False
                time.sleep(0.05)
        return True

    def finish(self, made: dict[str, Any], arrays: dict[str, Tensor]) -> Record:
        """Write the record, and then remove the pieces that it was made from."""
        if self.folder is None:
            return records.make_record(made, save({n: v.contiguous() for n, v in arrays.items()}))
        record = records.write_record(self.folder, made, arrays)
        self.tidy()
        return record

    def tidy(self) -> None:
        """Remove the pieces of a finished record, and what was left of unfinished files."""
        assert self.folder is not None  # noqa: S101
        parts = self.folder / "parts"
        pieces = list(parts.iterdir()) if parts.is_dir() else []
        for file in [*filter(is_draft, self.folder.iterdir()), *pieces]:
            file.unlink(missing_ok=True)
        if parts.is_dir():
            with suppress(OSError):  # a worker that has not heard yet may be writing
                parts.rmdir()

    def _file(self, name: str) -> Path:
        assert self.folder is not None  # noqa: S101
        return self.folder / "parts" / f"{name}.safetensors"


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of a network's state: names, types, shapes and values.

    >>> digest_of(nn.Flatten())[:8]
    'e3b0c442'
    """
    whole = hashlib.sha256()
    # Buffers that are not saved, such as constants of a normalisation, count as well.
    state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, value in sorted(state.items()):
        tensor = value.detach().cpu().contiguous()
        whole.update(f"{name}:{tensor.dtype}:{tuple(tensor.shape)};".encode())
        whole.update(tensor.reshape(-1).view(torch.uint8).numpy().tobytes())
    return whole.hexdigest()


def versions() -> dict[str, str]:
    """Return the versions of what computes the scores.

    >>> "torch" in versions()
    True
    """
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for package in ("robustmetric", "torch", "numpy", "scikit-learn"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def descends_on(search: Search, model: nn.Module) -> bool:
    """Tell whether a search follows gradients of this network.

    >>> descends_on(PGD(), nn.Flatten()), descends_on(Transfer(surrogate=nn.Flatten()), nn.Flatten())
    (True, False)
    """
    if isinstance(search, Transfer):
        return model is search.surrogate and isinstance(search.search, PGD)
    return isinstance(search, PGD)


def _try_gradient(model: nn.Module, images: Tensor) -> None:
    rows = torch.arange(len(images), device=images.device)
    differentiate(lambda x, _: embed(model, x).sum(1), images, rows)


def _options(thing: object) -> dict[str, Any]:
    """Describe an attack or a search by its class and options; networks in it have digests of their own."""
    found: dict[str, Any] = {"class": type(thing).__qualname__}
    for name, value in sorted(getattr(thing, "__dict__", {}).items()):
        if isinstance(value, Search):
            found[name] = _options(value)
        elif isinstance(value, str | int | float | tuple | list | None):
            found[name] = repr(value)
    return found


def _digest_of(numbers: Tensor | None) -> str | None:
    return None if numbers is None else hashlib.sha256(numbers.cpu().long().numpy().tobytes()).hexdigest()


def _digest(names: Sequence[str] | None) -> str | None:
    return None if names is None else hashlib.sha256("\n".join(names).encode()).hexdigest()


def _differences(before: Any, now: Any, path: str = "") -> Iterator[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        for key in sorted({*before, *now}):
            yield from _differences(before.get(key), now.get(key), f"{path}.{key}" if path else key)
    elif before != now:
        yield f"{path.removeprefix('settings.')} was {_short(before)}, is {_short(now)}"


def _short(value: Any) -> str:
    """Write a value down; of a digest its first digits."""
    return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", repr(value))
