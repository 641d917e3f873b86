"""The checkpoint of a run: written whole or not at all, and read only if it is what was written."""

from __future__ import annotations

import pickle
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from robustmetric.files import DamagedError, check_seal, write_sealed
from robustmetric.models.weights import is_oversized
from robustmetric.training.stops import saving


class SealedCheckpointIO(TorchCheckpointIO):
    """Writes Lightning's checkpoints whole or not at all, with a digest at the end, and checks it."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; until the last moment `path` holds the previous one."""
        with saving(Path(path)):
            write_sealed(Path(path), lambda file: torch.save(checkpoint, file))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, of plain values and tensors alone, to the CPU."""
        return load_checkpoint(Path(path))


def load_checkpoint(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read the checkpoint `path` of a run; a damaged one is refused. With `mmap` tensors stay on the disk."""
    try:
        if not check_seal(path) or not zipfile.is_zipfile(path) or is_oversized(path):
            raise DamagedError("the digest at its end is missing")
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        _ = found["loops"]["fit_loop"]["epoch_progress"]["current"]["processed"], found["callbacks"]
    except OSError:
        raise
    except DamagedError:
        raise _refused(path, "is damaged: its digest does not match") from None
    except pickle.UnpicklingError:
        raise _refused(path, "holds more than numbers and tensors, which was not run") from None
    except Exception as error:  # whatever a reader of archives makes of any bytes
        raise _refused(path, f"is not the checkpoint of a training ({type(error).__name__})") from None
    return found  # type: ignore[no-any-return]


def _refused(path: Path, what: str) -> DamagedError:
    last = path.with_name("last.safetensors")
    begin = f", from the last weights with --weights {last}" if last.is_file() else ""
    return DamagedError(f"{path} {what}; begin a new run in another folder (--out){begin}")


class Reached(NamedTuple):
    """How far a checkpoint is: its step, the epochs that were begun and those that are done."""

    step: int = 0
    begun: int = 0
    done: int = 0


def reached(path: Path) -> Reached:
    """Return how far the checkpoint `path` is; all 0 where there is none.

    >>> reached(Path("nowhere.ckpt"))
    Reached(step=0, begun=0, done=0)
    """
    if not path.exists():
        return Reached()
    found = load_checkpoint(path, mmap=True)
    epochs = found["loops"]["fit_loop"]["epoch_progress"]["current"]
    return Reached(found["global_step"], int(epochs["ready"]), int(epochs["processed"]))
