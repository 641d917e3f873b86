"""Certify a network: how far its R@1 is certain under perturbations, once it is smoothed by noise."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from robustmetric.evaluation.certificate import FORMAT, Certificate, build_certificate
from robustmetric.evaluation.certify_pieces import CertifyMaterials
from robustmetric.evaluation.certify_plan import CertifyPlan
from robustmetric.evaluation.identity import versions
from robustmetric.evaluation.images import Images
from robustmetric.evaluation.smoothing import check_noise, check_samples
from robustmetric.evaluation.staged import Progress, Stage, Staged
from robustmetric.evaluation.store import CERTIFICATE
from robustmetric.evaluation.subject import Subject
from robustmetric.models.source import try_network

KIND = "certification"
"""What the folder of a certification is told to hold."""


def certify(
    model: nn.Module,
    images: Images,
    labels: Tensor,
    *,
    sigma: float,
    radii: Sequence[float] | None = None,
    samples: int = 1000,
    choose: int = 100,
    gallery_samples: int = 100,
    alpha: float = 0.001,
    queries: int | None = None,
    seed: int = 0,
    batch: int = 128,
    attack: bool = True,
    attack_samples: int = 16,
    steps: int = 32,
    search: str = "apgd",
    gallery: tuple[Images, Tensor] | None = None,
    own: Tensor | None = None,
    cameras: Tensor | None = None,
    gallery_cameras: Tensor | None = None,
    name: str | None = None,
    data: str = "images",
    out: str | Path | None = None,
    progress: Progress | None = None,
    report: Callable[[str], None] = print,
) -> Certificate:
    """Certify R@1 of a network that is smoothed by noise, and attack it: the truth lies in between.

    The smoothed network ranks by the mean of the embeddings of an image with noise. How far from a query its
    nearest image is of its class for certain follows from that noise, whatever the network is: see
    `robustmetric.evaluation.bounds`. It is the setting of RetrievalGuard (Wu et al., ICML 2022, arXiv
    2206.11225) with a tighter bound. The gallery is taken as it is stored: embedded by the same network, with
    noise of its own. A query for which the samples do not suffice abstains.

    Args:
        model: Any module that maps images (N, C, H, W) to vectors (N, D). It is held in evaluation mode,
            frozen, and comes back as it was. It sees pixels with noise, some outside [0, 1].
        images: Images (N, C, H, W) in [0, 1]: a tensor, or anything that is indexed like one. Each queries
            all others, or the gallery.
        labels: Their classes (N,).
        sigma: The deviation of the noise: more of it certifies larger radii, of a network that ranks worse.
        radii: Lengths of perturbations (L2), ascending; by default a quarter of sigma, half of it, and sigma.
        samples: Noisy images that a query is judged with; their embeddings are in memory, a query's at a
            time. 10,000 certify about twice as far as 1,000.
        choose: Others before, by which the images are chosen that it is compared by.
        gallery_samples: Noisy images of each image that is ranked.
        alpha: The probability with which a bound of a query may fail.
        queries: Number of images that query, drawn from the seed; all by default.
        seed: Starts every random draw. A query's noise depends on it and on the query's number alone.
        batch: Noisy images that are embedded together.
        attack: Whether the queries are attacked, for the upper bounds.
        attack_samples: Noises that an attack sees the network with; what it finds is judged as queries are.
        steps: Steps of an attack.
        search: How an attack searches, such as ``"apgd(restarts=5)"``.
        gallery: The images and labels that are ranked instead, as a pair.
        own: Each query's position (N,) in the gallery, −1 for none.
        cameras: The cameras (N,) that took the images: what is of a query's class and camera does not count
            for it.
        gallery_cameras: Those of the gallery's images.
        name: What the certificate calls the network; by default the name of its class.
        data: What the certificate calls the images.
        out: A folder. The certificate is written there as `certificate.json` with its per-query values, and
            whatever is finished stays on disk: the same call goes on where an interrupted one stopped.
        progress: Told the stage, how many of its pieces are done, and how many there are.
        report: Told in a line what was found damaged in the folder.

    >>> import robustmetric as rm
    >>> images, labels = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
    >>> network = rm.model("c2f2", size=8)
    >>> found = rm.certify(network, images, labels, sigma=0.1, samples=100, queries=4, attack=False)
    >>> found.at(0.1).certified.value <= found.recall.value
    True

    """
    plan = CertifyPlan.make(
        sigma=sigma,
        radii=radii,
        samples=samples,
        choose=choose,
        gallery_samples=gallery_samples,
        alpha=alpha,
        queries=queries,
        seed=seed,
        batch=batch,
        attack=attack,
        attack_samples=attack_samples,
        steps=steps,
        search=search,
    )
    subject = Subject(
        model,
        images,
        labels,
        gallery=gallery,
        own=own,
        cameras=cameras,
        gallery_cameras=gallery_cameras,
        name=name,
        data=data,
    )
    return Certification(subject, plan, out, progress, report).run()


class Certification(Staged[CertifyMaterials, Certificate]):
    """A certification in pieces, each kept as soon as it is made.

    The network and images of `subject` are certified as `plan` says. Each finished piece is a file in
    `out/parts`, or stays in memory if `out` is None; `run` does what is left and puts the certificate
    together. `progress` is told the stage, how many of its pieces are done, and how many there are; `report`
    is told in a line what was found damaged in the folder.

    >>> subject = Subject(nn.Flatten(), torch.rand(20, 1, 8, 8), torch.arange(20) % 4)
    >>> certification = Certification(subject, CertifyPlan.make(sigma=0.25, attack=False))
    >>> [stage.name for stage in certification.stages]
    ['embed', 'certify']
    """

    what = KIND
    document = CERTIFICATE

    def __init__(
        self,
        subject: Subject,
        plan: CertifyPlan,
        out: str | Path | None = None,
        progress: Progress | None = None,
        report: Callable[[str], None] = print,
    ) -> None:
        subject.check_queries(plan.queries)
        super().__init__(out, progress, report)
        self.subject, self.plan = subject, plan
        self.materials = CertifyMaterials(subject, plan, self.store)

    @property
    def stages(self) -> tuple[Stage[CertifyMaterials], ...]:
        """All pieces by stage, in the order of their making."""
        return self.materials.stages

    def describe(self) -> dict[str, Any]:
        """Return all that the certificate depends on, in JSON's types."""
        return {
            "kind": KIND,
            **self.plan.describe(),
            **self.subject.identity(),
            "bound": "distribution",  # pieces of before knew the mean alone
            "versions": versions(),
        }

    def probe(self) -> None:
        """Try the network on a batch, and whether noise and samples fit: what fails leaves no trace."""
        plan = self.plan
        images = self.subject.images[torch.arange(min(plan.batch, len(self.subject.images)))]
        shape = tuple(images.shape[1:])
        if plan.attack:
            check_noise(plan.attack_samples, shape, "attack_samples")
        check_noise(min(plan.batch, max(plan.samples, plan.choose, plan.gallery_samples)), shape, "batch")
        check_samples(plan.samples, try_network(self.subject.model, images, gradient=plan.attack))

    def build(self) -> Certificate:
        """Put the certificate together."""
        return build_certificate(self.materials)

    def read(self, folder: Path) -> Certificate:
        """Read the finished certificate from its `folder`."""
        return FORMAT.read_whole(folder)
