"""Checks of whether scores can be trusted: each compares what was measured with what must hold."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from robustmetric.attacks import NES, PGD, SPSA, Draws, Queries, RankingAttack, Search, Target
from robustmetric.attacks.gallery import count_mates
from robustmetric.distance import BrokenEmbeddingsError, embed
from robustmetric.evaluation.ers import COLUMNS, points
from robustmetric.evaluation.record import Check
from robustmetric.evaluation.scene import Scene, embed_all, run_attack
from robustmetric.perturb import Budget, differentiate
from robustmetric.validate import shorten

Status = Literal["pass", "warn", "fail", "not run"]


@dataclass(frozen=True, eq=False)
class Lab:
    """What checks work with: the network and its data, how it was attacked, and what was found.

    `found` holds the per-query values of each attack in the order of `numbers`; `copies` are pairs of
    positions of equal images in the gallery, `shared` pairs of a query and its copy in a gallery of its own;
    `called` names an image by its number, `gallery=True` one of a gallery of its own.
    """

    scene: Scene
    surrogate: Scene | None
    attacks: Sequence[RankingAttack]
    budget: Budget
    search: Search
    seed: int
    batch: int
    level: str
    numbers: Tensor
    found: dict[str, dict[str, Tensor]]
    recall: float
    copies: list[tuple[int, int]]
    shared: list[tuple[int, int]]
    called: Callable[..., str]
    classes: Sequence[str] | None
    train_classes: Sequence[str] | None

    def sample(self, most: int) -> Tensor:
        """Draw positions among the queries, at most so many, from the seed: (S,) ascending."""
        order = torch.randperm(len(self.numbers), generator=torch.Generator().manual_seed(self.seed + 1))
        return order[:most].sort().values

    @property
    def some(self) -> Tensor:
        """The positions of the queries that attacks are repeated on: 64, or 256 for all checks."""
        return self.sample(256 if self.level == "full" else 64)

    def again(
        self,
        a: RankingAttack,
        positions: Tensor,
        budget: Budget | None = None,
        search: Search | None = None,
        *,
        batch: int | None = None,
        surrogate: Scene | None = None,
    ) -> dict[str, Tensor]:
        """Attack some of the queries again in another way: their values by name, and the objective."""
        parts = []
        for numbers in self.numbers[positions].split(batch or self.batch):
            outcome = run_attack(
                self.scene,
                a,
                numbers,
                budget or self.budget,
                search or self.search,
                seed=self.seed,
                surrogate=surrogate or (self.surrogate if search is None else None),
            )
            parts.append({**outcome.after, "objective": outcome.last})
        return {name: torch.cat([p[name] for p in parts]).cpu().double() for name in parts[0]}

    def aimed(self, a: RankingAttack, numbers: Tensor) -> tuple[Tensor, Queries, Target]:
        """Return the images of these numbers, what is known of them as queries, and what they aim at."""
        images, queries = self.scene.batch(numbers)
        draws = Draws(self.seed, a.name, numbers.tolist())
        with torch.no_grad():
            return images, queries, self.scene.aim(a, queries, draws)

    def measured(self, a: RankingAttack, positions: Tensor) -> dict[str, Tensor]:
        """Return what the evaluation found for some of the queries, in the form of `again`."""
        values = {n.removeprefix("after/"): v for n, v in self.found[a.name].items() if n[:6] == "after/"}
        values["objective"] = self.found[a.name]["objective/last"]
        return {name: value[positions] for name, value in values.items()}


@dataclass(frozen=True)
class Kind:
    """A check by name: `level` 0 is always run, 1 unless there shall be none, 2 with `--checks full`."""

    name: str
    level: int
    run: Callable[[Lab], tuple[Status, float, str, str]]

    def __call__(self, lab: Lab) -> Check:
        """Run the check."""
        status, figure, limit, says = self.run(lab)
        return Check(name=self.name, status=status, figure=figure, limit=limit, says=says)


CHECKS: dict[str, Kind] = {}

_Result = tuple[Status, float, str, str]


def _check(name: str, level: int) -> Callable[[Callable[[Lab], _Result]], Callable[[Lab], _Result]]:
    def add(run: Callable[[Lab], _Result]) -> Callable[[Lab], _Result]:
        CHECKS[name] = Kind(name, level, run)
        return run

    return add


@_check("collapse", 0)
def _collapse(lab: Lab) -> _Result:
    z, queries = lab.scene.gallery.z.cpu().double(), lab.scene.queries
    count = len(z)
    # The mean over all pairs, from the length of the sum.
    cosine = float((z.sum(0).square().sum() - z.square().sum()) / (count * (count - 1)))
    mates = count_mates(queries, lab.scene.gallery, queries.own)
    # Of the queries that have an answer, as R@1 is.
    chance = 100 * float((mates / (count - (queries.own >= 0).long()))[mates > 0].mean())
    # With few classes five times chance is out of reach.
    least = min(5 * chance, (100 + chance) / 2)
    limit = f"mean cosine of pairs at most 0.95, R@1 at least {least:.1f} (chance is {chance:.1f})"
    if cosine > 0.95:
        return (
            "fail",
            cosine,
            limit,
            f"collapsed, or near it: all images lie in one direction, with a mean cosine of {cosine:.3f}",
        )
    if lab.recall < least:
        return "fail", cosine, limit, f"R@1 is {lab.recall:.1f}, near chance: there is no ranking to keep"
    return "pass", cosine, limit, f"the mean cosine of two images is {cosine:.3f}, R@1 {lab.recall:.1f}"


@_check("mode", 1)
def _mode(lab: Lab) -> _Result:
    numbers = lab.numbers[lab.sample(4)]
    embed_all(lab.scene.model, lab.scene.images, numbers, 4)
    training = [name or type(m).__name__ for name, m in lab.scene.model.named_modules() if m.training]
    says = (
        f"in training mode: {', '.join(training[:5])}" if training else "all modules are in evaluation mode"
    )
    return "fail" if training else "pass", len(training), "no module in training mode", says


@_check("repeat", 1)
def _repeat(lab: Lab) -> _Result:
    numbers = lab.numbers[lab.sample(16)]
    passes = [embed_all(lab.scene.model, lab.scene.images, numbers, 16) for _ in range(5)]
    apart = max(float((p - passes[0]).abs().max()) for p in passes)
    says = "5 forward passes agree" if apart <= 1e-4 else "the network answers at random: no score repeats"
    return "pass" if apart <= 1e-4 else "fail", apart, "5 passes within 1e-4", says


@_check("seed", 1)
def _seed(lab: Lab) -> _Result:
    attacks = lab.attacks if lab.level == "full" else lab.attacks[:1]
    some, apart = lab.sample(8), 0.0
    short = _shorter(lab.budget, 8)
    for a in attacks:
        first, second = (lab.again(a, some, short) for _ in range(2))
        apart = max([apart, *(float((first[n] - second[n]).abs().nan_to_num().max()) for n in first)])
    says = "two attacks from the same seed agree" if apart <= 1e-4 else "the same seed gives other scores"
    return "pass" if apart <= 1e-4 else "fail", apart, "two seeded runs within 1e-4", says


@_check("batch-1", 1)
def _batch_of_one(lab: Lab) -> _Result:
    numbers = lab.numbers[lab.sample(16)]
    alone = embed_all(lab.scene.model, lab.scene.images, numbers, 1)
    apart = float((alone - lab.scene.queries[numbers.to(alone.device)].z).abs().max())
    limit = "embeddings within 1e-4 of those of a batch"
    if apart > 1e-4:
        return "fail", apart, limit, "an image's embedding depends on the batch it is in"
    if lab.level == "full":
        some = lab.sample(8)
        moves = []
        for a in lab.attacks:
            one, many = lab.again(a, some, batch=1), lab.measured(a, some)
            moves += [abs(_moved(n, many[n], one[n])) for n in many if n != "objective"]
        limit += ", scores within a query"
        if max(moves) > 100 / len(some) + 1e-9:
            return "warn", max(moves), limit, f"attacked one by one, a score moves by {max(moves):.1f} points"
    return "pass", apart, limit, "images one by one are embedded as in a batch"


@_check("gradient", 1)
def _gradient(lab: Lab) -> _Result:
    parts = lab.numbers[lab.some].split(lab.batch)
    limit = "no query without a gradient"
    try:
        steepest = torch.cat([_slopes(lab, part) for part in parts])
    except (ValueError, RuntimeError, BrokenEmbeddingsError) as error:
        if isinstance(lab.search, PGD):
            return "fail", 1.0, limit, f"there is no gradient: {error}"
        return "warn", 1.0, limit, "the network has no gradient; it was attacked without"
    count = len(steepest)
    broken, zero = int((~steepest.isfinite()).sum()), int((steepest == 0).sum())
    share = (broken + zero) / count
    says = f"of {count} queries {zero} have a zero gradient, {broken} one of NaN or infinity"
    return "fail" if broken or share > 0.01 else "warn" if zero else "pass", share, limit, says


def _slopes(lab: Lab, numbers: Tensor) -> Tensor:
    """Find each query's least steep gradient (B,): along a random direction, and where each attack starts."""
    model, gallery = lab.scene.model, lab.scene.gallery
    generator = torch.Generator().manual_seed(lab.seed)
    way = torch.randn(gallery.z.shape[1], generator=generator).to(gallery.z)
    images, _ = lab.scene.batch(numbers)
    rows = torch.arange(len(images), device=images.device)
    least = _steepest(differentiate(lambda x, _: embed(model, x) @ way, images, rows))
    for a in lab.attacks:
        images, queries, target = lab.aimed(a, numbers)
        start = a.start(images, draws=Draws(lab.seed, f"{a.name}/search", numbers.tolist()))
        images = images if start is None else start
        reached = []

        def objective(x: Tensor, _: Tensor) -> Tensor:
            value = a.objective(embed(model, x), target, queries, gallery)  # noqa: B023
            reached.append(value.detach())  # noqa: B023
            return value

        slope = _steepest(differentiate(objective, images, rows))
        # A hinge that is closed has reached its goal and needs no gradient.
        least = torch.minimum(least, slope.where((slope != 0) | (reached[0] != 0), least))
    return least


def _steepest(gradient: Tensor) -> Tensor:
    return gradient.flatten(1).abs().amax(1)


@_check("budget", 1)
def _budget(lab: Lab) -> _Result:
    over = max(float((f["change"] - lab.budget.eps).max()) for f in lab.found.values())
    outside = max(float(f["outside"].max()) for f in lab.found.values())
    broken = any(bool(f[n].isnan().any()) for f in lab.found.values() for n in ("change", "objective/last"))
    # Images of half precision cannot keep ε to a millionth.
    images, _ = lab.scene.batch(lab.numbers[:1])
    room = max(1e-6, torch.finfo(images.dtype).eps)
    limit = f"|r| ≤ ε + {room:.0e}, pixels in [0, 1], no NaN"
    says = f"the largest change is ε {over:+.1e}, pixels leave [0, 1] by {max(0.0, outside):.1e}"
    fine = over <= room and outside <= 0 and not broken
    return "pass" if fine else "fail", over, limit, says + (", NaN was found" if broken else "")


@_check("eps-0", 1)
def _zero_eps(lab: Lab) -> _Result:
    some, none = lab.some, Budget(eps=0.0, alpha=lab.budget.alpha, steps=1)
    worst, which = 0.0, ""
    for a in lab.attacks:
        still = lab.again(a, some, none)
        for name in still:
            if name != "objective":
                moved = abs(_moved(name, lab.found[a.name][f"before/{name}"][some], still[name]))
                worst, which = max((worst, which), (moved, name))
    says = "ε = 0 gives the clean scores" if worst <= 0.01 else f"ε = 0 moves {which} by {worst:.2f} points"
    return "pass" if worst <= 0.01 else "fail", worst, "clean scores within 0.01 points", says


@_check("one-step", 1)
def _one_step(lab: Lab) -> _Result:
    if lab.budget.steps == 1:
        return "not run", 0.0, "", "the attack has one step itself"
    some, single = lab.some, replace(lab.budget, steps=1)
    ahead, weaker = [], []
    for a in lab.attacks:
        step, all_steps = lab.again(a, some, single)["objective"], lab.measured(a, some)["objective"]
        ahead.append(step < all_steps - 1e-6)
        if _beats(step, all_steps):
            weaker.append(a.name)
    share = float(torch.cat(ahead).double().mean())
    says = f"one step is better for {100 * share:.1f} % of the queries"
    if weaker:
        says += f", and on the mean of {', '.join(weaker)}: α or η does not suit ε"
    return "fail" if weaker else "pass", share, "the attack beats one step of ε on every mean", says


@_check("last", 1)
def _last(lab: Lab) -> _Result:
    if not _white(lab):
        return "not run", 0.0, "", f"{lab.search.name} keeps no points on the way"
    shares = {}
    for name, f in lab.found.items():
        first, last, best = (f[f"objective/{n}"] for n in ("first", "last", "best"))
        # By more than a hundredth of the way: rounding and the last wiggle of a sign step do not count.
        worse = last - best > 0.01 * (first - best).abs() + 1e-6
        shares[name] = float(worse.double().mean())
    which = max(shares, key=lambda n: shares[n])
    share = shares[which]
    says = f"for {100 * share:.1f} % of the queries an earlier point was better by over 1 % of the way"
    says += f" ({which})" if share else ""
    return "pass" if share <= 0.01 else "warn", share, "at most 1 % of an attack's queries", says


@_check("noise", 1)
def _noise(lab: Lab) -> _Result:
    limit = "at most 0.5 % of an attack's queries, and no better mean objective"
    if lab.search.network is not None:
        return "not run", 0.0, limit, "the perturbations come from another network"
    some = lab.some
    shares, stronger = {}, []
    for a in lab.attacks:
        reached, noise = lab.measured(a, some)["objective"], []
        for numbers in lab.numbers[some].split(lab.batch):
            images, queries, target = lab.aimed(a, numbers)
            signs = Draws(lab.seed, f"{a.name}/noise", numbers.tolist()).signs(*images.shape[1:])
            noisy = (images + lab.budget.eps * signs.to(images)).clamp(0, 1)
            with torch.no_grad():
                z = embed(lab.scene.model, noisy)
                noise.append(a.objective(z, target, queries, lab.scene.gallery).cpu().double())
        there = torch.cat(noise)
        shares[a.name] = float((there < reached - 1e-6).double().mean())
        if _beats(there, reached):
            stronger.append(a.name)
    which = max(shares, key=lambda n: shares[n])
    share = shares[which]
    says = f"random signs of size ε do better for {100 * share:.1f} % of the queries"
    says += f" ({which})" if share else ""
    if stronger:
        return (
            "fail",
            share,
            limit,
            f"{says}, and on the mean of {', '.join(stronger)}: gradients lead nowhere",
        )
    return "pass" if share <= 0.005 else "warn", share, limit, says


@_check("8-bit", 1)
def _eight_bit(lab: Lab) -> _Result:
    limit, worst, which = _point(len(lab.numbers)), 0.0, ""
    for a in lab.attacks:
        found = lab.found[a.name]
        for key in found:
            if key[:6] == "8-bit/" and (name := key[6:]) not in a.read_early:
                moved = abs(_moved(name, found[f"after/{name}"], found[key]))
                worst, which = max((worst, which), (moved, name))
    says = f"rounding to 8 bits moves no score by more than {worst:.2f} points"
    if worst > limit:
        says = f"rounding to 8 bits moves {which} by {worst:.2f} points: a saved image is another attack"
    return "pass" if worst <= limit else "warn", worst, f"at most {limit:.2g} points", says


@_check("copies", 1)
def _copies(lab: Lab) -> _Result:
    labels = lab.scene.gallery.labels
    across = sum(bool(labels[a] != labels[b]) for a, b in lab.copies)
    limit = "no copies in the gallery"
    if lab.shared:
        found = len(lab.shared)
        says = f"{found} of {len(lab.scene.images)} queries are in the gallery as well, and find themselves: "
        says += shorten([f"{lab.called(a)} = {lab.called(b, gallery=True)}" for a, b in lab.shared])
        most = 0.01 * len(lab.scene.images)
        return "warn" if found <= most else "fail", found, limit + ", of queries or of each other", says
    says = f"{len(lab.copies)} images are exact copies of another, {across} of another class"
    if lab.copies:
        apart = lab.scene.ranked is not None
        # Those across classes first: they cannot be ranked rightly.
        pairs = sorted(lab.copies, key=lambda pair: bool(labels[pair[0]] == labels[pair[1]]))
        named = [f"{lab.called(b, gallery=apart)} = {lab.called(a, gallery=apart)}" for a, b in pairs]
        says += f": {shorten(named)}"
    return "warn" if lab.copies else "pass", len(lab.copies), limit, says


@_check("classes", 1)
def _classes(lab: Lab) -> _Result:
    limit = "no class both trained on and tested"
    if lab.classes is None or lab.train_classes is None:
        return "not run", 0.0, limit, "what the network was trained on is not known"
    shared = sorted({*lab.classes} & {*lab.train_classes})
    says = f"{len(shared)} of {len({*lab.classes})} classes were trained on"
    if shared:
        says += ": the scores are of known classes"
    return "warn" if shared else "pass", len(shared), limit, says


@_check("eps-1", 2)
def _full_eps(lab: Lab) -> _Result:
    some = lab.some
    if len(some) < 8:
        return "not run", 0.0, "", f"{len(some)} queries are too few"
    free = Budget(
        eps=1.0, alpha=min(1.0, max(lab.budget.alpha, 2 / lab.budget.steps)), steps=lab.budget.steps
    )
    left = {}
    for a in lab.attacks:
        for name, value in lab.again(a, some, free).items():
            if name in COLUMNS:
                left[name] = min(100.0, float(COLUMNS[name].term(value.nanmean().numpy())))
    if not left:
        return "not run", 0.0, "", "none of the ten scores was measured"
    # Two say less: embeddings rarely reach the other end of the sphere, or one image among its neighbours.
    judged = [n for n in left if n not in ("ES:D", "GTM")] or list(left)
    which = max(judged, key=lambda n: left[n])
    says = f"with ε = 1, {which} leaves {left[which]:.1f} points"
    if left[which] > 50:
        says += ": an attack that may do anything does not succeed, so its gradients lead nowhere"
    return "pass" if left[which] <= 50 else "fail", left[which], "at most 50 points left of any score", says


@_check("eps-sweep", 2)
def _sweep(lab: Lab) -> _Result:
    some = lab.some
    worst, which = -100.0, ""
    for a in lab.attacks:
        before: dict[str, Tensor] | None = None
        for times in (0, 0.25, 0.5, 1, 2, 4):
            eps = min(1.0, times * lab.budget.eps)
            # A larger ball needs longer steps to be crossed.
            budget = Budget(eps=eps, alpha=min(1.0, max(times, 1) * lab.budget.alpha), steps=lab.budget.steps)
            now = lab.measured(a, some) if times == 1 else lab.again(a, some, budget)
            for name in set(now) & set(COLUMNS):
                if before is not None:
                    rise = _terms(name, now[name]) - _terms(name, before[name])
                    rise = rise[~rise.isnan()]
                    if len(rise) == 0:
                        continue
                    # What sampling does not explain: the mean less two standard errors.
                    error = float(rise.std(correction=0)) / max(1, len(rise)) ** 0.5
                    worst, which = max(
                        (worst, which), (float(rise.mean()) - 2 * error, f"{name} at {times} ε")
                    )
            before = now
    limit = "no term rises with ε by more than a point beyond sampling error"
    if not which:
        return "not run", 0.0, limit, "none of the ten scores was measured"
    if worst <= 1:
        return "pass", worst, limit, "scores fall as ε grows, from 0 to 4 times ε"
    return "warn" if worst <= 5 else "fail", worst, limit, f"{which} is {worst:.1f} points better than before"


@_check("steps", 2)
def _steps(lab: Lab) -> _Result:
    some = lab.some
    limit, worst, which = _point(len(some)), 0.0, ""
    twice = replace(lab.budget, steps=2 * lab.budget.steps)
    for a in lab.attacks:
        once, longer = lab.measured(a, some), lab.again(a, some, twice)
        for name in once:
            if name != "objective":
                worst, which = max((worst, which), (abs(_moved(name, once[name], longer[name])), name))
    says = f"twice the steps move no score by more than {worst:.2f} points"
    if worst > limit:
        says = f"not converged: twice the steps move {which} by {worst:.2f} points"
    return "pass" if worst <= limit else "warn", worst, f"at most {limit:.2g} points", says


@_check("black-box", 2)
def _black_box(lab: Lab) -> _Result:
    return _against(lab, [(NES(samples=20), None), (SPSA(samples=20), None)], "NES or SPSA")


@_check("transfer", 2)
def _transfer(lab: Lab) -> _Result:
    # A sibling of the network: the same weights, each off by a random 5 % of its layer's deviation.
    try:
        sibling = copy.deepcopy(lab.scene.model)
    except Exception as error:  # whatever a network holds
        return "not run", 0.0, "", f"the network cannot be copied ({type(error).__name__})"
    generator = torch.Generator().manual_seed(lab.seed)
    with torch.no_grad():
        for p in sibling.parameters():
            noise = torch.randn(p.shape, generator=generator).to(p)
            p.add_(noise * 0.05 * (p.std() if p.numel() > 1 else p.abs().mean()))
    return _against(lab, [(PGD(), lab.scene.seen_by(sibling, lab.batch))], "transfer")


def _against(lab: Lab, others: list[tuple[Search, Scene | None]], what: str) -> _Result:
    """Compare the attack with searches that know less."""
    limit = "no better mean objective than with gradients, beyond sampling error"
    if not _white(lab):
        return "not run", 0.0, limit, f"the attack was {lab.search.name} itself"
    # Two attacks that are cheap and speak for the others: away from itself, and towards another class.
    chosen = [a for a in lab.attacks if a.name in ("ES", "GTM")] or lab.attacks[:1]
    some = lab.sample(16)
    better, stronger = [], []
    for a in chosen:
        white = lab.measured(a, some)["objective"]
        for search, surrogate in others:
            other = lab.again(a, some, None, search, surrogate=surrogate)["objective"]
            better.append(other < white - 1e-6)
            if _beats(other, white):
                stronger.append(a.name)
    share = float(torch.cat(better).double().mean())
    says = f"{what} does better for {100 * share:.1f} % of the queries"
    if stronger:
        says += f", and on the mean of {', '.join(dict.fromkeys(stronger))}: gradients mislead the attack"
    return "fail" if stronger else "pass", share, limit, says


def _beats(other: Tensor, ours: Tensor) -> bool:
    """Tell whether objectives (S,) are lower on the mean, by more than two standard errors; S is not 1."""
    gain = ours - other
    if len(gain) < 2:
        return False
    error = float(gain.std(correction=0)) / len(gain) ** 0.5
    return bool(gain.mean() > 2 * error + 1e-6)


def _white(lab: Lab) -> bool:
    return isinstance(lab.search, PGD)


def _shorter(budget: Budget, steps: int) -> Budget:
    return budget if budget.steps <= steps else replace(budget, steps=steps)


def _terms(name: str, value: Tensor) -> Tensor:
    """Return the ERS terms of single queries; not clamped, for their mean is."""
    return torch.as_tensor(COLUMNS[name].term(value.numpy()))


def _moved(name: str, before: Tensor, after: Tensor) -> float:
    """By how many points of 100 the mean of a score moved; a query without a value counts in neither."""
    change = (after - before).double()
    change = change[~change.isnan()]
    return float(points(name, change.mean().numpy())) if len(change) else 0.0


def _point(queries: int) -> float:
    """A point of 100, or what one query is worth if that is more."""
    return max(1.0, 100 / queries) + 1e-9
