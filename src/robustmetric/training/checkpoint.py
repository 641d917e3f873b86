"""The checkpoint of a run: written whole or not at all, and read only if it is what was written."""

from __future__ import annotations

import pickle
import traceback
import zipfile
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.fabric.plugins import TorchCheckpointIO

from robustmetric.errors import UserError
from robustmetric.files import DamagedError, check_seal, write_sealed
from robustmetric.models.weights import is_oversized
from robustmetric.training.runs import RunFolder
from robustmetric.training.stops import saving

_SEALED = "sealed"  # says in a checkpoint that a digest follows it

_ENTRIES = {
    "state_dict": dict,
    "global_step": int,
    "epoch": int,
    "loops": dict,
    "callbacks": dict,
    "optimizer_states": list,
    "lr_schedulers": list,
}

# Lightning passes over memories that are empty, and over optimisers without a state.
_MEMORIES = {"Keeper": ("best", "last"), "CollapseGuard": ("begun", "narrow", "told")}


class AtomicCheckpointIO(TorchCheckpointIO):
    """Writes a checkpoint under another name, its digest at the end, and renames it when it is complete."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write a checkpoint; until the last moment `path` holds the previous one."""
        with saving(Path(path)):
            write_sealed(Path(path), lambda file: torch.save({**checkpoint, _SEALED: True}, file))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Read a checkpoint, of plain values and tensors alone, to the CPU."""
        return load_checkpoint(Path(path))


class Reached(NamedTuple):
    """How far a checkpoint is: its step, the epochs that were begun and those that are done."""

    step: int
    begun: int
    done: int


def load_checkpoint(path: Path, *, mmap: bool = False) -> dict[str, Any]:
    """Read the checkpoint `path` of a run; what is damaged, or no such checkpoint, is refused.

    A digest at its end must match; checkpoints of before have none. With `mmap` tensors stay on the disk.

    >>> load_checkpoint(Path("nowhere.ckpt"))
    Traceback (most recent call last):
    ...
    FileNotFoundError: ...
    """
    try:
        sealed = check_seal(path)
        if not zipfile.is_zipfile(path):
            raise UserError("is damaged or cut short: it is no archive of torch.save")
        if is_oversized(path):
            raise UserError("is damaged, or comes from elsewhere: it unpacks to more than the file itself")
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=mmap)
        _check_entries(found)
        if found.get(_SEALED) and not sealed:
            raise UserError("is damaged or cut short: the digest at its end is not there")
    except OSError:
        raise
    except pickle.UnpicklingError:
        what = "it holds something else than numbers and tensors, which was not run"
        raise _refusal(path, f"is damaged, or comes from elsewhere: {what}") from None
    except DamagedError:
        raise _refusal(path, "is damaged: its content does not match the digest at its end") from None
    except UserError as error:
        raise _refusal(path, str(error)) from None
    except Exception as error:  # whatever a reader of archives makes of any bytes
        raise _refusal(path, f"is damaged or cut short ({type(error).__name__})") from None
    return found  # type: ignore[no-any-return]


def reached(path: Path) -> Reached:
    """Return how far the checkpoint `path` is; all 0 where there is none.

    >>> reached(Path("nowhere.ckpt"))
    Reached(step=0, begun=0, done=0)
    """
    if not path.exists():
        return Reached(0, 0, 0)
    found = load_checkpoint(path, mmap=True)
    try:
        for name, keys in _MEMORIES.items():
            if (memory := found["callbacks"].get(name)) is not None:
                _ = [memory[key] for key in keys]
        _ = found["optimizer_states"][0]["state"]
        epochs = found["loops"]["fit_loop"]["epoch_progress"]["current"]
        return Reached(found["global_step"], int(epochs["ready"]), int(epochs["processed"]))
    except (LookupError, TypeError, ValueError) as error:
        raise unfit(path, error) from None


def unfit(path: Path, error: BaseException) -> UserError:
    """Return what to say of a checkpoint `path` that can be read, but not be gone on from: an `error`.

    >>> print(unfit(Path("last.ckpt"), KeyError("best")))
    last.ckpt is not the checkpoint of such a training (KeyError: 'best'); begin a new run ...
    """
    what = " ".join(f"{type(error).__name__}: {error}".split())
    return _refusal(path, f"is not the checkpoint of such a training ({what[:200]})")


def while_restoring(error: BaseException) -> bool:
    """Return whether an `error` arose where Lightning takes up the contents of a checkpoint.

    >>> while_restoring(KeyError("best"))
    False
    """
    frames = (frame.f_code for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        code.co_filename.endswith("checkpoint_connector.py") and "restore" in code.co_name for code in frames
    )


def _refusal(path: Path, what: str) -> DamagedError:
    last = RunFolder(path.parent).last
    begin = f", from the last weights with --weights {last}" if last.is_file() else ""
    return DamagedError(f"{path} {what}; begin a new run in another folder (--out){begin}")


def _check_entries(found: object) -> None:
    if not isinstance(found, dict):
        raise UserError(f"is not the checkpoint of a training: it holds a {type(found).__name__}")
    for name, kind in _ENTRIES.items():
        if name not in found:
            raise UserError(f"is not the whole checkpoint of a training: it has no {name}")
        if not isinstance(found[name], kind):
            is_a = type(found[name]).__name__
            raise UserError(f"is not the checkpoint of a training: its {name} is a {is_a}")
    if not all(isinstance(value, torch.Tensor) for value in found["state_dict"].values()):
        raise UserError("is not the checkpoint of a training: its state_dict holds more than tensors")
