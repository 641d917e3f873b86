"""Checks that take as long as the evaluation: other budgets, more steps, attacks that know less."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor

from robustmetric.attacks import APGD, NES, PGD, SPSA, Column, Search, Square
from robustmetric.evaluation.attack import NetworkView
from robustmetric.evaluation.checks.base import Findings, Measured, Verdict, beats, check, moved, point

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
        reached = findings.again(a, some, free).values
        for column in a.columns:
            if column.term is not None:
                left[column.name] = min(100.0, float(column.term(reached[column.name].nanmean().numpy())))
    if not left:
        return Verdict("not run", 0.0, "", "no score with points of 100 was measured")
    judged = [n for n in left if findings.plan.columns[n].conclusive] or list(left)
    which = max(judged, key=lambda n: left[n])
    says = f"with ε = {_widest(findings):.4g}, {which} leaves {left[which]:.1f} points"
    if left[which] > 50:
        says += ": an attack that may do anything does not succeed, so its gradients lead nowhere"
    limit = "at most 50 points left of any score"
    return Verdict("pass" if left[which] <= 50 else "fail", left[which], limit, says)


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
            now = findings.measured(a, some) if times == 1 else findings.again(a, some, budget)
            for column in a.columns:
                if before is None or column.better is None:
                    continue
                rise = _points(column, now.values[column.name])
                rise = rise - _points(column, before.values[column.name])
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
    limit, worst, which = point(len(some)), 0.0, ""
    twice = replace(findings.budget, steps=2 * findings.budget.steps)
    for a in findings.attacks:
        once, longer = findings.measured(a, some).values, findings.again(a, some, twice).values
        for column in a.columns:
            change = abs(moved(column, once[column.name], longer[column.name]))
            worst, which = max((worst, which), (change, column.name))
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
    generator = torch.Generator().manual_seed(findings.plan.threat.seed)
    with torch.no_grad():
        for p in sibling.parameters():
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float32).to(p)
            p.add_(noise * 0.05 * (p.std() if p.numel() > 1 else p.abs().mean()))
    search = PGD() if findings.budget.norm == "linf" else APGD()
    return _against(
        findings, [(search, findings.view.seen_by(sibling, findings.plan.threat.batch))], "transfer"
    )


def _against(findings: Findings, others: list[tuple[Search, NetworkView | None]], what: str) -> Verdict:
    """Compare the attack with searches that know less."""
    limit = "no better mean objective than with gradients, beyond sampling error"
    if not findings.search.follows_gradient:
        return Verdict("not run", 0.0, limit, f"the attack was {findings.search.name} itself")
    chosen = [a for a in findings.attacks if a.name in _SPEAK_FOR_ALL] or findings.attacks[:1]
    some = findings.sample(16)
    better, stronger = [], []
    for a in chosen:
        white = findings.measured(a, some).objective
        for search, surrogate in others:
            other = findings.again(a, some, None, search, surrogate=surrogate).objective
            better.append(other < white - 1e-6)
            if beats(other, white):
                stronger.append(a.name)
    share = float(torch.cat(better).double().mean())
    says = f"{what} does better for {100 * share:.1f} % of the queries"
    if stronger:
        says += f", and on the mean of {', '.join(dict.fromkeys(stronger))}: gradients mislead the attack"
    return Verdict("fail" if stronger else "pass", share, limit, says)


def _widest(findings: Findings) -> float:
    """Return the ε at which a perturbation may do anything: 1 a pixel, or the length of all pixels."""
    pixels = math.prod(findings.fingerprint.shape)
    return 1.0 if findings.budget.norm == "linf" else math.sqrt(pixels)


def _points(column: Column, value: Tensor) -> Tensor:
    """Bring single queries' values to points that rise with robustness; not clamped, for their mean is."""
    if column.term is not None:
        return torch.as_tensor(column.term(value.numpy()))
    return value * (column.unit.points if column.better == "higher" else -column.unit.points)
