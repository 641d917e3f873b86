"""Evaluate a network: how well it ranks, and how well it keeps its ranking under attack."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from robustmetric.attacks import PERCENT, Attack, Column
from robustmetric.evaluation.attack import attack_block, embed_all
from robustmetric.evaluation.checks import CHECKS, run_check
from robustmetric.evaluation.data import Data, Subject, data_of
from robustmetric.evaluation.ers import COLUMNS, Values
from robustmetric.evaluation.findings import Findings
from robustmetric.evaluation.identity import code_of
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.intervals import Interval, Score, intervals
from robustmetric.evaluation.job import Piece, Progress, Tensors, Tick, blocks
from robustmetric.evaluation.plan import Plan, check_title, plan_of
from robustmetric.evaluation.record import AttackShare, Check, GoalScore, Record, Suite, failures
from robustmetric.evaluation.suite import BEFORE, run_ensemble
from robustmetric.evaluation.threat import Threat
from robustmetric.retrieval import nmi

EMBEDDED = 1024  # images whose embeddings are kept together
_SUITE = 4  # batches of queries that the suite attacks together: what is left of them fills fewer
_PER_QUERY = ("R@1", "R@2", "mAP", "mAP@R")


def evaluate(
    model: nn.Module,
    images: Images | Data,
    labels: Tensor | None = None,
    *,
    surrogate: nn.Module | None = None,
    name: str | None = None,
    train_classes: Sequence[str] | None = None,
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
    plan: Plan | None = None,
    **settings: Any,
) -> Record:
    """Measure how well a network ranks images, and how well it keeps that ranking under attack.

    Every attack perturbs each query by at most ε a pixel. The record has R@1, R@2, mAP, NMI, mAP@R, the
    scores under attack and, if all ten are there, the ERS, with 95 % intervals over the queries, and checks
    of how far to trust them.

    Args:
        model: Any module that maps images (N, C, H, W) to vectors (N, D). It is held in evaluation mode,
            frozen, and restored afterwards.
        images: Images (N, C, H, W) in [0, 1]: a tensor or anything that is indexed like one, each of which
            queries all others; or a `Data`, which may have a gallery, cameras and names.
        labels: Their classes (N,), unless they are a `Data`.
        surrogate: The network that perturbations come from, for the search ``"transfer"`` or a suite.
        name: Name of the network in the record; by default that of its class.
        train_classes: Names of the classes that the network was trained on: a check looks for them.
        out: Folder for the record, `record.json`, and its per-query values. Finished pieces stay there: the
            same call resumes after an interruption. No other program can use the folder meanwhile.
        progress: Called with a stage, how many of its pieces are done, and how many there are.
        report: Called with a line about what was found in the folder: a damaged file that is made anew, or
            the lock of a process that was killed.
        plan: How to attack and to judge; made of the `settings` unless it is given.
        settings: Entries of `Settings`: protocol, eps, norm, alpha, steps, search, attacks, suite, queries,
            seed, batch and checks.

    >>> import torch, robustmetric as rm
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    >>> record = rm.evaluate(rm.model("c2f2", size=8), images, labels, steps=2, queries=8, checks="none")
    >>> 0 <= record["ERS"] <= 100, record.settings.protocol
    (True, 'strict')

    """
    plan = plan_of(Plan, plan, settings)
    data = data_of(images, labels)
    subject = Subject(model, data, surrogate=surrogate, name=name, train_classes=train_classes)
    return Evaluation(subject, plan, out, progress, report).run()


class Evaluation(Findings):
    """An evaluation in pieces: the network and data of `subject`, attacked and judged as `plan` says.

    `out`, `progress` and `report` are those of every `Job`.

    >>> import torch
    >>> subject = Subject(nn.Flatten(), Data(torch.rand(20, 1, 8, 8), torch.arange(20) % 4))
    >>> list(Evaluation(subject, Plan.make(attacks=["ES", "GTM"], checks="none")).stages)
    ['embed', 'retrieval', 'ES', 'GTM', 'checks']
    """

    def probe(self) -> None:
        """Try the networks on a batch, so that one that fails leaves no trace."""
        other, search = self.subject.surrogate, self.threat.search
        self.subject.probe(
            self.threat.batch,
            gradient=search.differentiates(self.subject.model),
            of_surrogate=other is not None and (search.differentiates(other) or self.plan.suite is not None),
        )

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces: embeddings, the ranking, attacks and goals by blocks of queries, and checks."""
        threat, every = self.threat, torch.arange(len(self.data.every))
        found = [*blocks("embed", 0, every, EMBEDDED, partial(self._embed, self.subject.model))]
        if (other := self.subject.surrogate) is not None:
            found += blocks("embed", 0, every, EMBEDDED, partial(self._embed, other), file="surrogate")
        # Attacks rank all images, and checks compare with all attacks.
        found.append(Piece("retrieval", 1, "retrieval.safetensors", self._rank, 0))
        for place, goal in enumerate(self.plan.attacks):
            found += blocks(
                goal.name, 1, self.numbers, threat.batch, partial(self._attack, goal),
                cost=search_cost(threat) + 2, parts=threat.evaluations, file=f"attack-{place:02d}",
            )  # fmt: skip
        for place, goal in enumerate(self.plan.goals):
            tried = [replace(self.suite_threat, search=each.search) for each in self.attempts[goal.name]]
            found += blocks(
                f"worst {goal.name}", 1, self.numbers, _SUITE * threat.batch, partial(self._try, goal),
                cost=sum(search_cost(each) + 1 for each in tried),
                parts=_SUITE * sum(each.evaluations for each in tried), file=f"suite-{place:02d}",
            )  # fmt: skip
        for name in self.plan.check_names:
            file = f"check-{re.sub(r'[^A-Za-z0-9.+-]', '_', check_title(name))}.json"
            found.append(Piece("checks", 2, file, partial(self._check, name), self._cost_of_check(name)))
        return tuple(found)

    def embed(self) -> None:
        """Make the embeddings alone; call it inside `frozen`."""
        for piece in self.stages["embed"]:
            if not self.has(piece):
                self.keep(piece, piece.make(lambda count=1: None))
            self.tell("embed")

    def _embed(self, model: nn.Module, part: Tensor, tick: Tick) -> Tensors:
        return {"z": embed_all(model, self.data.every, part, self.threat.batch, tick).cpu()}

    def _rank(self, tick: Tick) -> Tensors:
        """Rank the gallery for every image: values of each query that has an answer, and the NMI."""
        queries, gallery = self.view.queries, self.view.gallery
        found = self.view.rank(queries.z, queries)
        return {
            "query": found.query.cpu(),
            "R@1": 100.0 * (found.first <= 1).cpu().double(),
            "R@2": 100.0 * (found.first <= 2).cpu().double(),
            "mAP": 100.0 * found.average_precision.cpu(),
            "mAP@R": 100.0 * found.average_precision_at_r.cpu(),
            "NMI": torch.tensor([100.0 * nmi(gallery.z, gallery.labels)], dtype=torch.float64),
            "left_out": torch.tensor([found.left_out]),
        }

    def _attack(self, goal: Attack, numbers: Tensor, tick: Tick) -> Tensors:
        return attack_block(self.view, goal, numbers, self.threat, surrogate=self.surrogate, tick=tick)

    def _try(self, goal: Attack, numbers: Tensor, tick: Tick) -> Tensors:
        attempts, threat = self.attempts[goal.name], self.suite_threat
        return run_ensemble(self.view, goal, attempts, numbers, threat, surrogate=self.other, tick=tick)

    def _check(self, name: str, tick: Tick) -> dict[str, Any]:
        return run_check(name, self).model_dump(mode="json")

    def _cost_of_check(self, name: str) -> int:
        """Return the passes of the attacks that a check repeats."""
        run = CHECKS.find(name)[0]
        again = getattr(run, "again", 0) * search_cost(self.threat)
        queries = min(256 if self.plan.level == "full" else 64, len(self.numbers))
        return queries * len(self.plan.attacks) * (getattr(run, "steps", 0) + again)

    def build(self) -> tuple[dict[str, Any], Tensors]:
        """Return what the record says of the scores, and its per-query values."""
        plan, settings = self.plan, self.plan.settings
        retrieval = self.joined("retrieval")
        checks = [Check(**self.get(piece)) for piece in self.stages["checks"]]
        group = None
        if settings.protocol == "reference":
            group = 128 if self.data.fingerprint.shape[1:] == [28, 28] else 112
        arrays = {"number": self.numbers}
        for name, found in self.found.items():
            arrays |= {f"{name}/{n}": v for n, v in found.items() if n != "number"}
        arrays |= {f"retrieval/{n}": v for n, v in retrieval.items() if n not in ("NMI", "left_out")}
        after, before = (
            {c.name: self.found[a.name][f"{when}/{c.name}"].numpy() for a in plan.attacks for c in a.columns}
            for when in ("after", "before")
        )
        suite, worst = self._suite(after)
        how: dict[str, Any] = {"group": group, "protocol": settings.protocol, "seed": settings.seed}
        shares = [name for name in after if plan.columns[name].unit == PERCENT]
        means, overall, terms = intervals(after, percent=shares, **how)
        clean = intervals(before, resamples=1, **how)[0]
        scores = {
            name: Score(
                **mean._asdict(),
                before=clean[name].value,
                better=plan.columns[name].better,
                unit=plan.columns[name].unit.name,
            )
            for name, mean in means.items()
        }
        made = {
            "settings": settings,
            "queries": {
                "count": len(self.numbers),
                "of": len(self.data.images),
                "left_out": int(retrieval["left_out"]),
            },
            "retrieval": _retrieval(retrieval, settings.seed),
            "scores": scores,
            "ers": None if overall is None else _ers(overall, terms, checks, plan),
            "suite": suite,
            "checks": checks,
        }
        return made, arrays | worst

    def _suite(self, after: Mapping[str, Values]) -> tuple[Suite | None, Tensors]:
        """Return the worst case of each goal of the suite, and the values (Q,) of each query by name.

        `after` has the values (Q,) of the columns of the attacks, which count where they say the same of a
        query as a goal.
        """
        if self.plan.suite is None:
            return None, {}
        goals, arrays = dict[str, GoalScore](), dict[str, Tensor]()
        attacks = self.plan.attacks if self.plan.settings.protocol == "strict" else ()
        for goal in self.plan.goals:
            beside = {
                column.name: after[column.name]
                for attack in attacks
                for column in attack.columns
                if attack.drawn_as == goal.drawn_as or column.name in goal.same_columns
            }
            goals[goal.name] = self._goal_score(goal, beside)
            kept = ("before", "worst", "by", "change", "outside")
            arrays |= {f"suite/{goal.name}/{name}": self.worst[goal.name][name] for name in kept}
        return Suite(goals=goals), arrays

    def _goal_score(self, goal: Attack, beside: Mapping[str, Values]) -> GoalScore:
        column, found, attempts = goal.columns[0], self.worst[goal.name], self.attempts[goal.name]
        counted = ~found["before"].isnan().numpy()
        alone, by = found["worst"].numpy()[counted], found["by"].numpy()[counted]
        worst, who = alone.copy(), by.copy()
        for k, values in enumerate(beside.values(), len(attempts)):
            gain = values[counted] - worst
            ahead = gain < 0 if column.better == "higher" else gain > 0
            worst, who = np.where(ahead, values[counted], worst), np.where(ahead, k, who)
        forward, backward = found["forward"].sum(0).tolist(), found["backward"].sum(0).tolist()
        count, seed = int(counted.sum()), self.threat.seed
        done = np.full(count, True) if column.success_value is None else worst == column.success_value

        def share(number: int) -> float:
            return 100 * float(((who == number) & done).mean()) if count else math.nan

        attacks = [
            AttackShare(attack=a.attack.name, search=a.search.name, broke=share(k), forward=f, backward=b)
            for k, (a, f, b) in enumerate(zip(attempts, forward, backward, strict=True))
        ]
        attacks += [AttackShare(attack=name, broke=share(k)) for k, name in enumerate(beside, len(attempts))]
        if column.success_value is not None:
            attacks.insert(0, AttackShare(attack="before", broke=share(BEFORE)))
        return GoalScore(
            **_mean(worst, column, seed)._asdict(),
            before=_mean(found["before"].numpy()[counted], column, seed, resamples=1).value,
            alone=_mean(alone, column, seed, resamples=1).value,
            better=column.better,
            unit=column.unit.name,
            queries=count,
            attacks=attacks,
            forward=sum(forward),
            backward=sum(backward),
            undropped=count * sum(attempt.passes(self.suite_threat.budget) for attempt in attempts),
        )


def search_cost(threat: Threat) -> int:
    """Return how many passes of an image the search of a `threat` takes; a pass back counts twice."""
    return threat.evaluations * (3 if threat.search.follows_gradient else 1)


def _retrieval(values: Tensors, seed: int) -> dict[str, Any]:
    """Average the ranking without attacks over its queries; the NMI is one figure of the gallery."""
    ranked = intervals({n: values[n].numpy() for n in _PER_QUERY}, seed=seed, percent=_PER_QUERY)[0]
    ranked["NMI"] = Interval(float(values["NMI"]), math.nan, math.nan)
    return {name: ranked[name]._asdict() for name in ("R@1", "R@2", "mAP", "NMI", "mAP@R")}


def _ers(overall: Interval, terms: dict[str, float], checks: Sequence[Check], plan: Plan) -> dict[str, Any]:
    """Describe the ERS, which is not valid if a check failed, nor with attacks of the user's own."""
    why = failures(checks)
    foreign = [goal for goal in plan.attacks if code_of(type(goal)) is not None]
    if names := [c.name for goal in foreign for c in goal.columns if c.name in COLUMNS]:
        why += f"{'; ' if why else ''}{', '.join(names)} is of an attack of the user's own"
    return {**overall._asdict(), "terms": terms, "valid": not why, "why": why}


def _mean(values: Values, column: Column, seed: int, resamples: int = 1000) -> Interval:
    """Average a column over queries, rounded as all scores of a record are."""
    if len(values) == 0:
        return Interval(math.nan, math.nan, math.nan)
    percent = [column.name] if column.unit == PERCENT else []
    return intervals({column.name: values}, seed=seed, resamples=resamples, percent=percent)[0][column.name]
