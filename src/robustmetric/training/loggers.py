"""Lightning's loggers by name, writing into the run's folder and continuing there after a resume."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger, TensorBoardLogger, WandbLogger

from robustmetric.errors import UserError
from robustmetric.registry import Registry, registry

LOGGERS: Registry[Logger] = registry("logger", Logger)
LOGGERS.passed = ("out", "step")
"""All loggers: classes and functions that make one; `out` and `step` are passed to those that take them."""


@LOGGERS.register("tensorboard")
class TensorBoard(TensorBoardLogger):
    """One curve over all starts of a run: what was logged behind the step it goes on from is hidden."""

    def __init__(self, out: Path, step: int) -> None:
        # The empty version is the folder itself; events from purge_step on are dropped by TensorBoard.
        super().__init__(out, name="tensorboard", version="", default_hp_metric=False, purge_step=step + 1)

    @rank_zero_only
    def log_hyperparams(self, params: Any, metrics: Any = None, step: int | None = None) -> None:
        """Write the recipe, with R@1 beside it in TensorBoard's table."""
        from torch.utils.tensorboard.summary import hparams

        super().log_hyperparams(params)
        plain = {k: v if isinstance(v, bool | int | float) else str(v) for k, v in params.items()}
        for summary in hparams(plain, {"R@1": 0.0}):
            self.experiment._get_file_writer().add_summary(summary)


@LOGGERS.register("wandb")
def _wandb(out: Path, step: int) -> Logger:
    return WandbLogger(save_dir=out, name="wandb")


def make_logger(name: str, out: Path, step: int = 0) -> Logger:
    """Make a logger by its name, for a run that goes on from a step; nothing is written yet.

    `name` is one of ``LOGGERS`` or ``file.py:MyLogger``, with its options in brackets; `out` is the run's
    folder and `step` the one that it goes on from.

    >>> make_logger("tensorbord", Path("."))
    Traceback (most recent call last):
    ...
    robustmetric.UserError: unknown logger 'tensorbord' (did you mean 'tensorboard'?); known: ...
    """
    try:
        return LOGGERS.make(name, {"out": out, "step": step})
    except ModuleNotFoundError:
        package = '"robustmetric[tensorboard]"' if name == "tensorboard" else name
        raise UserError(
            f"the logger {name} needs a package that is not installed: pip install {package}",
            parameter="logger",
        ) from None
