"""The Lightning module in a Trainer of the user's own, and the scores it validates with."""

from __future__ import annotations

import random
from functools import partial
from pathlib import Path
from typing import Any

import lightning as L
import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import robustmetric as rm
from robustmetric.data.pairs import PairLoader
from robustmetric.training.module import MetricModule, random_states, set_random_states

pytestmark = [
    pytest.mark.kernels,
    # Lightning's advice on DataLoader's workers, and what torch says of a class that Lightning uses
    pytest.mark.filterwarnings("ignore::lightning.pytorch.utilities.warnings.PossibleUserWarning"),
    pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning"),
]


def digits(count: int = 256) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], Tensor]:
    images, labels = load_digits(return_X_y=True)
    pixels = (images[:count].reshape(-1, 8, 8, 1) * 15.9).astype(np.uint8)
    return pixels, torch.from_numpy(labels[:count].astype(np.int64))


def make(defense: str = "HM[S,LGA]&ICS", **options: Any) -> MetricModule:
    torch.manual_seed(1)
    guard = rm.defense(defense, eps=0.2, alpha=0.05, steps=2)
    return MetricModule(rm.model("c2f2", size=8, dim=32), guard, **options)


def trainer(folder: Path, **options: Any) -> L.Trainer:
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "enable_checkpointing": False}
    return L.Trainer(
        **{"accelerator": "cpu", "logger": False, "default_root_dir": folder, **quiet, **options}
    )


def loader(seed: int = 0) -> PairLoader:
    pixels, labels = digits()
    return PairLoader(pixels, labels, pairs=32, seed=seed)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


# A Trainer of one's own


USUAL: dict[str, Any] = {"lr": 3e-3, "weight_decay": 1e-3}
OWN = {
    "optimizer": partial(torch.optim.SGD, lr=0.5, momentum=0.9),
    "scheduler": partial(torch.optim.lr_scheduler.StepLR, step_size=1, gamma=0.1),
}


@pytest.mark.parametrize(
    ("defense", "options"),
    [("HM[S,LGA]&ICS", USUAL), ("EST[D]", USUAL), ("N/A[R]", USUAL), ("N/A[R]", OWN)],
)
def test_steps_are_those_of_a_bare_loop(tmp_path: Path, defense: str, options: dict[str, Any]) -> None:
    steps, seed = 3, 5
    module = make(defense, seed=seed, **options)
    trainer(tmp_path, max_steps=steps).fit(module, loader(seed))

    bare = make(defense)
    model, guard = bare.model, bare.defense
    optimizer = options.get("optimizer", partial(torch.optim.Adam, **USUAL))(model.parameters())
    decay = options["scheduler"](optimizer) if "scheduler" in options else None
    model.train()
    for step, (images, labels) in zip(range(steps), loader(seed), strict=False):
        # Each step's draws come from the seed, the step and the worker's number.
        mixed = np.random.SeedSequence([seed, step, 0]).generate_state(1)[0]
        guard.generator.manual_seed(int(mixed))
        optimizer.zero_grad()
        guard(model, images, labels).loss.backward()
        optimizer.step()
        if decay is not None:
            decay.step()
    assert_same(weights(module.model), weights(model))
    assert_same(
        {k: v for k, v in module.defense.state_dict().items() if isinstance(v, Tensor)},
        {k: v for k, v in guard.state_dict().items() if isinstance(v, Tensor)},
    )


def test_a_checkpoint_of_ones_own_trainer_brings_all_back(tmp_path: Path) -> None:
    module = make()
    first = trainer(tmp_path, max_steps=2)
    first.fit(module, loader())
    first.save_checkpoint(tmp_path / "mine.ckpt")
    content = torch.load(tmp_path / "mine.ckpt", weights_only=True)
    assert any(name.startswith("defense.") for name in content["state_dict"])
    other = make()
    trainer(tmp_path, max_steps=2).fit(other, loader(), ckpt_path=tmp_path / "mine.ckpt", weights_only=True)
    assert_same(weights(module.model), weights(other.model))


# Random states


def draws() -> list[float]:
    # An odd number of normal ones: the generators keep the second of each pair for the next time.
    legacy = np.random  # the global generator is what is meant here
    return [
        random.gauss(0, 1),
        random.random(),  # noqa: S311
        legacy.normal(),
        legacy.random(),
        torch.randn(()).item(),
        torch.rand(3).sum().item(),
    ]


def test_random_states_come_back(tmp_path: Path) -> None:
    before = random_states()
    try:
        random.gauss(0, 1)
        np.random.normal()
        states = random_states()
        torch.save(states, tmp_path / "states.pt")
        states = torch.load(tmp_path / "states.pt", weights_only=True)
        expected = draws()
        following = draws()
        assert expected != following
        for _ in range(2):
            set_random_states(states)
            assert draws() == expected
            assert draws() == following
    finally:
        set_random_states(before)


def test_a_checkpoint_of_another_defense_is_refused() -> None:
    mine = MetricModule(rm.model("c2f2", size=8), rm.defense("HM[S,M]"))
    checkpoint = {"state_dict": mine.state_dict(), "defense": mine.defense.name}
    mine.on_load_checkpoint(checkpoint)
    other = MetricModule(rm.model("c2f2", size=8), rm.defense("HM[R,M]"))
    with pytest.raises(ValueError, match=r"of a training with HM\[S,M\], this one uses HM\[R,M\]"):
        other.on_load_checkpoint(checkpoint)
