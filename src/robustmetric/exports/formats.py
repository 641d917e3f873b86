"""The formats of exported networks: how each is written, and how it is read again."""

from __future__ import annotations

import io
import json
import logging
import re
import warnings
import zipfile
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from robustmetric.errors import UserError
from robustmetric.exports.product import INPUT, OUTPUT

ABOUT = "robustmetric"
"""The key of the metadata in an ONNX file; an archive has it as a file, with .json behind it."""

LARGEST = 2**31 - 2**20
"""Bytes of weights that fit into one ONNX file, with room for the graph."""

Program = Callable[[Tensor], Tensor]
"""An exported network that was read again: pixels (N, C, S, S) to embeddings (N, D)."""

_UNSUPPORTED = re.compile(r"No ONNX function found for <OpOverload\(op='([^']+)'")


class Format(ABC):
    """A format of exported networks."""

    @abstractmethod
    def check(self) -> None:
        """Refuse to export without the packages that the format needs."""

    @abstractmethod
    def content(self, network: nn.Module, example: Tensor, about: dict[str, Any]) -> bytes:
        """Return the file of a `network`, with `about` in it; an `example` (2, C, S, S) leads through it."""

    @abstractmethod
    def program(self, path: Path) -> Program:
        """Read the file `path` again."""


class Exported(Format):
    """An archive of torch.export, for torch and what compiles it ahead of time."""

    def check(self) -> None:
        """Torch is there."""

    def content(self, network: nn.Module, example: Tensor, about: dict[str, Any]) -> bytes:
        """Return the archive."""
        file = io.BytesIO()
        with _quiet():
            torch.export.save(followed(network, example), file, extra_files={f"{ABOUT}.json": _text(about)})
        return file.getvalue()

    def program(self, path: Path) -> Program:
        """Load the archive."""
        with _quiet(), path.open("rb") as file:
            module = torch.export.load(file).module()
        return module.__call__


class TorchScript(Format):
    """An archive of TorchScript, for torch and libtorch; torch itself calls it deprecated."""

    def check(self) -> None:
        """Torch is there."""

    def content(self, network: nn.Module, example: Tensor, about: dict[str, Any]) -> bytes:
        """Return the archive."""
        file = io.BytesIO()
        with _quiet():
            try:
                script = torch.jit.trace(network, example, check_trace=False)
                torch.jit.save(script, file, _extra_files={f"{ABOUT}.json": _text(about)})
            except (RuntimeError, TypeError, ValueError) as error:
                raise UserError(
                    f"TorchScript cannot follow the network ({first_line(error)}): export it to exported, or "
                    "change the network",
                    parameter="to",
                ) from error
        return _without_sources(file)

    def program(self, path: Path) -> Program:
        """Load the archive."""
        with _quiet(), path.open("rb") as file:
            module: nn.Module = torch.jit.load(file, map_location="cpu")
        return module.__call__


class Onnx(Format):
    """An ONNX file, for onnxruntime and most other inference engines; all weights are in it."""

    def check(self) -> None:
        """Look for the packages of the extra."""
        try:
            import onnx  # noqa: F401
            import onnxruntime  # noqa: F401
            import onnxscript  # noqa: F401
        except ImportError as error:
            raise UserError(
                f"an export to onnx needs a package that is not there ({first_line(error)}): pip install "
                "'robustmetric[onnx]', or export to torchscript or exported",
                parameter="to",
            ) from None

    def content(self, network: nn.Module, example: Tensor, about: dict[str, Any]) -> bytes:
        """Return the file."""
        from onnx.helper import set_model_props

        size = sum(v.nbytes for values in (network.parameters(), network.buffers()) for v in values)
        if size > LARGEST:
            raise UserError(
                f"the network has {size / 1e9:,.1f} GB of weights, and an ONNX file holds at most 2 GB: "
                "export it to torchscript or exported",
                parameter="to",
            )
        graph = followed(network, example)
        with _quiet():
            try:
                made = torch.onnx.export(
                    graph,
                    (example,),
                    dynamo=True,
                    verbose=False,
                    input_names=[INPUT],
                    output_names=[OUTPUT],
                )
            except torch.onnx.OnnxExporterError as error:
                raise UserError(_not_in_onnx(error), parameter="to") from error
        model = made.model_proto  # type: ignore[union-attr]
        # What the exporter notes of where each came from, and its own names for the number of images.
        for part in (*model.graph.node, *model.graph.input, *model.graph.output):
            del part.metadata_props[:]
        for value in (*model.graph.input, *model.graph.output):
            value.type.tensor_type.shape.dim[0].dim_param = "batch"
        del model.graph.value_info[:]
        set_model_props(model, {ABOUT: _text(about)})
        content: bytes = model.SerializeToString()
        return content

    def program(self, path: Path) -> Program:
        """Open a session of onnxruntime on the CPU."""
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run([OUTPUT], {INPUT: images.numpy()})[0])


FORMATS: dict[str, Format] = {"onnx": Onnx(), "torchscript": TorchScript(), "exported": Exported()}
"""All formats by name."""

SUFFIXES = {".onnx": "onnx", ".pt": "torchscript", ".ts": "torchscript", ".pt2": "exported"}
"""The formats that files of these names are taken for."""


def followed(network: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    """Return the operators of a `network` for any number of images, followed along an `example` (2, C, S, S).

    >>> followed(nn.Flatten(), torch.rand(2, 1, 2, 2)).module()(torch.rand(3, 1, 2, 2)).shape
    torch.Size([3, 4])
    """
    # Some versions of torch take no slice of a batch whose length may be the largest whole number.
    shapes = ({0: torch.export.Dim("batch", max=2**30)},)
    with _quiet():
        try:
            graph = torch.export.export(network, (example,), dynamic_shapes=shapes, strict=False)
        except Exception as error:  # whatever an operator raises of tensors without values
            told = first_line(error)
            if told.startswith("Constraints violated"):
                told = "it fixes the number of images in a batch"
            raise UserError(
                f"torch.export cannot follow the network ({told}): take out what depends on the values or "
                "the number of images, or export it to torchscript",
                parameter="to",
            ) from error
    # Where the code was, and its lines: nobody's business.
    for module in graph.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)
    return graph


def first_line(error: BaseException) -> str:
    r"""Return the first line of what an `error` says; its kind if it says nothing.

    >>> first_line(RuntimeError("no such operator\nin a graph"))
    'no such operator'
    """
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


def _not_in_onnx(error: BaseException) -> str:
    """Say which operator ONNX does not have, or whatever else was wrong."""
    cause: BaseException = error
    while not (found := _UNSUPPORTED.search(str(cause))) and cause.__cause__ is not None:
        cause = cause.__cause__
    other = "export it to torchscript or exported"
    if found:
        return f"ONNX has no operator for {found[1]}, which the network uses: {other}, or change the network"
    return (
        f"torch {torch.__version__} cannot write the network as ONNX ({first_line(cause)}): {other}, or take "
        "a newer torch"
    )


def _text(about: dict[str, Any]) -> str:
    return json.dumps(about, indent=1)


def _without_sources(file: io.BytesIO) -> bytes:
    """Return a TorchScript archive without the records of the Python files that it was traced from."""
    kept = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(kept, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith(".debug_pkl"):
                new.writestr(zipfile.ZipInfo(entry.filename), old.read(entry))
    return kept.getvalue()


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch says of its future, its graphs and its traces: the file is tried instead."""
    before = logging.root.manager.disable
    with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
        warnings.filterwarnings("ignore", r"`torch\.jit\.\w+` is deprecated", DeprecationWarning)
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is", FutureWarning)
        warnings.filterwarnings("ignore", category=TracerWarning)
        logging.disable(logging.WARNING)
        try:
            yield
        finally:
            logging.disable(before)
