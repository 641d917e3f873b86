"""Checks of the network: that it answers the same each time, ranks at all, and has gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from robustmetric.attacks import Draws
from robustmetric.errors import UserError
from robustmetric.evaluation.attack import embed_all
from robustmetric.evaluation.checks.base import Findings, Verdict, check, moved, shorter
from robustmetric.gallery import count_mates
from robustmetric.perturb import differentiate
from robustmetric.sphere import embed


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
    if cosine > 0.95:
        return Verdict(
            "fail",
            cosine,
            limit,
            f"collapsed, or near it: all images lie in one direction, with a mean cosine of {cosine:.3f}",
        )
    if findings.recall < least:
        return Verdict(
            "fail", cosine, limit, f"R@1 is {findings.recall:.1f}, near chance: there is no ranking to keep"
        )
    return Verdict(
        "pass", cosine, limit, f"the mean cosine of two images is {cosine:.3f}, R@1 {findings.recall:.1f}"
    )


@check("mode", 1)
def _mode(findings: Findings) -> Verdict:
    numbers = findings.numbers[findings.sample(4)]
    embed_all(findings.view.model, findings.view.images, numbers, 4)
    training = [name or type(m).__name__ for name, m in findings.view.model.named_modules() if m.training]
    says = (
        f"in training mode: {', '.join(training[:5])}" if training else "all modules are in evaluation mode"
    )
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
    short = shorter(findings.budget, 8)
    for a in attacks:
        first, second = (findings.again(a, some, short) for _ in range(2))
        apart = max(apart, float((first.objective - second.objective).abs().nan_to_num().max()))
        for name, value in first.values.items():
            apart = max(apart, float((value - second.values[name]).abs().nan_to_num().max()))
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
            moves += [abs(moved(c, many.values[c.name], one.values[c.name])) for c in a.columns]
        limit += ", scores within a query"
        if max(moves) > 100 / len(some) + 1e-9:
            return Verdict(
                "warn", max(moves), limit, f"attacked one by one, a score moves by {max(moves):.1f} points"
            )
    return Verdict("pass", apart, limit, "images one by one are embedded as in a batch")


@check("gradient", 1, steps=3)
def _gradient(findings: Findings) -> Verdict:
    parts = findings.numbers[findings.some].split(findings.plan.threat.batch)
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
    generator = torch.Generator().manual_seed(findings.plan.threat.seed)
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
        start = a.start(images, draws=Draws(findings.plan.threat.seed, f"{a.name}/search", numbers.tolist()))
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
