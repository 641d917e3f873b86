"""Evaluate a network: how well it ranks, and how well it keeps its ranking under attack."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robustmetric.attacks import PERCENT, Attack
from robustmetric.errors import UserError
from robustmetric.evaluation.attack import NetworkView, attack_block, embed_all
from robustmetric.evaluation.checks import CHECKS, Check, Findings, run_check
from robustmetric.evaluation.data import Data, Subject, data_of
from robustmetric.evaluation.ers import COLUMNS, Values
from robustmetric.evaluation.identity import code_of, versions
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.intervals import Interval, intervals
from robustmetric.evaluation.job import Job, Piece, Progress, Tensors, Tick
from robustmetric.evaluation.plan import Plan, check_title, plan_of
from robustmetric.evaluation.record import FORMAT, Record, described, failures
from robustmetric.evaluation.suite import Attempt, run_ensemble
from robustmetric.evaluation.threat import Threat
from robustmetric.evaluation.worst import Suite, build_suite
from robustmetric.retrieval import nmi, rank

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


class Evaluation(Job[Record]):
    """An evaluation in pieces: the network and data of `subject`, attacked and judged as `plan` says.

    `out`, `progress` and `report` are those of every `Job`.

    >>> import torch
    >>> subject = Subject(nn.Flatten(), Data(torch.rand(20, 1, 8, 8), torch.arange(20) % 4))
    >>> list(Evaluation(subject, Plan.make(attacks=["ES", "GTM"], checks="none")).stages)
    ['embed', 'retrieval', 'ES', 'GTM', 'checks']
    """

    form = FORMAT

    def __init__(
        self,
        subject: Subject,
        plan: Plan,
        out: str | Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        super().__init__(out, progress, report)
        self.threat = replace(plan.threat, search=plan.search_on(subject.surrogate))
        if subject.surrogate is None and self.threat.search.network is not None:
            subject = replace(subject, surrogate=self.threat.search.network)
        subject.data.check(plan.settings.queries)
        _check_fits(plan, subject.data)
        self.subject, self.plan = subject, plan
        self.numbers = plan.draw(len(subject.data.images))

    def describe(self) -> dict[str, Any]:
        """Return all that the record depends on, in JSON's types."""
        return {**self.plan.describe(), **self.subject.identity(), "versions": versions()}

    def probe(self) -> None:
        """Try the networks on a batch, so that one that fails leaves no trace."""
        other, search = self.subject.surrogate, self.threat.search
        self.subject.probe(
            self.plan.threat.batch,
            gradient=search.differentiates(self.subject.model),
            of_surrogate=other is not None and (search.differentiates(other) or self.plan.suite is not None),
        )

    def frozen(self) -> ExitStack:
        """Hold the networks in evaluation mode, frozen."""
        return self.subject.frozen()

    @cached_property
    def pieces(self) -> tuple[Piece, ...]:
        """All pieces: embeddings, the ranking, attacks and goals by blocks of queries, and checks."""
        threat, found = self.threat, []
        networks = {"embed": self.subject.model, "surrogate": self.subject.surrogate}
        for kind, model in networks.items():
            for k, part in enumerate(torch.arange(len(self.subject.data.every)).split(EMBEDDED)):
                if model is not None:
                    file, make = f"{kind}-{k:05d}.safetensors", partial(self._embed, model, part)
                    found.append(Piece("embed", 0, file, make, len(part), len(part)))
        # Attacks rank all images, and checks compare with all attacks.
        found.append(Piece("retrieval", 1, "retrieval.safetensors", self._rank, 0))
        evaluations = threat.search.num_evaluations(threat.budget)
        for place, goal in enumerate(self.plan.attacks):
            for k, numbers in enumerate(self.numbers.split(threat.batch)):
                cost = len(numbers) * (search_cost(threat) + 2)
                file = f"attack-{place:02d}-{k:05d}.safetensors"
                found.append(
                    Piece(goal.name, 1, file, partial(self._attack, goal, numbers), cost, evaluations)
                )
        for place, goal in enumerate(self.goals):
            threats = [
                replace(self.suite_threat, search=attempt.search) for attempt in self.attempts[goal.name]
            ]
            each = sum(search_cost(threat) + 1 for threat in threats)
            evaluations = _SUITE * sum(t.search.num_evaluations(t.budget) for t in threats)
            for k, numbers in enumerate(self.numbers.split(_SUITE * threat.batch)):
                file, make = f"suite-{place:02d}-{k:05d}.safetensors", partial(self._try, goal, numbers)
                found.append(Piece(f"worst {goal.name}", 1, file, make, len(numbers) * each, evaluations))
        found += [
            Piece("checks", 2, _check_file(name), partial(self._check, name), self._cost_of_check(name))
            for name in self.plan.check_names
        ]
        return tuple(found)

    @property
    def goals(self) -> tuple[Attack, ...]:
        """The goals of the suite."""
        return () if self.plan.suite is None else self.plan.suite.wanted

    @cached_property
    def attempts(self) -> dict[str, tuple[Attempt, ...]]:
        """The attacks of the suite by goal: they know as much of the network as the search does."""
        suite, network, white = self.plan.suite, self.subject.surrogate, self.threat.search.follows_gradient
        return {g.name: suite.attempts(g, surrogate=network, gradient=white) for g in self.goals if suite}

    @property
    def suite_threat(self) -> Threat:
        """The threat in steps of the suite."""
        steps = self.threat.budget.steps if self.plan.suite is None else self.plan.suite.steps
        return replace(self.threat, budget=replace(self.threat.budget, steps=steps))

    @cached_property
    def view(self) -> NetworkView:
        """The network under attack and its embeddings."""
        return self._view(self.subject.model, "embed-")

    @cached_property
    def other(self) -> NetworkView | None:
        """The surrogate and its embeddings, if there is one."""
        network = self.subject.surrogate
        return None if network is None else self._view(network, "surrogate-")

    @property
    def surrogate(self) -> NetworkView | None:
        """The network that perturbations are searched on, and its embeddings, if it is another one."""
        return None if self.threat.search.network is None else self.other

    @cached_property
    def found(self) -> dict[str, Tensors]:
        """What each attack found for all queries: see `attack_block`."""
        return {goal.name: self.joined(goal.name) for goal in self.plan.attacks}

    @cached_property
    def worst(self) -> dict[str, Tensors]:
        """What the suite made of all queries, by goal: see `run_ensemble`."""
        return {goal.name: self.joined(f"worst {goal.name}") for goal in self.goals}

    @cached_property
    def findings(self) -> Findings:
        """What checks work with."""
        return Findings(
            self.subject,
            self.plan,
            self.threat.search,
            self.view,
            self.surrogate,
            self.numbers,
            found=self.found,
            worst=self.worst,
            attempts=self.attempts,
            recall=float(self.joined("retrieval")["R@1"].mean()),
        )

    def embed(self) -> None:
        """Make the embeddings alone; call it inside `frozen`."""
        for piece in self.stages["embed"]:
            if not self.has(piece):
                self.keep(piece, piece.make(lambda count=1: None))
            self.tell("embed")

    def _view(self, model: nn.Module, kind: str) -> NetworkView:
        z = [self.get(piece)["z"] for piece in self.stages["embed"] if piece.file.startswith(kind)]
        return self.subject.view(model, torch.cat(z))

    def _embed(self, model: nn.Module, part: Tensor, tick: Tick) -> Tensors:
        return {"z": embed_all(model, self.subject.data.every, part, self.plan.threat.batch, tick).cpu()}

    def _rank(self, tick: Tick) -> Tensors:
        """Rank the gallery for every image: values of each query that has an answer, and the NMI."""
        queries, gallery = self.view.queries, self.view.gallery
        if self.subject.data.gallery is None:
            found = rank(gallery.z, gallery.labels, cameras=gallery.cameras)
        else:
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
        return run_check(name, self.findings).model_dump(mode="json")

    def _cost_of_check(self, name: str) -> int:
        """Return the passes of the attacks that a check repeats."""
        run = CHECKS.find(name)[0]
        again = getattr(run, "again", 0) * search_cost(self.threat)
        queries = min(256 if self.plan.level == "full" else 64, len(self.numbers))
        return queries * len(self.plan.attacks) * (getattr(run, "steps", 0) + again)

    def build(self) -> tuple[dict[str, Any], Tensors]:
        """Return the entries of the record and its per-query values."""
        plan, settings, data = self.plan, self.plan.settings, self.subject.data
        retrieval, checks = (
            self.joined("retrieval"),
            [Check(**self.get(piece)) for piece in self.stages["checks"]],
        )
        group = None
        if settings.protocol == "reference":
            group = 128 if data.fingerprint.shape[1:] == [28, 28] else 112
        arrays = {"number": self.numbers}
        after: dict[str, Values] = {}
        before: dict[str, Values] = {}
        for goal in plan.attacks:
            found = self.found[goal.name]
            arrays |= {f"{goal.name}/{n}": v for n, v in found.items() if n != "number"}
            after |= {c.name: found[f"after/{c.name}"].numpy() for c in goal.columns}
            before |= {c.name: found[f"before/{c.name}"].numpy() for c in goal.columns}
        arrays |= {f"retrieval/{n}": v for n, v in retrieval.items() if n not in ("NMI", "left_out")}
        suite: Suite | None = None
        worst: Tensors = {}
        if plan.suite is not None:
            beside = plan.attacks if settings.protocol == "strict" else ()
            suite, worst = build_suite(
                plan.suite, self.worst, self.attempts, self.suite_threat.budget, after, beside, settings.seed
            )
        shares = [name for name in after if plan.columns[name].unit == PERCENT]
        scores, overall, terms = intervals(
            after, group=group, protocol=settings.protocol, seed=settings.seed, percent=shares
        )
        clean, _, _ = intervals(
            before, group=group, protocol=settings.protocol, seed=settings.seed, resamples=1
        )
        made = {
            **described(self.subject),
            "settings": settings,
            "queries": {
                "count": len(self.numbers),
                "of": len(data.images),
                "left_out": int(retrieval["left_out"]),
            },
            "retrieval": _retrieval(retrieval, settings.seed),
            "scores": {
                name: {
                    **interval._asdict(),
                    "before": clean[name].value,
                    "better": plan.columns[name].better,
                    "unit": plan.columns[name].unit.name,
                }
                for name, interval in scores.items()
            },
            "ers": None if overall is None else _ers(overall, terms, checks, plan),
            "suite": suite,
            "checks": checks,
            "versions": versions(),
        }
        return made, arrays | worst


def search_cost(threat: Threat) -> int:
    """Return how many passes of an image the search of a `threat` takes; a pass back counts twice."""
    return threat.search.num_evaluations(threat.budget) * (3 if threat.search.follows_gradient else 1)


def _check_fits(plan: Plan, data: Data) -> None:
    """Refuse a plan that does not go with the data."""
    for told, given, instead in (
        ("knows no cameras", data.cameras, "leave the cameras out"),
        ("takes the nearest image for the query itself", data.gallery, "leave the gallery out"),
    ):
        if given is not None and plan.settings.protocol == "reference":
            raise UserError(
                f"the reference protocol {told}: use the strict protocol, or {instead}", parameter="protocol"
            )
    for attack in plan.attacks:
        attack.check_fits(len(data.ranked.labels))
    for goal in () if plan.suite is None else plan.suite.wanted:
        try:
            goal.check_fits(len(data.ranked.labels))
        except UserError as error:
            raise UserError(f"goal {goal.name} of the suite: {error}", parameter="suite") from None


def _check_file(name: str) -> str:
    return f"check-{re.sub(r'[^A-Za-z0-9.+-]', '_', check_title(name))}.json"


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
