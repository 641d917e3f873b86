"""Samplers, destinations, terms and defenses of the user's own: by a registered name and from a file."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.defenses import HardnessManipulation
from robustmetric.defenses.base import Network
from robustmetric.destination import Gradual
from robustmetric.losses import Term
from robustmetric.registry import registry
from robustmetric.triplets import Batch, Sampler, Softhard, Triplets

FILE = '''
from dataclasses import dataclass
from typing import NamedTuple
import torch
import robustmetric as rm
from robustmetric.defenses import HardnessManipulation
from robustmetric.destination import Destination
from robustmetric.losses import Term
from robustmetric.triplets import Random, Sampler

class Nearest(Sampler):
    """Counts its calls."""
    def __init__(self, k=1):
        self.k, self.calls = k, 0
    def draw(self, batch, *, generator):
        self.calls += 1
        return Random()(batch, generator=generator)

@dataclass(frozen=True, slots=True)
class Slotted(Sampler):
    k: int = 1
    def draw(self, batch, *, generator):
        return Random()(batch, generator=generator)

def drawn(k=1):
    return Slotted(k)

class Margin(Sampler):
    def __init__(self, margin):
        self.margin = margin
    def draw(self, batch, *, generator):
        return Random()(batch, generator=generator)

class Harder(Destination):
    def __init__(self, k=1, text="a"):
        super().__init__()
        self.k, self.text = k, text
    def hardness(self, mined, *, generator):
        return mined.hardness + 0.1 * self.k

def harder(k=3):
    return Harder(k)

class Pull(Term):
    roles = ("a", "a~")
    def __init__(self, weight=0.5):
        self.weight = weight
    def loss(self, embeddings, *, margin):
        return self.weight * (embeddings["a"] - embeddings["a~"]).square().sum(1).mean()

class Plain(rm.Defense):
    def step(self, network, images, labels):
        z = network(images, learn=True)
        a, p, n = (z[role] for role in self.mine(z, labels).triplets)
        return rm.Step(rm.triplet_loss(a, p, n, self.margin))

class Still(rm.Defense):
    """One that mines nothing, with an option of its own."""
    def __init__(self, source=None, *, k=1, **settings):
        super().__init__(source, **settings)
        self.k = k
    def step(self, network, images, labels):
        z = network(images, learn=True)
        return rm.Step(self.k * z.std(), {"mine": z.std()}, embeddings=z)

class Forgetful(rm.Defense):
    def __init__(self, source=None, *, budget, margin, seed):
        torch.nn.Module.__init__(self)

class Own(HardnessManipulation):
    pass

number = 7
'''

KINDS = {
    "N": ("sampler", "Nearest"),
    "O": ("sampler", "Slotted"),
    "drawn": ("sampler", "drawn"),
    "mine": ("destination", "Harder"),
    "made": ("destination", "harder"),
    "pull": ("term", "Pull"),
    "plain": ("defense", "Plain"),
    "still": ("defense", "Still"),
    "own": ("defense", "Own"),
}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "parts.py"
    path.write_text(FILE)
    return path


@pytest.fixture
def parts(file: Path) -> dict[str, Any]:
    """Register all parts of the file under the names above, as its author would."""
    found = {name: registry(kind).find(f"{file}:{part}")[0] for name, (kind, part) in KINDS.items()}
    for name, (kind, _) in KINDS.items():
        rm.register(kind, name)(found[name])
    return found


def in_file(text: str, file: Path) -> str:
    """Write a name with each <Part> from the file."""
    return text.replace("<", f"{file}:").replace(">", "")


def network() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Flatten(), nn.Linear(784, 16))


REGISTERED = [
    "N/A[N]",
    "ACT[N(k=2)]",
    "HM[N,LGA]",
    "HM[O(k=2),gB(O(k=2),ξ=0.2)]",
    "HM[drawn(k=3),drawn(k=3)]",
    "HM[S,mine(k=2,text='b')]",
    "HM[S,gB(mine(k=2),ξ=0.3,u=1.0)]",
    "HM[S,made(k=1)]",
    "HM[S,LGA]&pull(weight=0.1)&ICS&pull",
    "plain[S]",
    "plain[N(k=2)]",
    "still",
    "still(k=2)",
    "own[S,LGA]&ICS",
    "own[N,mine]&pull",
]
FROM_FILE = [
    "N/A[<Nearest>]",
    "HM[S,<Nearest(k=2)>]",
    "HM[<Nearest>,gB(<Nearest>)]",
    "HM[S,<Harder(k=2)>]",
    "HM[S,gB(<Harder(k=2)>,ξ=0.2)]",
    "HM[S,<harder>]",
    "HM[S,LGA]&ICS(λ=0.1)&<Pull(weight=0.1)>",
    "<Plain>[<Slotted>]",
    "<Still(k=2)>",
    "<Still>[R]",
    "<Own>[S,LGA]&ICS",
]


def trains(defense: rm.Defense, pairs: tuple[Tensor, Tensor]) -> rm.Step:
    model = network()
    step = defense(model, *pairs)
    step.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(isinstance(value, float) for value in step.logs.values())
    assert {"anchors", "images/forward", "images/backward"} <= set(step.logs)
    return step


def comparable(step: rm.Step) -> dict[str, float]:
    """The logs, without those that are NaN for want of a destination."""
    return {name: value for name, value in step.logs.items() if not math.isnan(value)}


def check_round_trip(name: str, pairs: tuple[Tensor, Tensor]) -> None:
    made = rm.defense(name, eps=0.05, alpha=0.02, steps=2)
    assert made.name == name
    again = eval(repr(made), {"defense": rm.defense})  # noqa: S307
    assert again.name == name
    assert comparable(trains(again, pairs)) == comparable(trains(made, pairs))


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("name", REGISTERED)
def test_a_registered_part_trains_and_its_name_makes_it_again(
    name: str, pairs: tuple[Tensor, Tensor]
) -> None:
    check_round_trip(name, pairs)


@pytest.mark.slow
@pytest.mark.parametrize("text", FROM_FILE)
def test_a_part_from_a_file_trains_and_its_name_makes_it_again(
    text: str, file: Path, pairs: tuple[Tensor, Tensor]
) -> None:
    check_round_trip(in_file(text, file), pairs)


@pytest.mark.usefixtures("parts")
def test_blanks_and_other_spellings_make_one_name(file: Path) -> None:
    made = rm.defense(" HM [ N ( k = 2 ) , gB ( mine( k=2 ) , xi=0.2) ] & pull( weight = .1 )")
    assert made.name == "HM[N(k=2),gB(mine(k=2),ξ=0.2)]&pull(weight=0.1)"
    assert rm.defense("min-max[N]").name == "HM[N,2]"
    assert rm.defense("N/A[M(margin=0.5)]").name == "N/A[M(margin=0.5)]"
    gamma = file.parent / "gamma lambda"
    gamma.mkdir()
    (gamma / "xi.py").write_text(FILE)
    assert rm.defense(f"N/A[ {gamma}/xi.py:Nearest ]").name == f"N/A[{gamma}/xi.py:Nearest]"


@pytest.mark.usefixtures("parts")
def test_options_reach_the_part_and_the_margin_is_gamma(file: Path) -> None:
    made = rm.defense("HM[N(k=5),gB(mine(k=2))]&pull(weight=0.25)", margin=0.3)
    assert isinstance(made, HardnessManipulation)
    assert vars(made.source)["k"] == 5
    assert vars(made.destination.base)["k"] == 2
    assert [vars(term)["weight"] for term in made.terms] == [0.25]
    assert vars(rm.defense(f"N/A[{file}:Margin]", margin=0.3).source)["margin"] == 0.3
    assert vars(rm.defense(f"N/A[{file}:Margin(margin=0.1)]", margin=0.3).source)["margin"] == 0.1
    still = rm.defense("still(k=3)", eps=0.5, margin=0.3, seed=4)
    assert (vars(still)["k"], still.budget.eps, still.margin, still.seed) == (3, 0.5, 0.3, 4)


@pytest.mark.usefixtures("parts")
def test_a_term_of_the_users_is_added_and_logged(pairs: tuple[Tensor, Tensor], file: Path) -> None:
    alone = trains(rm.defense("HM[S,2]", steps=2), pairs)
    half = trains(rm.defense("HM[S,2]&pull", steps=2), pairs)
    twice = trains(rm.defense("HM[S,2]&pull(weight=1.5)&pull", steps=2), pairs)
    assert half.logs["loss/pull"] > 0
    assert half.loss.item() == pytest.approx(alone.loss.item() + half.logs["loss/pull"], abs=1e-6)
    assert twice.logs["loss/pull"] == pytest.approx(4 * half.logs["loss/pull"], rel=1e-5)
    assert "loss/Pull" in trains(rm.defense(f"HM[S,2]&{file}:Pull", steps=2), pairs).logs


def pixels_kept(defense: rm.Defense, pairs: tuple[Tensor, Tensor]) -> bool:
    """Whether two steps perturb nothing and the network sees images of the batch alone."""
    model = network()
    seen: list[Tensor] = []
    model.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    steps = [defense(model, *pairs) for _ in range(2)]
    known = {image.numpy().tobytes() for image in pairs[0]}
    assert all(image.numpy().tobytes() in known for x in seen for image in x) == all(
        step.logs["perturbed"] == 0 for step in steps
    )
    return all(step.logs["perturbed"] == 0 for step in steps)


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize("name", ["HM[N,N]", "HM[O(k=2),O( k = 2 )]", "HM[drawn(k=2),drawn(k=2)]", "HM[R,R]"])
def test_the_sources_own_sampler_leaves_every_pixel(name: str, pairs: tuple[Tensor, Tensor]) -> None:
    assert pixels_kept(rm.defense(name), pairs)


# --- names that are wrong ---------------------------------------------------------------------------------


def refusal(name: str) -> tuple[str, int]:
    """Return the message for a wrong name and the column its caret points at."""
    with pytest.raises(rm.UserError) as error:
        rm.defense(name)
    message, shown, caret = str(error.value).split("\n")
    assert shown == f"    {name}"
    return message, caret.index("^") - 4


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    ("name", "at", "says"),
    [
        ("N/A[n]", "n]", ["unknown sampler 'n'", "did you mean 'N'", "known: D, H, M, N, O, R, S, drawn"]),
        ("N/A[N(z=1)]", "N(", ["sampler 'N'", "'z'", "its options: k"]),
        ("N/A[N(k)]", "N(", ["options must be option=value"]),
        ("N/A[N(k=1,k=2)]", "N(", ["options must be option=value, each once"]),
        ("HM[S,mime]", "mime", ["unknown destination 'mime'", "did you mean 'mine'", "LGA", "gB(…)", "-γ/2"]),
        ("plane[S]", "plane", ["unknown defense 'plane'", "did you mean 'plain'", "HM"]),
        ("stil", "stil", ["a defense is written FAMILY[…]", "did you mean 'still'"]),
        ("plain(seed=1)[S]", "plain", ["seed is given already"]),
        ("plain[S,LGA]", "S", ["plain takes one sampler"]),
        (
            "plain[S]&ICS",
            "ICS",
            ["take terms after &; plain does not"],
        ),
        ("HM(k=1)[S,LGA]", "HM", ["'k'"]),
    ],
)
def test_a_wrong_part_is_refused_and_pointed_at(name: str, at: str, says: list[str]) -> None:
    message, column = refusal(name)
    assert all(part in message for part in says), message
    assert column == name.index(at)


@pytest.mark.parametrize(
    ("text", "at", "says"),
    [
        ("N/A[<Nearst>]", 4, ["unknown name 'Nearst'", "did you mean 'Nearest'", "for the sampler"]),
        ("N/A[<number>]", 4, ["'number'", "is a int", "sampler must be a class or a function"]),
        ("N/A[<Nearest(z=1)>]", 4, ["'z'", "its options: k"]),
        ("N/A[<Harder>]", 4, ["is the class Harder; it must be derived from Sampler"]),
        ("HM[S,<Pull>]", 5, ["is the class Pull; it must be derived from Destination"]),
        ("HM[S,LGA]&<Nearest>", 10, ["is the class Nearest; it must be derived from Term"]),
        ("<Nearest>[S]", 0, ["defense", "must be derived from Defense"]),
        ("<Forgetful>", 0, ["Forgetful.__init__ must call super().__init__(source"]),
    ],
)
def test_a_wrong_object_of_a_file_is_refused_and_pointed_at(
    text: str, at: int, says: list[str], file: Path
) -> None:
    message, column = refusal(in_file(text, file))
    assert all(part in message for part in says), message
    assert column == at


@pytest.mark.parametrize("folder", ["a(b)", "a,b"])
@pytest.mark.parametrize("around", ["N/A[{}:Nearest]", "HM[S,{}:Harder]", "HM[S,LGA]&{}:Pull", "{}:Plain[S]"])
def test_a_path_with_signs_of_the_notation_is_refused(folder: str, around: str, file: Path) -> None:
    inside = file.parent / folder
    inside.mkdir()
    (inside / "parts.py").write_text(FILE)
    message, _ = refusal(around.format(inside / "parts.py"))
    assert "a path in a defense's name is without brackets, commas and &" in message


# --- a defense needs its step alone ----------------------------------------------------------------------


class Returns(rm.Defense):
    """A defense that returns what it is told."""

    returned: Any = None

    def step(self, network: Network, images: Tensor, labels: Tensor) -> rm.Step:
        z = network(images, learn=True)
        found = self.returned(z) if callable(self.returned) else self.returned
        made: rm.Step = found
        return made


def returning(returned: Any) -> Returns:
    defense = Returns(Softhard(), budget=rm.Budget(eps=0.1, alpha=0.1, steps=1))
    defense.returned = returned
    return defense


# What no type checker would let through.
ANY: dict[str, Any] = {"text": {"mine": "much"}, "triplets": (0, 1, 2), "loss": 0.5, "logs": [1]}


def test_a_loss_is_enough(pairs: tuple[Tensor, Tensor]) -> None:
    step = trains(returning(lambda z: rm.Step(z.std())), pairs)
    assert set(step.logs) == {"anchors", "images/forward", "images/backward"}
    assert (step.logs["anchors"], step.logs["images/forward"]) == (32, 64)
    assert [step.embeddings, step.labels, step.triplets, step.images] == [None] * 4
    assert returning(None).name == "Returns[S]"


def test_what_a_step_holds_is_counted_and_measured(pairs: tuple[Tensor, Tensor]) -> None:
    triplets = Triplets(*torch.tensor([[0], [1], [2]]))

    def returned(z: Tensor) -> rm.Step:
        logs: Any = MappingProxyType({"mine": z.std()})  # any mapping will do
        return rm.Step(z.std(), logs, embeddings=3 * z, triplets=triplets)

    step = trains(returning(returned), pairs)
    assert step.logs["triplets"] == 1
    assert step.logs["mine"] == pytest.approx(step.loss.item())
    assert step.embeddings is not None
    z = nn.functional.normalize(step.embeddings.detach(), dim=1)
    cosines = [float(z[i] @ z[j]) for i in range(64) for j in range(64) if i != j]
    assert step.logs["spread"] == pytest.approx(1 - sum(cosines) / len(cosines), abs=1e-5)
    own = trains(returning(lambda z: rm.Step(z.std(), {"spread": 0.5}, embeddings=z)), pairs)
    assert own.logs["spread"] == 0.5


@pytest.mark.parametrize(
    ("returned", "says"),
    [
        (None, ["must be a Step, not None", "robustmetric.Step(loss)"]),
        (lambda z: rm.Step(z.std(1)), ["the loss float32 of shape (64,)", "scalar", "mean()"]),
        (lambda z: rm.Step(z.std() * math.nan), ["the loss nan", "must be a number"]),
        (lambda z: rm.Step(z.std().detach()), ["a loss without a gradient", "detach()"]),
        (lambda z: rm.Step(z.std(), ANY["logs"]), ["logs that", "must be a Mapping, not a list"]),
        (lambda z: rm.Step(z.std(), ANY["text"]), ["'mine' as 'much'", "must be a number"]),
        (lambda z: rm.Step(z.std(), embeddings=z[0]), ["embeddings float32 of shape (16,)", "(M, D)"]),
        (lambda z: rm.Step(z.std(), triplets=ANY["triplets"]), ["must be a Triplets, not a tuple"]),
    ],
)
def test_a_step_that_cannot_be_learned_from_is_told(
    returned: Any, says: list[str], pairs: tuple[Tensor, Tensor]
) -> None:
    with pytest.raises(rm.UserError, match=r"Returns\.step") as error:
        returning(returned)(network(), *pairs)
    assert all(part in str(error.value) for part in says), error.value


def test_a_defense_without_step_or_sampler_says_so(pairs: tuple[Tensor, Tensor], file: Path) -> None:
    class Silent(rm.Defense):
        pass

    budget = rm.Budget(eps=0.1, alpha=0.1, steps=1)
    with pytest.raises(rm.UserError, match=r"Silent must implement step\(network, images, labels\)"):
        Silent(budget=budget)(network(), *pairs)
    with pytest.raises(rm.UserError, match=r"Before\.step takes \(self, images, labels\); it must take "):

        class Before(rm.Defense):
            def step(self, images: Tensor, labels: Tensor) -> rm.Step:  # type: ignore[override]
                return rm.Step(images.mean())

    with pytest.raises(rm.UserError, match=r"made without a sampler: write it NAME\[S\]"):
        rm.defense(f"{file}:Plain")(network(), *pairs)


# --- contracts within a training step ---------------------------------------------------------------------


class Itself(Sampler):
    """A sampler whose anchors are their own positives."""

    def draw(self, batch: Batch, *, generator: torch.Generator) -> Triplets:
        a, _, n = Softhard()(batch, generator=generator)
        return Triplets(a, a, n)


class Rows(Term):
    roles = ("a~", "n")

    def loss(self, embeddings: Mapping[str, Tensor], *, margin: float) -> Tensor:
        return (embeddings["a~"] - embeddings["n"]).abs().sum(1)


def test_a_copied_or_restored_defense_keeps_its_name(file: Path) -> None:
    name = f"HM[{file}:Slotted(k=2),gB({file}:Harder)]&{file}:Pull"
    made = rm.defense(name)
    assert copy.deepcopy(made).name == name
    other = rm.defense(name, seed=5)
    other.load_state_dict(made.state_dict())
    assert other.name == name
    by_hand = HardnessManipulation(Itself(), Gradual(), [Rows()], budget=made.budget)
    assert by_hand.name == "HM[Itself,LGA]&Rows"
