"""Checks of the attacks: that they kept to the budget and reached what cheaper ones reach."""

from __future__ import annotations

from dataclasses import replace

import torch

from robustmetric.attacks import Draws
from robustmetric.evaluation.checks.base import Findings, Verdict, beats, check, moved, point
from robustmetric.perturb import directions
from robustmetric.sphere import embed


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
    worst, which = 0.0, ""
    for a in findings.attacks:
        still, before = findings.again(a, some, none).values, findings.found[a.name]
        for column in a.columns:
            change = abs(moved(column, before[f"before/{column.name}"][some], still[column.name]))
            worst, which = max((worst, which), (change, column.name))
    says = "ε = 0 gives the clean scores" if worst <= 0.01 else f"ε = 0 moves {which} by {worst:.2f} points"
    return Verdict("pass" if worst <= 0.01 else "fail", worst, "clean scores within 0.01 points", says)


@check("one-step", 1, steps=4)
def _one_step(findings: Findings) -> Verdict:
    if findings.budget.steps == 1:
        return Verdict("not run", 0.0, "", "the attack has one step itself")
    some, single = findings.some, replace(findings.budget, steps=1)
    ahead, weaker = [], []
    for a in findings.attacks:
        step = findings.again(a, some, single).objective
        all_steps = findings.measured(a, some).objective
        ahead.append(step < all_steps - 1e-6)
        if beats(step, all_steps):
            weaker.append(a.name)
    share = float(torch.cat(ahead).double().mean())
    says = f"one step is better for {100 * share:.1f} % of the queries"
    if weaker:
        says += f", and on the mean of {', '.join(weaker)}: α or η does not suit ε"
    return Verdict("fail" if weaker else "pass", share, "the attack beats one step of ε on every mean", says)


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
    which = max(shares, key=lambda n: shares[n])
    share = shares[which]
    says = f"for {100 * share:.1f} % of the queries an earlier point was better by over 1 % of the way"
    says += f" ({which})" if share else ""
    return Verdict("pass" if share <= 0.01 else "warn", share, "at most 1 % of an attack's queries", says)


@check("noise", 1, steps=1)
def _noise(findings: Findings) -> Verdict:
    limit = "at most 0.5 % of an attack's queries, and no better mean objective"
    if findings.search.network is not None:
        return Verdict("not run", 0.0, limit, "the perturbations come from another network")
    some = findings.some
    shares, stronger = {}, []
    for a in findings.attacks:
        reached, noise = findings.measured(a, some).objective, []
        for numbers in findings.numbers[some].split(findings.plan.threat.batch):
            images, queries, target = findings.aimed(a, numbers)
            signs = Draws(findings.plan.threat.seed, f"{a.name}/noise", numbers.tolist()).signs(
                *images.shape[1:]
            )
            way = directions(signs, findings.budget.norm).to(images)
            noisy = (images + findings.budget.eps * way).clamp(0, 1)
            with torch.no_grad():
                z = embed(findings.view.model, noisy)
                noise.append(a.objective(z, target, queries, findings.view.gallery).cpu().double())
        there = torch.cat(noise)
        shares[a.name] = float((there < reached - 1e-6).double().mean())
        if beats(there, reached):
            stronger.append(a.name)
    which = max(shares, key=lambda n: shares[n])
    share = shares[which]
    says = f"random signs of size ε do better for {100 * share:.1f} % of the queries"
    says += f" ({which})" if share else ""
    if stronger:
        blamed = "gradients lead" if findings.search.follows_gradient else "the search leads"
        says += f", and on the mean of {', '.join(stronger)}: {blamed} nowhere"
        return Verdict("fail", share, limit, says)
    return Verdict("pass" if share <= 0.005 else "warn", share, limit, says)


@check("8-bit", 1)
def _eight_bit(findings: Findings) -> Verdict:
    limit, worst, which = point(len(findings.numbers)), 0.0, ""
    for a in findings.attacks:
        found = findings.found[a.name]
        for column in a.columns:
            if column.name not in a.read_early:
                change = abs(moved(column, found[f"after/{column.name}"], found[f"8-bit/{column.name}"]))
                worst, which = max((worst, which), (change, column.name))
    says = f"rounding to 8 bits moves no score by more than {worst:.2f} points"
    if worst > limit:
        says = f"rounding to 8 bits moves {which} by {worst:.2f} points: a saved image is another attack"
    return Verdict("pass" if worst <= limit else "warn", worst, f"at most {limit:.2g} points", says)


@check("masked", 1, suite=True)
def _masked(findings: Findings) -> Verdict:
    limit = "at most 1 % of a goal's queries beyond the reach of gradients"
    shares = {}
    for name, found in findings.worst.items():
        attempts = findings.attempts[name]
        blind = [k for k, attempt in enumerate(attempts) if not attempt.search.follows_gradient]
        end = findings.goal_column(name).success_value
        counted = ~found["before"].isnan()
        if len(blind) < len(attempts) and end is not None and counted.any():
            broken = torch.isin(found["by"], torch.tensor(blind)) & (found["worst"] == end)
            shares[name] = float(broken[counted].double().mean())
    if not shares:
        return Verdict("not run", 0.0, limit, "no suite with attacks of both kinds was run")
    which = max(shares, key=lambda n: shares[n])
    share = shares[which]
    says = f"attacks without gradients broke {100 * share:.1f} % that those with gradients left"
    says += f" ({which})" if share else ""
    least = point(len(findings.numbers)) / 100
    if share > max(0.05, least):
        return Verdict("fail", share, limit, f"{says}: gradients are masked")
    return Verdict("pass" if share <= max(0.01, least) else "warn", share, limit, says)
