"""What every defense shares: the interface, the passes it counts, what it logs."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from robustmetric.defenses.notation import read_defense, write_name
from robustmetric.destination import Destination
from robustmetric.errors import UserError, describe, instance, whole
from robustmetric.labels import check_classes, check_labels
from robustmetric.losses import Term, check_loss
from robustmetric.perturb import Budget, check_images
from robustmetric.registry import Contract, Registry, registry
from robustmetric.sphere import cross_distance, embed
from robustmetric.triplets import Batch, Mined, Sampler, Triplets, check_margin, find_anchors


@dataclass(frozen=True, eq=False)
class Step:
    """The loss of a batch, a scalar to call `backward` on, with figures to log and the batch it was taken on.

    Your own defense returns the `loss` alone, or adds `logs`, numbers by name, and the batch that another
    loss could be taken on. That batch has `embeddings` (M, D) with their gradient, `labels` (M,), `triplets`
    as positions in it, and `images` (M, C, H, W), perturbed and without a gradient. For HM and ACT it is the
    anchor, positive and negative of each triplet in turn, M = 3T; for EST the N images of the batch, moved;
    for N/A those as they are.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(4, 1, 8, 8), torch.tensor([0, 0, 1, 1])
    >>> step = rm.defense("HM[S,LGA]", steps=2)(rm.model("c2f2", size=8, dim=16), images, labels)
    >>> step.embeddings.shape, step.labels.tolist(), step.triplets.negative.tolist()
    (torch.Size([6, 16]), [0, 0, 1, 1, 1, 0], [2, 5])
    """

    loss: Tensor
    logs: Mapping[str, float] = field(default_factory=dict)
    embeddings: Tensor | None = None
    labels: Tensor | None = None
    triplets: Triplets | None = None
    images: Tensor | None = None


class Network:
    """A `model` as a map from images to the unit sphere that counts the images it computes.

    >>> network = Network(nn.Flatten())
    >>> with torch.no_grad():
    ...     z = network(torch.ones(3, 1, 2, 2))
    >>> network.forwards, network.backwards
    (3, 0)
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = instance("the network", model, nn.Module)
        self.forwards = 0
        self.backwards = 0

    def __call__(self, images: Tensor, *, learn: bool = False) -> Tensor:
        """Return the embeddings (N, D) of `images`; with gradients enabled, a backward pass is counted too.

        Only what the network is to `learn` from goes through DistributedDataParallel: its workers wait for
        each other in every pass, and perturbations take each worker another number of passes.
        """
        self.forwards += len(images)
        self.backwards += len(images) if torch.is_grad_enabled() else 0
        model = self.model
        if isinstance(model, nn.parallel.DistributedDataParallel) and not learn:
            model = model.get_submodule("module")
        return embed(model, images)

    @torch.no_grad()
    def look(self, images: Tensor) -> Tensor:
        """Return the embeddings (N, D) of `images` without gradients."""
        return self(images)


class Defense(Contract, nn.Module):
    """A way to train: from a network, images and labels to a loss.

    A subclass implements `step`; it is found by a name once it is registered with
    ``robustmetric.register("defense", name)``. The defense draws its triplets with the sampler `source`,
    perturbs within the `budget`, and `margin` is γ of its loss; a `destination` and `terms` are for families
    that take them. Its draws come from a generator of its own with the random seed `seed`, whose state is
    part of `state_dict()`: a resumed training draws the same.

    >>> import robustmetric as rm
    >>> @rm.register("defense", "plain")
    ... class Plain(rm.Defense):
    ...     def step(self, network, images, labels):
    ...         z = network(images, learn=True)
    ...         a, p, n = (z[role] for role in self.mine(z, labels).triplets)
    ...         return rm.Step(rm.triplet_loss(a, p, n, self.margin))
    >>> rm.defense("plain[S]").name
    'plain[S]'
    """

    signatures = ("step(network, images, labels)",)
    family: ClassVar[str] = ""
    """Its name before the bracket; that of the class unless given."""
    takes: ClassVar[tuple[str, ...]] = ("source",)
    """Its parts in its name: source, destination, terms."""
    __call__: Callable[..., Step]

    def __init__(
        self,
        source: Sampler | None = None,
        destination: Destination | None = None,
        terms: Sequence[Term] = (),
        *,
        budget: Budget,
        margin: float = 0.2,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.source = None if source is None else instance("source", source, Sampler)
        wanted = Destination if "destination" in self.takes else type(None)
        self.destination = instance("destination", destination, wanted)
        for term in terms:
            self.check_roles(term)
        self.terms = tuple(terms)
        self.budget = budget
        self.margin = check_margin(margin)
        self.seed = whole("seed", seed)
        self.generator = torch.Generator().manual_seed(self.seed)
        self.written = ""
        self._warned = False

    @property
    def name(self) -> str:
        """The defense in the paper's notation: as it was `written`, else from the names of its parts."""
        family = self.family or type(self).__name__
        return self.written or write_name(family, self.source, self.destination, self.terms)

    def forward(self, model: nn.Module, images: Tensor, labels: Tensor) -> Step:
        """Return the loss of a `model` on `images` (N, C, H, W) in [0, 1] with `labels` (N,), and its logs.

        The logs hold means over the triplets (`hardness/source` and `hardness/destination` as mined,
        `hardness/reached` as the loss sees it; NaN where a defense has none), the parts of the loss
        (`loss/…`), the share of triplets that were `perturbed` (of images for EST), how many `triplets` and
        `anchors` the batch has, and how many images went forward and backward through the network
        (`images/forward`, `images/backward`), the loss's own backward included. `spread` is one minus the
        mean cosine of the batch's embeddings, near 0 when the network has collapsed. No gradient flows back
        into the images. A warning is issued for the first batch in which less than a quarter of the images
        can be anchors.
        """
        network = Network(model)
        if model.training and not torch.is_grad_enabled():
            raise UserError(
                "gradients are off, and a network in training mode learns from a step: take it outside "
                "torch.no_grad(), or call model.eval() to look at the loss alone"
            )
        check_images(images)
        check_labels(labels, len(images))
        check_classes(labels)
        anchors = len(find_anchors(labels))
        if 4 * anchors < len(labels) and not self._warned:
            self._warned = True
            warnings.warn(
                f"only {anchors} of the {len(labels)} images share their class with another of the batch; "
                "the rest are no anchors: draw pairs, as robustmetric.data.pairs.PairLoader does, or larger "
                "batches",
                stacklevel=4,  # forward, two frames of nn.Module, and the caller
            )
        step = self.step(network, images.detach(), labels.to(images.device))
        logs = self._checked_logs(step, model)
        if "spread" not in logs and step.embeddings is not None and len(step.embeddings) > 1:
            unit = nn.functional.normalize(step.embeddings.detach(), dim=1)
            logs["spread"] = spread(cross_distance(unit))
        if step.triplets is not None:
            logs["triplets"] = float(len(step.triplets.anchor))
        logs["anchors"] = float(anchors)
        logs["images/forward"], logs["images/backward"] = float(network.forwards), float(network.backwards)
        return replace(step, logs=logs)

    def _checked_logs(self, step: object, model: nn.Module) -> dict[str, float]:
        """Return the logs of a `step` as numbers; reject a step that the `model` cannot learn from."""
        who = f"{type(self).__name__}.step"
        step = instance(f"what {who} returns", step, Step, why="write robustmetric.Step(loss)")
        check_loss(who, step.loss)
        learns = torch.is_grad_enabled() and any(p.requires_grad for p in model.parameters())
        if learns and not step.loss.requires_grad:
            raise UserError(
                f"{who} returned a loss without a gradient; it must depend on the network's embeddings: take "
                "detach(), item() and no_grad() out of its way"
            )
        z = step.embeddings
        if z is not None and (not isinstance(z, Tensor) or z.ndim != 2):
            raise UserError(f"{who} returned the embeddings {describe(z)}; they must have shape (M, D)")
        if step.triplets is not None:
            instance(f"triplets that {who} returns", step.triplets, Triplets)
        logs: dict[str, float] = {}
        for name, value in instance(f"logs that {who} returns", step.logs, Mapping).items():  # type: ignore[type-abstract]
            try:
                logs[str(name)] = float(value.detach() if isinstance(value, Tensor) else value)
            except (TypeError, ValueError, RuntimeError):
                told = f"{who} logged {name!r} as {describe(value)}; a log must be a number"
                raise UserError(told) from None
        return logs

    def step(self, network: Network, images: Tensor, labels: Tensor) -> Step:
        """Return the loss of a batch that was found valid; a subclass implements it.

        `network` maps (N, C, H, W) `images` to (N, D) embeddings on the unit sphere; ``learn=True`` says that
        the loss is taken on them. `labels` (N,) are on the device of the images.
        """
        raise UserError(f"the defense {type(self).__name__} must implement step(network, images, labels)")

    def mine(self, z: Tensor, labels: Tensor) -> Mined:
        """Return the source triplets of a batch with (N, D) embeddings `z` and (N,) `labels`."""
        if self.source is None:
            raise UserError("the defense mines triplets but was made without a sampler: write it NAME[S]")
        z = z.detach()
        return Mined.of(Batch(cross_distance(z), labels, z.shape[1]), self.source, self.generator)

    @classmethod
    def check_roles(cls, term: Term) -> None:
        """Reject a `term` that the defense cannot take: one without terms takes none."""
        raise UserError(f"{cls.__name__} takes no terms; HM, ACT and EST do")

    def get_extra_state(self) -> Tensor:
        """Return the state of the generator."""
        return self.generator.get_state()

    def set_extra_state(self, state: Tensor) -> None:
        """Restore the `state` of the generator."""
        self.generator.set_state(state.cpu())

    def __repr__(self) -> str:
        b = self.budget
        settings = f"eps={b.eps}, alpha={b.alpha}, steps={b.steps}, margin={self.margin}, seed={self.seed}"
        return f"defense({self.name!r}, {settings})"


DEFENSES: Registry[Defense] = registry("defense", Defense)
DEFENSES.passed = ("source", "destination", "terms", "budget", "margin", "seed")
"""The families of defenses by the names before their brackets."""


def defense(
    name: str,
    *,
    eps: float = 8 / 255,
    alpha: float = 1 / 255,
    steps: int = 8,
    margin: float = 0.2,
    seed: int = 0,
    reference: bool = False,
) -> Defense:
    """Make a defense from its `name` in the paper's notation.

    - ``N/A[X]`` regular training, ``EST[X]``, ``ACT[X]``; X is a sampler: R, M, S, D or H
    - ``HM[X,destination]`` Hardness Manipulation; ``min-max[X]`` is ``HM[X,2]``
    - destinations: a sampler, a number (``0``, ``-γ/2``), ``LGA``, ``g2``, ``g1/2``, ``gB(M)``; with
      parameters ``LGA(u=2.2)``, ``gB(M,ξ=0.1)``
    - terms after HM, EST and, without ã, ACT: ``&ICS``, ``&ICS(λ=0.05)``, ``&ICS(γ=0.2)``, and
      ``&L(a,ã,p̃)`` and the like

    γ, λ, ξ, ã may be written gamma, lambda, xi, a~. In each place a part of your own may stand, by
    the name it is registered under or as ``file.py:Object``, with options ``(k=2)`` if it has any; a defense
    of your own needs no bracket if it takes no sampler. `eps`, `alpha` and `steps` (ε, α, η) bound the
    perturbations, `margin` is γ, `seed` is the random seed of the triplets.

    With `reference`, S may draw the anchor as its own positive, and EST begins as the published training did;
    the name stays the same. It changes no other part but your own: a sampler with the option `itself`, and a
    defense with the attribute `reference`.

    >>> defense("HM[S,-gamma/2]&ICS(lambda=0.05)", eps=8 / 255, alpha=1 / 255, steps=8).name
    'HM[S,-γ/2]&ICS(λ=0.05)'
    >>> defense("HM[S,LGB]")
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown destination 'LGB' (did you mean 'LGA'?); known: D, H, LGA, M, R, S, a ...
        HM[S,LGB]
             ^
    """
    check_margin(margin)
    budget = Budget(eps=eps, alpha=alpha, steps=steps)
    made: Defense = read_defense(name, budget=budget, margin=margin, seed=seed, reference=reference)
    return made


def spread(dist: Tensor) -> float:
    """Return one minus the mean cosine of different images from their (N, N) distances `dist` on the sphere.

    >>> round(spread(torch.tensor([[0.0, 2**0.5], [2**0.5, 0.0]])), 6)
    1.0
    """
    count = len(dist)
    return dist.square().sum().item() / (2 * count * (count - 1))


def triplet_logs(
    mined: Mined,
    losses: Mapping[str, float],
    source: Tensor,
    destination: Tensor | None,
    reached: Tensor,
    *,
    perturbed: float,
) -> dict[str, float]:
    """Return the logs that all defenses on triplets have: the `losses`, means of hardness and the spread.

    `source`, `destination` (NaN without) and `reached` are the hardness (T,) of the `mined` triplets before
    and after their perturbation, `perturbed` is the share of them that were changed.
    """
    return {
        **losses,
        "hardness/source": source.mean().item(),
        "hardness/destination": math.nan if destination is None else destination.mean().item(),
        "hardness/reached": reached.mean().item(),
        "perturbed": perturbed,
        "spread": spread(mined.batch.distances),
    }


def changed(images: Tensor, before: Tensor) -> Tensor:
    """Return which rows of `images` (T, …) are not as `before` (T, …): (T,).

    >>> changed(torch.tensor([[0.5], [0.1]]), torch.tensor([[0.5], [0.0]]))
    tensor([False,  True])
    """
    return (images != before).flatten(1).any(1)


def mean_over_workers(value: Tensor) -> Tensor:
    """Return the average of a scalar `value` over the workers of a distributed training.

    >>> mean_over_workers(torch.tensor(0.5))
    tensor(0.5000)
    """
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return value
    mean = value.clone()
    torch.distributed.all_reduce(mean)
    return mean / torch.distributed.get_world_size()
