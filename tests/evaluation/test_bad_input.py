"""What cannot be evaluated is refused before anything is computed, or with all that was computed kept."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.attacks import attack
from robustmetric.distance import BrokenEmbeddingsError
from robustmetric.evaluation import Evaluation, Record, Subject

Tiny = Callable[..., Evaluation]
Evaluated = Callable[..., Record]

LABELS = torch.arange(40) % 5
SOME = torch.rand(12, 1, 6, 6, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"eps": 8}, r"eps must be in \[0, 1\], not 8: .* 8 grey levels are 8/255"),
        ({"eps": -0.1}, r"eps must be in \[0, 1\], not -0\.1"),
        ({"eps": float("nan")}, r"eps must be in \[0, 1\], not nan"),
        ({"eps": "8/255"}, r"eps must be in \[0, 1\], not '8/255'"),
        ({"alpha": 0}, r"alpha must be in \(0, 1\], not 0"),
        ({"alpha": 3}, r"alpha must be in \(0, 1\], not 3"),
        ({"steps": 0}, "steps must be a whole number of at least 1, not 0"),
        ({"steps": 1.5}, r"steps must be a whole number of at least 1, not 1\.5"),
        ({"protocol": "referense"}, r"unknown protocol 'referense' \(did you mean 'reference'\?\)"),
        ({"search": "pdg"}, r"unknown search 'pdg' \(did you mean 'pgd'\?\); known: apgd, nes, pgd, spsa"),
        ({"search": "pgd(restarts=0)"}, "restarts must be a whole number of at least 1, not 0"),
        ({"attacks": ["ES", "QA*"]}, r"unknown attack 'QA\*'.*; known: CA\+, CA-"),
        (
            {"attacks": []},
            r"no attacks were given; the ERS takes CA\+, CA-, QA\+, QA-, TMA, ES, LTM, GTM, GTT",
        ),
        ({"attacks": ["ES", "CA+", "ES"]}, "an attack was given twice: ES"),
        ({"attacks": ["CA+", "CA+(w=1)"]}, r"an attack was given twice: CA\+"),
        (
            {"attacks": ["ES", attack("LTM", protocol="reference")]},
            "LTM follows another protocol than strict; the two are never mixed",
        ),
        ({"checks": "some"}, "unknown set of checks 'some'.*; known: full, none, quick"),
        ({"queries": 0}, "queries must be .*at least 1, not 0"),
        ({"queries": 41}, "queries must be from 1 to the number of images, 40, not 41"),
        ({"queries": -3}, "queries must be .*at least 1, not -3"),
        ({"batch": 0}, "batch must be a whole number of at least 1, not 0"),
        ({"batch": True}, "batch must be a whole number of at least 1, not True"),
        ({"batch": 2.5}, r"batch must be a whole number of at least 1, not 2\.5"),
        ({"labels": LABELS[:39]}, r"labels have shape \(39,\) for 40 images; they must have shape \(40,\)"),
        ({"labels": LABELS[:, None]}, r"labels have shape \(40, 1\) for 40 images"),
        ({"labels": LABELS.float()}, r"labels must be a tensor of integers, not torch\.float32"),
        ({"labels": LABELS.tolist()}, "labels must be a tensor of integers, not list"),
        ({"labels": torch.full((40,), 3)}, "all 40 images are of class 3; no ranking can be wrong"),
        ({"labels": torch.arange(40)}, "no two of the 40 images share a class; no query has an answer"),
        (
            {"images": SOME[:4], "labels": LABELS[:4]},
            "the gallery has 4 images; give at least 5, for a top 4 besides the query",
        ),
        ({"gallery": (SOME[:4], LABELS[:4])}, "the gallery has 4 images; give at least 5"),
        (
            {"gallery": (SOME, LABELS[:12]), "protocol": "reference"},
            "the reference protocol takes the nearest image for the query itself, so its queries must be in",
        ),
        ({"gallery": (SOME, LABELS)}, r"labels have shape \(40,\) for 12 images"),
        ({"gallery": (SOME, LABELS[:12] * 0)}, "all 12 images are of class 0"),
        (
            {"gallery": (SOME, LABELS[:12] + 9)},
            "no query's class is in the gallery: give queries and gallery",
        ),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_computed(
    tiny: Tiny, tmp_path: Path, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        tiny(out=tmp_path / "out", **change)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("value", [True, 2.5, "all"])
def test_a_number_of_queries_that_is_none_is_refused(tiny: Tiny, value: Any) -> None:
    with pytest.raises(ValueError, match=r"queries must be a whole number of at least 1"):
        tiny(queries=value)


@pytest.mark.parametrize("value", [1.5, "0", None])
def test_a_seed_that_is_none_is_refused(tiny: Tiny, value: Any) -> None:
    with pytest.raises(ValueError, match="seed"):
        tiny(seed=value, queries=3)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_a_seed_is_refused_at_once_or_not_at_all(tiny: Tiny, seed: int) -> None:
    """And not by numpy when all is computed and the record is put together."""
    try:
        evaluation = tiny(seed=seed, queries=3, steps=1, attacks=["TMA"])
    except ValueError as error:
        assert "seed" in str(error)  # noqa: PT017
    else:
        evaluation.run()


@pytest.mark.parametrize("model", [lambda x: x, "c2f2", None, nn.Flatten])
def test_what_is_no_module_is_refused(images: Tensor, labels: Tensor, model: Any) -> None:
    with pytest.raises(
        ValueError, match=r"the network must be a torch\.nn\.Module, not a (function|str|NoneT|ty)"
    ):
        Subject(model, images, labels)


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (
            lambda x: x * 255,
            r"pixels are in \[0, 255\]; they must be in \[0, 1\]: divide 8-bit images by 255",
        ),
        (lambda x: x - 0.5, r"pixels are in \[-0\.5, 0\.5\]; they must be in \[0, 1\]"),
        (lambda x: x * 1.0001, r"use images\.clamp\(0, 1\), for resizing rounds beyond the ends"),
        (lambda x: x.where(torch.arange(40)[:, None, None, None] != 39, torch.nan), "pixels hold NaN"),
        (lambda x: (x * 255).byte(), r"images must be a floating-point tensor, not torch\.uint8"),
        (lambda x: x[:, 0], r"images have shape \(40, 6, 6\); they must have shape \(N, C, H, W\)"),
        (lambda x: x.numpy(), "images must be a floating-point tensor, not ndarray"),
    ],
)
def test_images_that_are_none_are_refused_wherever_they_stand(
    evaluated: Evaluated,
    images: Tensor,
    labels: Tensor,
    tmp_path: Path,
    spoil: Callable[[Tensor], Any],
    says: str,
) -> None:
    bad, out = spoil(images), tmp_path / "out"
    with pytest.raises(ValueError, match=says):
        evaluated(images=bad, out=out)
    with pytest.raises(ValueError, match=says):
        evaluated(gallery=(bad, labels), out=out)
    assert not out.exists()


class Returns(nn.Module):
    """A network whose output is something else than vectors."""

    def __init__(self, inner: nn.Module, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.change = inner, change

    def forward(self, x: Tensor) -> Any:
        return self.change(self.inner(x))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda z: (z, z), "the network returned a tuple; it must return one"),
        (lambda z: {"z": z}, "the network returned a dict"),
        (lambda z: z[:, :, None, None], r"returned a tensor of shape \(16, 16, 1, 1\) for 16 images"),
        (lambda z: z[:-1], r"returned a tensor of shape \(15, 16\) for 16 images"),
        (lambda z: z.mean(1), r"returned a tensor of shape \(16,\)"),
        (lambda z: z * torch.nan, "16 of 16 embeddings hold NaN or infinity: the network has diverged"),
        (lambda z: z / (z[:, :1] < z[:, :1].max()), "1 of 16 embeddings hold NaN or infinity"),
        (lambda z: z * 0, "16 of 16 embeddings are zero and have no direction"),
    ],
)
def test_a_network_that_does_not_return_vectors_is_refused(
    evaluated: Evaluated, network: nn.Module, change: Callable[[Tensor], Any], says: str
) -> None:
    model = Returns(network, change).train()
    with pytest.raises(ValueError, match=says):
        evaluated(model)
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda x: torch.nn.functional.pad(x, (0, 1, 0, 1)),
            r"images of shape \(16, 1, 7, 7\) and type float32 \(RuntimeError: mat1 .* cannot be multiplied",
        ),
        (Tensor.double, r"and type float64 .*; give images of .* the type of its weights \(float32\)"),
    ],
)
def test_images_that_do_not_fit_the_network_leave_no_folder(
    evaluated: Evaluated, images: Tensor, tmp_path: Path, change: Callable[[Tensor], Tensor], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        evaluated(images=change(images), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def in_place(x: Tensor) -> Tensor:
    return x.sub_(0.5)


def no_layer(x: Tensor) -> Tensor:
    raise KeyError("layer4")


@pytest.mark.parametrize(
    ("before", "search", "says"),
    [
        (in_place, "pgd", "the network changes its input in place"),
        (in_place, "nes(samples=2)", "the network changes its input in place"),
        (Tensor.detach, "pgd", "the embeddings do not depend on the images"),
        (no_layer, "nes(samples=2)", r"the network failed on images .*\(KeyError: 'layer4'\)"),
    ],
)
def test_a_network_that_cannot_be_attacked_so_leaves_no_folder(
    evaluated: Evaluated,
    network: nn.Module,
    tmp_path: Path,
    before: Callable[[Tensor], Tensor],
    search: str,
    says: str,
) -> None:
    class First(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return before(x)

    with pytest.raises(ValueError, match=says):
        evaluated(nn.Sequential(First(), network), search=search, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attacks": "ES,GTM"}, r"attacks is 'ES,GTM'; give a list of attacks"),
        (
            {"gallery": torch.rand(9, 1, 6, 6)},
            "the gallery is a Tensor; give a pair of its images and labels",
        ),
        (
            {"gallery": (torch.rand(9, 1, 7, 7), torch.arange(9) % 5)},
            r"queries have shape \(1, 6, 6\) and the images of the gallery \(1, 7, 7\)",
        ),
        ({"images": [torch.rand(1, 6, 6)] * 40}, r"the images are a list; give one tensor \(N, C, H, W\)"),
        ({"images": torch.rand(1, 6, 6)}, r"images have shape \(1, 6, 6\)"),
    ],
)
def test_what_is_not_a_set_of_images_or_attacks_is_refused(
    evaluated: Evaluated, change: dict[str, Any], says: str
) -> None:
    with pytest.raises(ValueError, match=says):
        evaluated(**change)


class Fragile(nn.Module):
    """The network, until it breaks at a call; no part of its state says so."""

    def __init__(self, inner: nn.Module, at: int | None, how: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.inner, self.at, self.how, self.calls = inner, at, how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        z: Tensor = self.inner(x)
        return self.how(z) if self.calls == self.at else z


def catch_fire(z: Tensor) -> Tensor:
    raise OSError("the machine is on fire")


@pytest.mark.parametrize(
    ("how", "error"), [(lambda z: z * torch.nan, BrokenEmbeddingsError), (catch_fire, OSError)]
)
def test_what_was_computed_before_an_error_is_kept_and_used(
    tiny: Tiny, network: nn.Module, tmp_path: Path, how: Callable[[Tensor], Tensor], error: type[Exception]
) -> None:
    settings: dict[str, Any] = {"steps": 2, "queries": 12, "batch": 4, "attacks": ["CA+", "ES", "GTT"]}
    out = tmp_path / "out"
    healthy = Fragile(network, None, how)
    tiny(healthy, out=tmp_path / "whole", **settings).run()
    fragile = Fragile(network, 26, how)
    with pytest.raises(error):
        tiny(fragile, out=out, **settings).run()
    kept = {f.name: f.stat().st_mtime_ns for f in (out / "parts").iterdir()}
    # Two trials; ten batches were embedded and ranked; a block of an attack takes four calls.
    assert sorted(kept) == [f"{n}.safetensors" for n in KEPT]
    calls = healthy.calls
    healthy.calls = 0
    evaluation = tiny(healthy, out=out, **settings)
    evaluation.work(0, 1)
    assert healthy.calls == calls - 2 - 10 - 4 * 3
    for name, stamp in kept.items():
        assert (out / "parts" / name).stat().st_mtime_ns == stamp
    evaluation.run()
    for name in ("record.json", "queries.safetensors"):
        assert (out / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


KEPT = ["attack-00-00000", "attack-00-00001", "attack-00-00002", "embed-00000", "retrieval"]


def test_a_record_of_broken_embeddings_is_never_written(
    evaluated: Evaluated, network: nn.Module, tmp_path: Path
) -> None:
    """A network that is fine on the images as they are, and breaks under attack."""

    class Brittle(nn.Module):
        def __init__(self, seen: Tensor) -> None:
            super().__init__()
            self.inner, self.seen = network, {bytes(x.numpy().tobytes()) for x in seen}

        def forward(self, x: Tensor) -> Tensor:
            new = torch.tensor([x[i].detach().numpy().tobytes() not in self.seen for i in range(len(x))])
            z: Tensor = self.inner(x)
            return torch.where(new[:, None], torch.nan, z)

    images = SOME[:10]
    with pytest.raises(BrokenEmbeddingsError, match="embeddings hold NaN or infinity"):
        evaluated(Brittle(images), images=images, labels=LABELS[:10], out=tmp_path / "out")
    assert not (tmp_path / "out" / "record.json").exists()
    assert (tmp_path / "out" / "parts" / "retrieval.safetensors").exists()
