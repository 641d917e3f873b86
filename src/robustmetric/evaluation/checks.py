"""Checks of whether scores can be trusted: each compares what was measured with what must hold."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import torch
from pydantic import ValidationError
from torch import Tensor

from robustmetric.attacks import APGD, NES, PGD, SPSA, Column, Draws, Search, Square
from robustmetric.errors import UserError, shorten
from robustmetric.evaluation.attack import NetworkView, embed_all
from robustmetric.evaluation.document import first_of
from robustmetric.evaluation.findings import Findings, Measured
from robustmetric.evaluation.plan import check_title
from robustmetric.evaluation.record import Check, Status
from robustmetric.gallery import count_mates
from robustmetric.perturb import differentiate, directions
from robustmetric.registry import Registry, registry
from robustmetric.sphere import embed


class Verdict(NamedTuple):
    """What a check found.

    `status` is how that is judged: "pass", "warn", "fail" or "not run". `figure` is what was found, `limit`
    what is allowed, and `says` a sentence about it.

    >>> Verdict("pass", 0, "none", "no copies").status
    'pass'
    """

    status: Status
    figure: float
    limit: str
    says: str


CHECKS: Registry[Verdict] = registry("check")
"""Every check by name: a function from `Findings` to a `Verdict`."""

Run = TypeVar("Run", bound=Callable[..., Verdict])


def check(
    name: str, level: int, *, suite: bool = False, steps: int = 0, again: int = 0
) -> Callable[[Run], Run]:
    """Register a check: of level 0 always run, of 1 unless the set is none, of 2 with all checks.

    One of a `suite` is run only where there is one. On some queries it takes about so many passes, `steps`,
    for each attack, and runs all of them `again` so often.
    """

    def add(run: Run) -> Run:
        run.level, run.suite = level, suite  # type: ignore[attr-defined]
        run.steps, run.again = steps, again  # type: ignore[attr-defined]
        return CHECKS.register(name)(run)

    return add


def run_check(name: str, findings: Findings) -> Check:
    """Run a check by its name; of a `file.py:function` the function's name stays.

    >>> run_check("colapse", None)
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown check 'colapse' (did you mean 'collapse'?); known: 8-bit, ...
    """
    verdict = CHECKS.bind(name)(findings)
    wanted = "it must return a Verdict(status, figure, limit, says)"
    if not isinstance(verdict, Verdict):
        raise UserError(f"the check {name!r} returned a {type(verdict).__name__}; {wanted}")
    try:
        return Check(name=check_title(name), **verdict._asdict())
    except ValidationError as error:
        raise UserError(f"the check {name!r} returned a wrong {first_of(error)}; {wanted}") from None


def beats(other: Tensor, ours: Tensor) -> bool:
    """Return whether objectives (S,) are lower on the mean, by more than two standard errors; S is not 1.

    >>> beats(torch.tensor([0.0, 0.1]), torch.tensor([1.0, 1.1])), beats(torch.zeros(2), torch.zeros(2))
    (True, False)
    """
    gain = ours - other
    if len(gain) < 2:
        return False
    error = float(gain.std(correction=0)) / len(gain) ** 0.5
    return bool(gain.mean() > 2 * error + 1e-6)


def compare(objectives: Sequence[tuple[str, Tensor, Tensor]]) -> tuple[list[tuple[float, str]], str]:
    """Return the share of queries for which another objective (S,) is lower than ours, and where its mean is.

    Each of the `objectives` is the name of an attack, another way to attack, and ours.
    """
    shares = [(float((other < ours - 1e-6).double().mean()), name) for name, other, ours in objectives]
    beaten = dict.fromkeys(name for name, other, ours in objectives if beats(other, ours))
    return shares, ", ".join(beaten)


def moved(column: Column, before: Tensor, after: Tensor) -> float:
    """By how many points of 100 the mean of a column moved; a query without a value counts in neither.

    >>> from robustmetric.attacks import DISTANCE
    >>> moved(Column("D", "lower", DISTANCE), torch.tensor([0.0, 1.0]), torch.tensor([0.5, torch.nan]))
    25.0
    """
    change = (after - before).double()
    change = change[~change.isnan()]
    return abs(float(change.mean())) * column.unit.points if len(change) else 0.0


def point(queries: int) -> float:
    """Return a point of 100, or what one query is worth if that is more.

    >>> round(point(10)), round(point(1000))
    (10, 1)
    """
    return max(1.0, 100 / queries) + 1e-9


def largest(values: Mapping[str, float]) -> tuple[float, str]:
    """Return the largest of some `values` and its name; 0 of none.

    >>> largest({"ES": 0.5, "GTM": 0.75})
    (0.75, 'GTM')
    """
    return max(((value, name) for name, value in values.items()), default=(0.0, ""))


# Of the network: that it answers the same each time, ranks at all, and has gradients


@check("collapse", 0)
def _collapse(findings: Findings) -> Verdict:
    z, queries = findings.view.gallery.z.cpu().double(), findings.view.queries
    count = len(z)
    # The mean over all pairs, from the length of the sum.
    cosine = float((z.sum(0).square().sum() - z.square().sum()) / (count * (count - 1)))
    mates = count_mates(queries, findings.view.gallery)
    # Of the queries that have an answer, as R@1 is.
    chance = 100 * float((mates.float() / (count - (queries.own >= 0).long()))[mates > 0].mean())
    # With few classes five times chance is out of reach.
    least = min(5 * chance, (100 + chance) / 2)
    limit = f"mean cosine of pairs at most 0.95, R@1 at least {least:.1f} (chance is {chance:.1f})"
    says = f"the mean cosine of two images is {cosine:.3f}, R@1 {findings.recall:.1f}"
    if cosine > 0.95:
        says = f"collapsed, or near it: all images lie in one direction, with a mean cosine of {cosine:.3f}"
    elif findings.recall < least:
        says = f"R@1 is {findings.recall:.1f}, near chance: there is no ranking to keep"
    return Verdict("fail" if cosine > 0.95 or findings.recall < least else "pass", cosine, limit, says)


@check("mode", 1)
def _mode(findings: Findings) -> Verdict:
    numbers = findings.numbers[findings.sample(4)]
    embed_all(findings.view.model, findings.view.images, numbers, 4)
    training = [name or type(m).__name__ for name, m in findings.view.model.named_modules() if m.training]
    says = f"in training mode: {shorten(training)}" if training else "all modules are in evaluation mode"
    return Verdict("fail" if training else "pass", len(training), "no module in training mode", says)


@check("repeat", 1)
def _repeat(findings: Findings) -> Verdict:
    numbers = findings.numbers[findings.sample(16)]
    passes = [embed_all(findings.view.model, findings.view.images, numbers, 16) for _ in range(5)]
    apart = max(float((p - passes[0]).abs().max()) for p in passes)
    says = "5 forward passes agree" if apart <= 1e-4 else "the network answers at random: no score repeats"
    return Verdict("pass" if apart <= 1e-4 else "fail", apart, "5 passes within 1e-4", says)


@check("seed", 1)
def _seed(findings: Findings) -> Verdict:
    attacks = findings.attacks if findings.plan.level == "full" else findings.attacks[:1]
    some, apart = findings.sample(8), 0.0
    short = replace(findings.budget, steps=min(8, findings.budget.steps))
    for a in attacks:
        first, second = (findings.again(a, some, budget=short) for _ in range(2))
        pairs = [(first.objective, second.objective)]
        pairs += [(value, second.values[name]) for name, value in first.values.items()]
        apart = max(apart, *(float((one - other).abs().nan_to_num().max()) for one, other in pairs))
    says = "two attacks from the same seed agree" if apart <= 1e-4 else "the same seed gives other scores"
    return Verdict("pass" if apart <= 1e-4 else "fail", apart, "two seeded runs within 1e-4", says)


@check("batch-1", 1)
def _batch_of_one(findings: Findings) -> Verdict:
    numbers = findings.numbers[findings.sample(16)]
    try:
        alone = embed_all(findings.view.model, findings.view.images, numbers, 1)
    except UserError as error:
        return Verdict("fail", 1.0, "images can be embedded one by one", str(error))
    apart = float((alone - findings.view.queries[numbers.to(alone.device)].z).abs().max())
    limit = "embeddings within 1e-4 of those of a batch"
    if apart > 1e-4:
        return Verdict("fail", apart, limit, "an image's embedding depends on the batch it is in")
    if findings.plan.level == "full":
        some = findings.sample(8)
        moves = []
        for a in findings.attacks:
            one, many = findings.again(a, some, batch=1), findings.measured(a, some)
            moves += [moved(c, many.values[c.name], one.values[c.name]) for c in a.columns]
        limit += ", scores within a query"
        if max(moves) > 100 / len(some) + 1e-9:
            says = f"attacked one by one, a score moves by {max(moves):.1f} points"
            return Verdict("warn", max(moves), limit, says)
    return Verdict("pass", apart, limit, "images one by one are embedded as in a batch")


@check("gradient", 1, steps=3)
def _gradient(findings: Findings) -> Verdict:
    parts = findings.numbers[findings.some].split(findings.threat.batch)
    limit = "no query without a gradient"
    try:
        least = [_slopes_of_network(findings, part) for part in parts]
    except (ValueError, RuntimeError) as error:
        if findings.search.follows_gradient:
            return Verdict("fail", 1.0, limit, f"there is no gradient: {error}")
        return Verdict("warn", 1.0, limit, "the network has no gradient; it was attacked without")
    steepest = torch.cat([_slopes(findings, *pair) for pair in zip(parts, least, strict=True)])
    count = len(steepest)
    broken, zero = int((~steepest.isfinite()).sum()), int((steepest == 0).sum())
    share = (broken + zero) / count
    says = f"of {count} queries {zero} have a zero gradient, {broken} one of NaN or infinity"
    return Verdict("fail" if broken or share > 0.01 else "warn" if zero else "pass", share, limit, says)


def _slopes_of_network(findings: Findings, numbers: Tensor) -> Tensor:
    """Find how steep the network is at each query, along a random direction: (B,)."""
    model, z = findings.view.model, findings.view.gallery.z
    generator = torch.Generator().manual_seed(findings.threat.seed)
    way = torch.randn(z.shape[1], generator=generator, dtype=torch.float32).to(z)
    images, _ = findings.view.batch(numbers)
    rows = torch.arange(len(images), device=images.device)
    return _steepest(differentiate(lambda x, _: embed(model, x) @ way, images, rows))


def _slopes(findings: Findings, numbers: Tensor, least: Tensor) -> Tensor:
    """Find each query's least steep gradient (B,): of the network, `least`, and where each attack starts."""
    model, gallery = findings.view.model, findings.view.gallery
    rows = torch.arange(len(numbers), device=least.device)
    for a in findings.attacks:
        images, queries, target = findings.aimed(a, numbers)
        start = a.start(images, draws=Draws(findings.threat.seed, f"{a.name}/search", numbers.tolist()))
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


# Of the attacks: that they kept to the budget and reached what cheaper ones reach


@check("budget", 1)
def _budget(findings: Findings) -> Verdict:
    found = [*findings.found.values(), *findings.worst.values()]
    over = max(float((f["change"] - findings.budget.eps).max()) for f in found)
    outside = max(float(f["outside"].max()) for f in found)
    told = ("change", "objective/last")
    broken = any(bool(f[name].isnan().any()) for f in findings.found.values() for name in told)
    # Images of half precision cannot keep ε to a millionth; lengths of norm l2 round in proportion.
    images, _ = findings.view.batch(findings.numbers[:1])
    room = max(1e-6, torch.finfo(images.dtype).eps) * max(1.0, findings.budget.eps)
    limit = f"|r| ≤ ε + {room:.0e}, pixels in [0, 1], no NaN"
    says = f"the largest change is ε {over:+.1e}, pixels leave [0, 1] by {max(0.0, outside):.1e}"
    fine = over <= room and outside <= 0 and not broken
    return Verdict("pass" if fine else "fail", over, limit, says + (", NaN was found" if broken else ""))


@check("eps-0", 1, steps=4)
def _zero_eps(findings: Findings) -> Verdict:
    some, none = findings.some, replace(findings.budget, eps=0.0, steps=1)
    moves = dict[str, float]()
    for a in findings.attacks:
        still, before = findings.again(a, some, budget=none).values, findings.found[a.name]
        moves |= {c.name: moved(c, before[f"before/{c.name}"][some], still[c.name]) for c in a.columns}
    worst, which = largest(moves)
    says = "ε = 0 gives the clean scores" if worst <= 0.01 else f"ε = 0 moves {which} by {worst:.2f} points"
    return Verdict("pass" if worst <= 0.01 else "fail", worst, "clean scores within 0.01 points", says)


@check("one-step", 1, steps=4)
def _one_step(findings: Findings) -> Verdict:
    if findings.budget.steps == 1:
        return Verdict("not run", 0.0, "", "the attack has one step itself")
    some, single = findings.some, replace(findings.budget, steps=1)
    found = []
    for a in findings.attacks:
        step = findings.again(a, some, budget=single).objective
        found.append((a.name, step, findings.measured(a, some).objective))
    shares, beaten = compare(found)
    share = sum(share for share, _ in shares) / len(shares)
    says = f"one step is better for {100 * share:.1f} % of the queries"
    if beaten:
        says += f", and on the mean of {beaten}: α or η does not suit ε"
    return Verdict("fail" if beaten else "pass", share, "the attack beats one step of ε on every mean", says)


@check("last", 1)
def _last(findings: Findings) -> Verdict:
    if not findings.search.follows_gradient:
        return Verdict("not run", 0.0, "", f"{findings.search.name} keeps no points on the way")
    shares = {}
    for name, f in findings.found.items():
        # By more than a hundredth of the way: rounding and the last wiggle of a sign step do not count.
        first, last, best = (f[f"objective/{when}"] for when in ("first", "last", "best"))
        worse = last - best > 0.01 * (first - best).abs() + 1e-6
        shares[name] = float(worse.double().mean())
    share, which = largest(shares)
    says = f"for {100 * share:.1f} % of the queries an earlier point was better by over 1 % of the way"
    says += f" ({which})" if share else ""
    return Verdict("pass" if share <= 0.01 else "warn", share, "at most 1 % of an attack's queries", says)


@check("noise", 1, steps=1)
def _noise(findings: Findings) -> Verdict:
    limit = "at most 0.5 % of an attack's queries, and no better mean objective"
    if findings.search.network is not None:
        return Verdict("not run", 0.0, limit, "the perturbations come from another network")
    some, found = findings.some, []
    for a in findings.attacks:
        noise = []
        for numbers in findings.numbers[some].split(findings.threat.batch):
            images, queries, target = findings.aimed(a, numbers)
            draws = Draws(findings.threat.seed, f"{a.name}/noise", numbers.tolist())
            signs = draws.signs(*images.shape[1:])
            way = directions(signs, findings.budget.norm).to(images)
            noisy = (images + findings.budget.eps * way).clamp(0, 1)
            with torch.no_grad():
                z = embed(findings.view.model, noisy)
                noise.append(a.objective(z, target, queries, findings.view.gallery).cpu().double())
        found.append((a.name, torch.cat(noise), findings.measured(a, some).objective))
    shares, beaten = compare(found)
    share, which = max(shares)
    says = f"random signs of size ε do better for {100 * share:.1f} % of the queries"
    says += f" ({which})" if share else ""
    if beaten:
        blamed = "gradients lead" if findings.search.follows_gradient else "the search leads"
        says += f", and on the mean of {beaten}: {blamed} nowhere"
        return Verdict("fail", share, limit, says)
    return Verdict("pass" if share <= 0.005 else "warn", share, limit, says)


@check("8-bit", 1)
def _eight_bit(findings: Findings) -> Verdict:
    limit, moves = point(len(findings.numbers)), dict[str, float]()
    for a in findings.attacks:
        found = findings.found[a.name]
        for c in a.columns:
            if c.name not in a.read_early:
                moves[c.name] = moved(c, found[f"after/{c.name}"], found[f"8-bit/{c.name}"])
    worst, which = largest(moves)
    says = f"rounding to 8 bits moves no score by more than {worst:.2f} points"
    if worst > limit:
        says = f"rounding to 8 bits moves {which} by {worst:.2f} points: a saved image is another attack"
    return Verdict("pass" if worst <= limit else "warn", worst, f"at most {limit:.2g} points", says)


@check("masked", 1, suite=True)
def _masked(findings: Findings) -> Verdict:
    limit = "at most 1 % of a goal's queries beyond the reach of gradients"
    shares = {}
    for goal in findings.plan.goals:
        found, attempts = findings.worst[goal.name], findings.attempts[goal.name]
        end = goal.columns[0].success_value
        blind = [k for k, attempt in enumerate(attempts) if not attempt.search.follows_gradient]
        counted = ~found["before"].isnan()
        if len(blind) < len(attempts) and end is not None and counted.any():
            broken = torch.isin(found["by"], torch.tensor(blind)) & (found["worst"] == end)
            shares[goal.name] = float(broken[counted].double().mean())
    if not shares:
        return Verdict("not run", 0.0, limit, "no suite with attacks of both kinds was run")
    share, which = largest(shares)
    says = f"attacks without gradients broke {100 * share:.1f} % that those with gradients left"
    says += f" ({which})" if share else ""
    least = point(len(findings.numbers)) / 100
    if share > max(0.05, least):
        return Verdict("fail", share, limit, f"{says}: gradients are masked")
    return Verdict("pass" if share <= max(0.01, least) else "warn", share, limit, says)


# Of the data


@check("copies", 1)
def _copies(findings: Findings) -> Verdict:
    labels, data = findings.view.gallery.labels, findings.subject.data
    called, copies, shared = data.called, data.fingerprint.copies, data.fingerprint.shared
    limit = "no copies in the gallery"
    if shared:
        count = len(findings.view.images)
        says = f"{len(shared)} of {count} queries are in the gallery as well, and find themselves: "
        says += shorten([f"{called(a)} = {called(b, gallery=True)}" for a, b in shared])
        status: Status = "warn" if len(shared) <= 0.01 * count else "fail"
        return Verdict(status, len(shared), limit + ", of queries or of each other", says)
    across = sum(bool(labels[a] != labels[b]) for a, b in copies)
    says = f"{len(copies)} images are exact copies of another, {across} of another class"
    if copies:
        apart = findings.view.ranked is not None
        # Those across classes first: they cannot be ranked rightly.
        pairs = sorted(copies, key=lambda pair: bool(labels[pair[0]] == labels[pair[1]]))
        named = [f"{called(b, gallery=apart)} = {called(a, gallery=apart)}" for a, b in pairs]
        says += f": {shorten(named)}"
    return Verdict("warn" if copies else "pass", len(copies), limit, says)


@check("classes", 1)
def _classes(findings: Findings) -> Verdict:
    classes, trained = findings.subject.data.classes, findings.subject.train_classes
    limit = "no class both trained on and tested"
    if classes is None or trained is None:
        return Verdict("not run", 0.0, limit, "what the network was trained on is not known")
    shared = sorted({*classes} & {*trained})
    says = f"{len(shared)} of {len({*classes})} classes were trained on"
    if shared:
        says += ": the scores are of known classes"
    return Verdict("warn" if shared else "pass", len(shared), limit, says)


# As long as the evaluation: other budgets, more steps, attacks that know less


# Attacks that are cheap and speak for the others: away from itself, and towards another class.
_SPEAK_FOR_ALL = ("ES", "GTM")


@check("eps-1", 2, again=1)
def _full_eps(findings: Findings) -> Verdict:
    some = findings.some
    if len(some) < 8:
        return Verdict("not run", 0.0, "", f"{len(some)} queries are too few")
    steps = findings.budget.steps
    alpha = min(1.0, max(findings.budget.alpha, 2 / steps))
    free = replace(findings.budget, eps=_widest(findings), alpha=alpha)
    left = {}
    for a in findings.attacks:
        reached = findings.again(a, some, budget=free).values
        for column in a.columns:
            if column.term is not None:
                left[column.name] = min(100.0, float(column.term(reached[column.name].nanmean().numpy())))
    if not left:
        return Verdict("not run", 0.0, "", "no score with points of 100 was measured")
    most, which = largest({n: v for n, v in left.items() if findings.plan.columns[n].conclusive} or left)
    says = f"with ε = {_widest(findings):.4g}, {which} leaves {most:.1f} points"
    if most > 50:
        says += ": an attack that may do anything does not succeed, so its gradients lead nowhere"
    return Verdict("pass" if most <= 50 else "fail", most, "at most 50 points left of any score", says)


@check("eps-sweep", 2, again=5)
def _sweep(findings: Findings) -> Verdict:
    some = findings.some
    worst, which = -100.0, ""
    for a in findings.attacks:
        before: Measured | None = None
        for times in (0, 0.25, 0.5, 1, 2, 4):
            eps = min(_widest(findings), times * findings.budget.eps)
            # A larger ball needs longer steps to be crossed.
            alpha = min(1.0, max(times, 1) * findings.budget.alpha)
            budget = replace(findings.budget, eps=eps, alpha=alpha)
            now = findings.measured(a, some) if times == 1 else findings.again(a, some, budget=budget)
            for column in a.columns:
                if before is None or column.better is None:
                    continue
                rise = _points(column, now.values[column.name]) - _points(column, before.values[column.name])
                rise = rise[~rise.isnan()]
                if len(rise) == 0:
                    continue
                # What sampling does not explain: the mean less two standard errors.
                error = float(rise.std(correction=0)) / len(rise) ** 0.5
                gain = float(rise.mean()) - 2 * error
                worst, which = max((worst, which), (gain, f"{column.name} at {times} ε"))
            before = now
    limit = "no term rises with ε by more than a point beyond sampling error"
    if not which:
        return Verdict("not run", 0.0, limit, "no score that has a better direction was measured")
    if worst <= 1:
        return Verdict("pass", worst, limit, "scores fall as ε grows, from 0 to 4 times ε")
    says = f"{which} is {worst:.1f} points better than before"
    return Verdict("warn" if worst <= 5 else "fail", worst, limit, says)


@check("steps", 2, again=2)
def _steps(findings: Findings) -> Verdict:
    some = findings.some
    limit, moves = point(len(some)), dict[str, float]()
    twice = replace(findings.budget, steps=2 * findings.budget.steps)
    for a in findings.attacks:
        once, longer = findings.measured(a, some).values, findings.again(a, some, budget=twice).values
        moves |= {c.name: moved(c, once[c.name], longer[c.name]) for c in a.columns}
    worst, which = largest(moves)
    says = f"twice the steps move no score by more than {worst:.2f} points"
    if worst > limit:
        says = f"not converged: twice the steps move {which} by {worst:.2f} points"
    return Verdict("pass" if worst <= limit else "warn", worst, f"at most {limit:.2g} points", says)


@check("black-box", 2, again=1)
def _black_box(findings: Findings) -> Verdict:
    if findings.budget.norm == "l2":
        return _against(findings, [(Square(trials=20 * findings.budget.steps), None)], "random squares")
    return _against(findings, [(NES(samples=20), None), (SPSA(samples=20), None)], "NES or SPSA")


@check("transfer", 2)
def _transfer(findings: Findings) -> Verdict:
    # A sibling of the network: the same weights, each off by a random 5 % of its layer's deviation.
    try:
        sibling = copy.deepcopy(findings.view.model)
    except Exception as error:  # whatever a network holds
        return Verdict("not run", 0.0, "", f"the network cannot be copied ({type(error).__name__})")
    generator = torch.Generator().manual_seed(findings.threat.seed)
    with torch.no_grad():
        for p in sibling.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p)
            p.add_(noise * 0.05 * (p.std() if p.numel() > 1 else p.abs().mean()))
    search = PGD() if findings.budget.norm == "linf" else APGD()
    return _against(findings, [(search, findings.view.seen_by(sibling, findings.threat.batch))], "transfer")


def _against(findings: Findings, others: list[tuple[Search, NetworkView | None]], what: str) -> Verdict:
    """Compare the attack with searches that know less."""
    limit = "no better mean objective than with gradients, beyond sampling error"
    if not findings.search.follows_gradient:
        return Verdict("not run", 0.0, limit, f"the attack was {findings.search.name} itself")
    chosen = [a for a in findings.attacks if a.name in _SPEAK_FOR_ALL] or findings.attacks[:1]
    some, found = findings.sample(16), []
    for a in chosen:
        for search, surrogate in others:
            other = findings.again(a, some, search=search, surrogate=surrogate).objective
            found.append((a.name, other, findings.measured(a, some).objective))
    shares, beaten = compare(found)
    share = sum(share for share, _ in shares) / len(shares)
    says = f"{what} does better for {100 * share:.1f} % of the queries"
    if beaten:
        says += f", and on the mean of {beaten}: gradients mislead the attack"
    return Verdict("fail" if beaten else "pass", share, limit, says)


def _widest(findings: Findings) -> float:
    """Return the ε at which a perturbation may do anything: 1 a pixel, or the length of all pixels."""
    pixels = math.prod(findings.subject.data.fingerprint.shape)
    return 1.0 if findings.budget.norm == "linf" else math.sqrt(pixels)


def _points(column: Column, value: Tensor) -> Tensor:
    """Bring single queries' values to points that rise with robustness; not clamped, for their mean is."""
    if column.term is not None:
        return torch.as_tensor(column.term(value.numpy()))
    return value * (column.unit.points if column.better == "higher" else -column.unit.points)
