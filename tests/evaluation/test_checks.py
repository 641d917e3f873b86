"""Every check passes where all is well, and finds the fault that was planted for it."""

import re
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.attacks import PGD, Attack, Column, Draws, Gallery, Problem, Queries, Target, Transfer
from robustmetric.evaluation import CHECKS, ERS_ATTACKS, Check, Record
from robustmetric.evaluation.checks import run_check
from robustmetric.perturb import Budget, frozen
from robustmetric.sphere import BrokenEmbeddingsError
from tests.evaluation.conftest import Evaluated, Tiny, make_network
from tests.helpers.masked import ByClass, Through, rounded
from tests.helpers.searches import Own

pytestmark = pytest.mark.kernels

Ask = Callable[..., Check]
Change = Callable[[nn.Module], nn.Module]

QUICK = ["collapse", "mode", "repeat", "seed", "batch-1", "gradient", "budget", "eps-0", "one-step", "last"]
QUICK += ["noise", "8-bit", "copies", "classes"]
FULL = [*QUICK, "eps-1", "eps-sweep", "steps", "black-box", "transfer"]


@pytest.fixture
def ask(tiny: Tiny) -> Ask:
    """Evaluate without checks, and then make a single one."""

    def make(name: str, model: nn.Module | None = None, level: str = "quick", **changes: Any) -> Check:
        settings = {"attacks": ["ES", "GTM"], "queries": 12, **changes}
        evaluation = tiny(model, **settings)
        evaluation.run()
        evaluation.plan = evaluation.plan.changed(checks=level)
        with frozen(evaluation.subject.model):
            check = run_check(name, evaluation)
        assert check.name == name
        assert check.says
        return check

    return make


def before(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda network: Through(network, before=change)


def after(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda network: Through(network, after=change)


def figure(check: Check) -> float:
    assert check.figure is not None
    return check.figure


def still(problem: Problem) -> Tensor:
    return problem.images.clone()


def descend(problem: Problem, **changes: Any) -> Tensor:
    return PGD()(replace(problem, start=problem.images + 1e-5 * problem.draws.normal(1, 6, 6), **changes))


# All is well


@pytest.fixture(scope="module")
def healthy(evaluated: Evaluated) -> Record:
    names = [str(k) for k in range(5)]
    return evaluated(
        attacks=["CA+", "ES", "GTM"], queries=16, checks="full", classes=names, train_classes=["a", "b"]
    )


@pytest.mark.parametrize("name", [n for n in FULL if n != "transfer"])
def test_a_healthy_evaluation_passes(healthy: Record, name: str) -> None:
    check = next(c for c in healthy.checks if c.name == name)
    assert check.status == "pass", check


@pytest.mark.parametrize("seed", range(4))
def test_a_healthy_network_is_not_said_to_mislead_the_attack(ask: Ask, network: nn.Module, seed: int) -> None:
    """Two local optima are as good as each other: that is no sign of gradients that mislead."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in network.parameters():
            p.copy_(torch.randn(p.shape, generator=generator) / 6)
    check = ask("transfer", network, queries=None, seed=seed)
    assert check.status != "fail", check


def test_each_set_of_checks_is_run_as_a_whole(tiny: Tiny, healthy: Record) -> None:
    assert [name for name in CHECKS if name != "masked"] == FULL, "that one is of the suite"
    few: dict[str, Any] = {"attacks": ["TMA"], "queries": 4, "steps": 2}
    assert [c.name for c in tiny(checks="none", **few).run().checks] == ["collapse"]
    record = tiny(checks="quick", **few).run()
    assert [c.name for c in record.checks] == QUICK
    assert [c.name for c in healthy.checks] == FULL
    assert {c.status for c in record.checks} <= {"pass", "warn", "fail", "not run"}


def test_checks_change_no_score(evaluated: Evaluated) -> None:
    few: dict[str, Any] = {"attacks": ["CA-", "ES"], "queries": 8, "steps": 3}
    plain, checked = evaluated(**few), evaluated(checks="quick", **few)
    assert plain.scores == checked.scores
    assert plain.arrays.sha256 == checked.arrays.sha256


def test_a_record_of_other_attacks_has_its_checks(evaluated: Evaluated) -> None:
    """Also of attacks that are not of the ten scores, and of one alone."""
    record = evaluated(attacks=["SP-QA+"], queries=6, steps=2, checks="full")
    assert [c.name for c in record.checks] == FULL
    by_name = {c.name: c.status for c in record.checks}
    assert by_name["eps-0"] == "pass"
    assert by_name["eps-1"] == "not run"
    assert by_name["eps-sweep"] == "pass"


@pytest.mark.parametrize("how", ["pgd", "nes", "transfer"])
def test_an_attack_made_again_is_the_one_that_was_measured(tiny: Tiny, network: nn.Module, how: str) -> None:
    """So that what checks compare with it is compared with the same."""
    other = nn.Sequential(nn.Flatten(), nn.Linear(36, 16))
    search: Any = {"pgd": "pgd", "nes": "nes(samples=3)", "transfer": Transfer(surrogate=other)}[how]
    evaluation = tiny(network, search=search, attacks=["CA+", "GTM", "QA-"], queries=10)
    evaluation.run()
    some = torch.tensor([1, 4, 7])
    with frozen(network), frozen(other):
        for a in evaluation.plan.attacks:
            measured, again = evaluation.measured(a, some), evaluation.again(a, some)
            assert measured.values.keys() == again.values.keys() == {a.name}
            for mine, wanted in ((again.values[a.name], measured.values[a.name]), (again[1], measured[1])):
                torch.testing.assert_close(mine.double(), wanted, rtol=0, atol=1e-5, msg=a.name)


# Planted faults, in the order of the checks


@pytest.mark.parametrize("protocol", ["strict", "reference"])
def test_collapse_scores_well_and_is_not_valid(
    protocol: str, evaluated: Evaluated, network: nn.Module
) -> None:
    class Constant(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return 0 * x.flatten(1)[:, :4] + torch.tensor([1.0, 2.0, 3.0, 4.0])

    near = Through(network, after=lambda z: z + 1.5)
    for model, cosine in ((Constant(), "1.000"), (near, "0.9")):
        record = evaluated(model, protocol=protocol, steps=2)  # without checks it is looked at all the same
        assert [(check.name, check.status) for check in record.checks] == [("collapse", "fail")]
        assert f"all images lie in one direction, with a mean cosine of {cosine}" in record.checks[0].says
        assert record.ers is not None
        assert (record.ers.valid, record.ers.why) == (False, record.checks[0].says)
        assert cosine == "0.9" or record["ERS"] > 20


@pytest.mark.slow
def test_collapse_of_the_ranking_to_chance(evaluated: Evaluated, labels: Tensor) -> None:
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    record = evaluated(labels=labels[order], steps=2, checks="quick")
    assert record["R@1"] < 40
    assert record.checks[0].status == "fail"
    assert f"R@1 is {record['R@1']:.1f}, near chance" in record.checks[0].says
    # 8 images of each class: 7 of the 39 others are right by chance.
    assert "(chance is 17.9)" in record.checks[0].limit
    assert record.ers is not None
    assert not record.ers.valid
    fine = evaluated(checks="quick")
    assert fine.ers is not None
    assert fine.ers.valid
    assert fine.ers.why == ""


class Stubborn(nn.Module):
    """Switches itself to training mode."""

    def forward(self, x: Tensor) -> Tensor:
        self.training = True
        return x


def chance() -> Callable[[Tensor], Tensor]:
    """Return a dropout that nothing switches off."""
    generator = torch.Generator().manual_seed(0)
    return lambda z: z * (torch.rand(z.shape, generator=generator) < 0.9) / 0.9


SHORT = Budget(eps=0.01, alpha=0.005, steps=2)
LONG = Budget(eps=0.1, alpha=0.1, steps=2)
TOO_SHORT = Own(way=lambda p: descend(p, budget=p.budget if p.budget.steps == 1 else SHORT))
LOST = Own(way=lambda p: p.images if p.budget.eps > 0.3 else descend(p))
ASTRAY = Own(way=lambda p: descend(p, objective=lambda x, rows: -p.objective(x, rows)))
NUDGED = Own(way=lambda p: p.images + 1e-4 * (0.5 - p.images))
STILL = Own(way=still)
SWITCHED: Change = lambda net: nn.Sequential(net, Stubborn())  # noqa: E731


@pytest.mark.parametrize(
    ("name", "change", "how", "status", "least", "says"),
    [
        ("mode", SWITCHED, {}, "fail", 1, "in training mode: 1"),
        ("repeat", after(chance()), {}, "fail", 1e-2, "answers at random"),
        ("batch-1", before(lambda x: x - 0.3 * x.mean(0, keepdim=True)), {}, "fail", 1e-3, "batch it is in"),
        ("gradient", before(rounded), {}, "fail", 1, "of 12 queries 12 have a zero gradient, 0 one of NaN"),
        ("eps-0", None, {"search": Own(way=lambda p: descend(p, budget=LONG))}, "fail", 1, "moves GTM by"),
        ("one-step", None, {"alpha": 1e-4, "steps": 3}, "fail", 0.9, "on the mean of ES, GTM: α or η"),
        # A step across the whole ball and back: an even number of them ends where it does no good.
        ("one-step", None, {"alpha": 1.0, "steps": 2, "eps": 0.5, "attacks": ["GTM"]}, "fail", 0, ""),
        ("one-step", None, {"steps": 1}, "not run", 0, ""),
        # One query is too few to call an attack weaker, and what moves nothing is as weak in one step.
        ("one-step", None, {"queries": 1, "search": TOO_SHORT}, "pass", 0, ""),
        ("one-step", None, {"search": TOO_SHORT}, "fail", 0, ""),
        ("one-step", None, {"search": STILL}, "pass", 0, ""),
        ("noise", None, {"search": STILL}, "fail", 0.3, ""),
        ("noise", None, {"search": NUDGED}, "fail", 0.3, ""),
        ("noise", before(rounded), {}, "fail", 0, ""),
        (
            "noise",
            None,
            {"search": Transfer(surrogate=make_network(), search=STILL)},
            "not run",
            0,
            "another",
        ),
        ("eps-1", None, {}, "pass", 0, ""),
        ("eps-1", before(rounded), {}, "fail", 50, "so its gradients lead nowhere"),
        ("eps-1", before(rounded), {"queries": 7}, "not run", 0, ""),
        ("eps-1", None, {"search": Own(way=lambda p: descend(p, budget=SHORT))}, "fail", 50, "lead nowhere"),
        ("eps-sweep", None, {"search": LOST, "eps": 0.25, "alpha": 0.1}, "fail", 5, "at 2 ε is"),
        ("steps", None, {"eps": 0.5, "alpha": 0.05, "steps": 2, "queries": None}, "warn", 0, "not converged"),
        ("steps", None, {"steps": 16}, "pass", 0, ""),
        ("black-box", None, {"search": STILL}, "fail", 1, "of ES, GTM: gradients mislead the attack"),
        ("black-box", None, {"search": "nes(samples=2)", "steps": 1}, "not run", 0, ""),
        # Steps of a hundredth: flat for a gradient, and not for differences over sigma.
        ("black-box", before(lambda x: (x * 100).round() / 100), {}, "fail", 0, ""),
        ("transfer", None, {"search": ASTRAY, "attacks": ["GTM"]}, "fail", 1, "100.0 % of the queries"),
        ("transfer", None, {"search": "spsa(samples=2)", "steps": 1}, "not run", 0, ""),
    ],
)
def test_a_planted_fault_is_found(
    name: str,
    change: Change | None,
    how: dict[str, Any],
    status: str,
    least: float,
    says: str,
    ask: Ask,
    network: nn.Module,
) -> None:
    check = ask(name, network if change is None else change(network), **how)
    assert check.status == status, check
    assert says in check.says
    if least:
        assert figure(check) >= least


def test_seed_of_a_search_that_draws_from_elsewhere(ask: Ask) -> None:
    generator = torch.Generator().manual_seed(0)

    def wild(problem: Problem) -> Tensor:
        noise = torch.randn(problem.images.shape, generator=generator).sign()
        return (problem.images + problem.budget.eps * noise).clamp(0, 1)

    check = ask("seed", search=Own(way=wild))
    assert (check.status, check.says) == ("fail", "the same seed gives other scores")


def test_batch_1_of_a_search_that_looks_at_the_whole_batch(ask: Ask) -> None:
    def together(problem: Problem) -> Tensor:
        return descend(problem) if len(problem.images) > 1 else problem.images

    assert ask("batch-1", search=Own(way=together), eps=0.5, alpha=0.1).status == "pass"
    check = ask("batch-1", search=Own(way=together), level="full", eps=0.5, alpha=0.1)
    assert check.status == "warn"
    assert "attacked one by one, a score moves by" in check.says


def test_gradient_of_some_queries_alone_is_missing(ask: Ask, network: nn.Module, images: Tensor) -> None:
    dark = images.clone()
    dark[5] = 0

    def hide(x: Tensor) -> Tensor:
        return torch.where((x.flatten(1).amax(1) < 0.1)[:, None, None, None], x.detach(), x)

    check = ask(
        "gradient", Through(network, before=hide), images=dark, queries=None, attacks=["GTM"], steps=1
    )
    assert (check.status, check.figure) == ("fail", 1 / 40)
    assert "of 40 queries 1 have a zero gradient" in check.says


@dataclass(frozen=True, kw_only=True)
class Plateau(Attack):
    """Flat wherever an image can be: its gradient is zero, though the network has one."""

    name: ClassVar[str] = "plateau"
    columns: ClassVar[tuple[Column, ...]] = (Column("plateau", "higher"),)
    height: float

    def select(self, queries: Queries, gallery: Gallery, *, draws: Draws) -> Tensor:
        return queries.own[:, None]

    def objective(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> Tensor:
        return self.height + (z.sum(1) - 99).clamp_min(0)

    def measure(self, z: Tensor, target: Target, queries: Queries, gallery: Gallery) -> dict[str, Tensor]:
        return {"plateau": self.objective(z, target, queries, gallery)}


def test_gradient_of_an_attack_that_has_none_where_it_starts(ask: Ask) -> None:
    check = ask("gradient", attacks=["ES", Plateau(height=1.0)])
    assert (check.status, check.figure) == ("fail", 1.0)
    # A hinge that is closed has nothing left to do.
    assert ask("gradient", attacks=["ES", Plateau(height=0.0)]).status == "pass"


def broken_root(x: Tensor) -> Tensor:
    """Nothing but zero, with a slope of infinity times zero."""
    return x + (x - x.detach()).sqrt()


def test_gradient_that_is_no_number(ask: Ask, network: nn.Module) -> None:
    model = Through(network, before=broken_root)
    with pytest.raises(BrokenEmbeddingsError, match="the gradient of the images holds NaN or infinity"):
        ask("gradient", model)
    check = ask("gradient", model, search="nes(samples=2)", steps=1)
    assert check.status == "fail"
    assert "12 one of NaN or infinity" in check.says


def test_gradient_of_a_network_that_has_none(ask: Ask, tiny: Tiny, network: nn.Module) -> None:
    model = Through(network, after=lambda z: z.detach())
    with pytest.raises(ValueError, match="the embeddings do not depend on the images"):
        ask("gradient", model)
    check = ask("gradient", model, search="spsa(samples=2)", steps=1)
    assert (check.status, check.says) == ("warn", "the network has no gradient; it was attacked without")
    check = ask("gradient", model, search=Transfer(surrogate=network), steps=1)
    assert check.status == "warn"
    evaluation = tiny(model, search="spsa(samples=2)", steps=1, attacks=["ES"], queries=4)
    evaluation.run()
    evaluation.threat = replace(evaluation.threat, search=PGD())
    with frozen(model):
        check = run_check("gradient", evaluation)
    assert check.status == "fail"
    assert "there is no gradient: the embeddings do not depend on the images" in check.says


@pytest.mark.parametrize(
    ("too_far", "says"),
    [
        (lambda x, eps: (x + 1.01 * eps).clamp(0, 1), r"the largest change is ε \+6\.3e-04"),
        (lambda x, eps: x + eps, "pixels leave [^ ]* [^ ]* by 6.3e-02"),
        (lambda x, eps: x - eps, "pixels leave [^ ]* [^ ]* by 6.3e-02"),
        (
            lambda x, eps: (x + 10 * eps * (torch.arange(36) == 7).view(6, 6)).clamp(0, 1),
            r"ε \+[2-9]\.\de-01",
        ),
    ],
)
def test_budget_that_a_search_leaves(ask: Ask, too_far: Callable[[Tensor, float], Tensor], says: str) -> None:
    check = ask("budget", search=Own(way=lambda p: too_far(p.images, p.budget.eps)), queries=None)
    assert check.status == "fail"
    assert re.search(says, check.says), check.says
    inside = ask("budget", search=Own(way=lambda p: (p.images + p.budget.eps).clamp(0, 1)), queries=None)
    assert inside.status == "pass"


@pytest.mark.parametrize(
    ("beaten", "queries", "status"),
    [(0, 40, "pass"), (1, 40, "warn"), (20, 40, "warn"), (36, 40, "fail"), (1, 8, "warn"), (8, 8, "fail")],
)
def test_noise_and_last_judge_each_attack_by_itself(
    tiny: Tiny, beaten: int, queries: int, status: str
) -> None:
    """One attack that fails is not hidden by eight that do not."""
    evaluation = tiny(attacks=ERS_ATTACKS, queries=queries)
    evaluation.run()
    low = torch.full((queries,), -9.0).double()
    high = torch.where(torch.arange(queries) < beaten, 9.0, low)
    planted = {
        name: {**found, "objective/last": high if name == "QA+" else low, "objective/best": low}
        for name, found in evaluation.found.items()
    }
    vars(evaluation)["found"] = planted
    with frozen(evaluation.subject.model):
        noise, last = run_check("noise", evaluation), run_check("last", evaluation)
    assert noise.status == status
    assert last.status == ("warn" if beaten else "pass")
    for check in (noise, last):
        assert check.figure == beaten / queries
        assert ("(QA+)" in check.says) == (beaten > 0)


def test_8_bit_images_are_another_attack_than_what_was_found(ask: Ask, network: nn.Sequential) -> None:
    """The network looks at what lies between two grey levels, where ε is."""

    def fine(x: Tensor) -> Tensor:
        return x + torch.sin(2 * torch.pi * 255 * x)

    model = Through(network, before=fine)
    settings: dict[str, Any] = {"eps": 0.4 / 255, "alpha": 0.1 / 255, "queries": None}
    check = ask("8-bit", model, **settings)
    assert check.status == "warn"
    assert "rounding to 8 bits moves ES:" in check.says
    assert ": a saved image is another attack" in check.says
    # Whole grey levels stay what they are.
    assert ask("8-bit", model, eps=2 / 255, alpha=1 / 255, queries=None).status == "pass"
    assert ask("8-bit", network, **settings).status == "pass"


def test_copies_in_the_gallery_are_counted(ask: Ask, images: Tensor, labels: Tensor) -> None:
    few: dict[str, Any] = {"attacks": ["TMA"], "steps": 1, "queries": 4}
    copied = images.clone()
    copied[5] = copied[0]  # of the same class
    copied[10] = copied[0]
    copied[7] = copied[4]  # of another one
    check = ask("copies", images=copied, **few)
    assert (check.status, check.figure) == ("warn", 3)
    assert check.says == (
        "3 images are exact copies of another, 1 of another class: image 7 = image 4, image 5 = image 0, "
        "image 10 = image 0"
    )
    copied[5, 0, 2, 2] = copied[5, 0, 2, 2] * 0.99
    assert ask("copies", images=copied, **few).figure == 2
    # Copies among the queries are none in a gallery of its own, but a query in it is.
    other = images * 0.9
    assert ask("copies", images=copied, gallery=(other, labels), **few).status == "pass"
    assert ask("copies", images=other, gallery=(copied, labels), **few).figure == 2
    other[[1, 2]] = images[[3, 4]]
    check = ask("copies", gallery=(other, labels), **few)
    assert (check.status, check.figure) == ("fail", 2)
    assert check.says.endswith("find themselves: image 3 = gallery image 1, image 4 = gallery image 2")


def test_classes_that_were_trained_on(ask: Ask) -> None:
    few: dict[str, Any] = {"attacks": ["TMA"], "steps": 1, "queries": 4}
    names = ["crow", "gull", "jay", "tern", "wren"]
    assert ask("classes", **few).status == "not run"
    assert ask("classes", classes=names, **few).status == "not run"
    assert ask("classes", classes=names, train_classes=["finch"], **few).status == "pass"
    check = ask("classes", classes=names, train_classes=["finch", "wren", "gull"], **few)
    assert (check.status, check.figure) == ("warn", 2)
    assert check.says == "2 of 5 classes were trained on: the scores are of known classes"


def test_eps_1_is_not_passed_by_the_one_attack_that_succeeds(ask: Ask, images: Tensor) -> None:
    middle = torch.stack([images[k::5].mean(0).flatten() for k in range(5)])
    far = Own(way=lambda p: descend(p, budget=replace(p.budget, eps=0.05)))
    check = ask("eps-1", ByClass(middle), attacks=["ES", "LTM", "GTM", "GTT"], search=far)
    assert check.status == "fail"
    assert figure(check) == 100


def test_transfer_finds_gradients_that_only_this_network_hides(ask: Ask, network: nn.Module) -> None:
    """A sibling, with weights a little off, does not hide them."""

    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = network
            self.key = nn.Parameter(torch.tensor([0.5, 0.25]))

        def forward(self, x: Tensor) -> Tensor:
            hides = bool((self.key == torch.tensor([0.5, 0.25])).all())
            z: Tensor = self.inner(rounded(x) if hides else x)
            return z

    check = ask("transfer", Masked())
    assert check.status == "fail", check
    assert figure(check) > 0.9


def test_a_network_that_takes_no_single_image_fails_the_check_of_one() -> None:
    class Batches(nn.Flatten):
        def forward(self, x: Tensor) -> Tensor:
            if len(x) == 1:
                raise ValueError("at least two")
            return super().forward(x)

    images, labels = torch.rand(24, 1, 4, 4), torch.arange(24) % 4
    record = rm.evaluate(Batches(), images, labels, queries=8, batch=4, steps=2, attacks=["ES"])
    (check,) = [check for check in record.checks if check.name == "batch-1"]
    assert check.status == "fail"
    assert "at least two" in check.says
