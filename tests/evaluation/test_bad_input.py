"""A network or image that cannot be evaluated is refused before anything is written, and never scored."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from robustmetric.errors import UserError
from robustmetric.sphere import BrokenEmbeddingsError
from tests.evaluation.conftest import Evaluated
from tests.helpers.masked import Through


def no_layer(x: Tensor) -> Tensor:
    raise KeyError("layer4")


Change = Callable[[Tensor], Any]


@pytest.mark.parametrize(
    ("after", "told"),
    [
        (lambda z: (z, z), "returned a tuple"),
        (lambda z: {"z": z}, "returned a dict"),
        (lambda z: z[:, :, None, None], r"shape \(16, 16, 1, 1\) for 16 images"),
        (lambda z: z[:-1], r"shape \(15, 16\) for 16 images"),
        (lambda z: z.mean(1), r"shape \(16,\)"),
        (lambda z: z * torch.nan, "16 of 16 embeddings hold NaN or infinity"),
        (lambda z: z / (z[:, :1] < z[:, :1].max()), "1 of 16 embeddings hold NaN or infinity"),
        (lambda z: z * 0, "16 of 16 embeddings are zero"),
        (Tensor.detach, "the embeddings do not depend on the images"),
    ],
)
def test_a_network_that_does_not_return_vectors(
    after: Change, told: str, evaluated: Evaluated, network: nn.Module, tmp_path: Path
) -> None:
    model = Through(network, after=after).train()
    with pytest.raises(UserError, match=told):
        evaluated(model, out=tmp_path / "out")
    assert model.training
    assert all(p.requires_grad for p in model.parameters())
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("search", ["pgd", "nes(samples=2)"])
@pytest.mark.parametrize(
    ("before", "told"),
    [(lambda x: x.sub_(0.5), "changes its input in place"), (no_layer, r"failed .*\(KeyError: 'layer4'\)")],
)
def test_a_network_that_cannot_be_attacked(
    before: Change, told: str, search: str, evaluated: Evaluated, network: nn.Module, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        evaluated(Through(network, before=before), search=search, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda x: nn.functional.pad(x, (0, 1, 0, 1)), r"\(16, 1, 7, 7\) .*mat1 .* cannot be multiplied"),
        (Tensor.double, r"type float64 .*the type of its weights \(float32\)"),
        (lambda x: x.where(torch.arange(40)[:, None, None, None] != 39, 2.0), r"in \[0, 1\]"),
    ],
)
def test_images_that_do_not_fit_the_network(
    change: Change, told: str, evaluated: Evaluated, images: Tensor, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=told):
        evaluated(images=change(images), out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_record_of_broken_embeddings_is_never_written(
    evaluated: Evaluated, network: nn.Module, images: Tensor, labels: Tensor, tmp_path: Path
) -> None:
    """A network that is fine on the images as they are, and breaks under attack."""
    seen = {x.numpy().tobytes() for x in images[:10]}

    class Brittle(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            new = torch.tensor([one.detach().numpy().tobytes() not in seen for one in x])
            z: Tensor = network(x)
            return torch.where(new[:, None], torch.nan, z)

    with pytest.raises(BrokenEmbeddingsError, match="embeddings hold NaN or infinity"):
        evaluated(Brittle(), images=images[:10], labels=labels[:10], out=tmp_path / "out")
    assert not (tmp_path / "out" / "record.json").exists()
    assert (tmp_path / "out" / "parts" / "retrieval.safetensors").exists()
