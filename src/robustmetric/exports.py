"""A run's network as one file for programs without this package: ONNX, TorchScript or torch.export."""

from __future__ import annotations

import copy
import io
import json
import logging
import os
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor, nn
from torch.jit._trace import TracerWarning

from robustmetric.data.inputs import Inputs
from robustmetric.data.pairs import ImageArray
from robustmetric.errors import UserError
from robustmetric.evaluation.identity import digest_of, versions
from robustmetric.files import save
from robustmetric.locks import claimed
from robustmetric.sphere import ROUNDING, BrokenEmbeddingsError, embed
from robustmetric.training import Run
from robustmetric.training.parts import perturbs
from robustmetric.training.recipe import bare

FORMATS = {"onnx": (".onnx",), "torchscript": (".pt", ".ts"), "torch-export": (".pt2",)}
"""The formats, and the endings of their files."""

ABOUT = "robustmetric"
"""The key of the metadata in an ONNX file; in an archive, the name of its file, which ends in .json."""

_INPUT, _OUTPUT = "images", "embeddings"
_FARTHEST = 1e-3  # a distance of embeddings that no rounding accounts for
_NOISE = 4  # images of noise that a file is tried on


class Product(nn.Module):
    """A `network` with the preprocessing that operators can do, taken from the `inputs` of its run.

    It maps 8-bit pixels (N, C, S, S), decoded and resized, to embeddings (N, D) of length 1: divides by 255,
    crops, embeds and normalises. The network is copied to the CPU in evaluation mode.

    >>> product = Product(nn.Flatten(), Inputs(resize=6, crop=4, channels=1))
    >>> product(torch.full((2, 1, 6, 6), 255, dtype=torch.uint8))[0, :3]
    tensor([0.2500, 0.2500, 0.2500])
    """

    def __init__(self, network: nn.Module, inputs: Inputs) -> None:
        super().__init__()
        self.network = copy.deepcopy(network).cpu().eval().requires_grad_(False)
        for tensor in (*self.network.parameters(), *self.network.buffers()):
            tensor.data = tensor.data.contiguous()  # torch.export is not sure of tensors in another order
        size = inputs.resize or inputs.crop  # what is not resized is cropped by the caller
        if size is None:
            raise UserError(f"{inputs} does not give the size of the images: set resize or crop")
        self.channels, self.size = inputs.channels or 3, size
        self.crop = inputs.crop or size
        self.begin = (size - self.crop) // 2

    def forward(self, images: Tensor) -> Tensor:
        """Embed `images` (N, C, S, S)."""
        middle = images.narrow(2, self.begin, self.crop).narrow(3, self.begin, self.crop)
        z: Tensor = self.network(middle.float() / 255).float()
        unit: Tensor = z / torch.linalg.vector_norm(z, dim=1, keepdim=True)
        return unit


@dataclass(frozen=True)
class Exported:
    """A file that `export` wrote: its `path` and format `to`, and the metadata `about` it.

    `difference` is the largest distance between its embeddings and those of the run; rounding accounts for
    `allowed`.
    """

    path: Path
    to: str
    difference: float
    allowed: float
    about: dict[str, Any]


def export(run: Run, path: str | os.PathLike[str], *, to: str | None = None, force: bool = False) -> Exported:
    """Write the network of a `run`, with its preprocessing, to the file `path`.

    The network in the file takes 8-bit pixels (N, C, S, S), decoded and resized, for any N, and returns
    embeddings (N, D) of length 1. `to` is "onnx", "torchscript" or "torch-export", by default what the name
    ends in. An existing file is overwritten only with `force`. The file is read back and compared with the
    run on noise, black and white: one that differs by more than rounding is an error and is not kept.
    """
    path = Path(path).expanduser()
    to = _format_of(path, to)
    with claimed(path, "an export", force=force):
        product = Product(run.network, run.inputs).eval()
        images, wanted = _samples(run, product)
        allowed, about = _allowed(run, product, images, wanted), describe(run, wanted.shape[1])
        content = _content(to, product, images[:2], about)
        difference = 0.0

        def write(file: BinaryIO) -> None:
            nonlocal difference
            file.write(content)
            file.flush()
            difference = _difference(_loaded(to, Path(file.name)), images, wanted)
            if not difference <= allowed:
                raise UserError(
                    f"the network in the file is not that of the run: its embeddings differ by up to "
                    f"{difference:.2g}, and rounding accounts for {allowed:.2g}; nothing was written: try "
                    "another format, and look for what is random or depends on the values of the image",
                    parameter="to",
                )

        save(path, write)
    return Exported(path, to, difference, allowed, about)


def _format_of(path: Path, to: str | None) -> str:
    found = to or next((name for name, ends in FORMATS.items() if path.suffix.lower() in ends), "")
    if found not in FORMATS:
        known = ", ".join(f"{name} ({' or '.join(ends)})" for name, ends in FORMATS.items())
        raise UserError(f"there is no format for {to or path.name}; known: {known}", parameter="to")
    return found


_FITS = {
    "squeeze": "resize to {} as Pillow does with BILINEAR",
    "crop": "cut the middle square, resized to {}, as Pillow's ImageOps.fit does with BILINEAR",
    "pad": "resize to fit into {} and pad with white, as Pillow's ImageOps.pad does with BILINEAR",
}


def describe(run: Run, dim: int) -> dict[str, Any]:
    """Return the metadata of a file exported from a `run` with embeddings of length `dim`, in JSON's types.

    `before` lists, in order, what is left to do with an image before it is given to the network.
    """
    inputs, channels = run.inputs, run.inputs.channels or 3
    size = inputs.resize or inputs.crop
    sized = _FITS[inputs.fit] if inputs.resize is not None else "take the middle {}"
    return {
        "schema": "robustmetric/export/1",
        "name": run.name,
        "sha256": digest_of(run.network),
        "weights": run.chosen,
        "defense": bare(run.recipe.model_dump())["defense"],
        "eps": run.recipe.eps if perturbs(run.recipe) else None,
        "dim": dim,
        "resize": inputs.resize,
        "fit": inputs.fit,
        "crop": inputs.crop,
        "channels": channels,
        "colours": "RGB" if channels == 3 else "grey",
        "before": [
            "decode, and turn upright by the EXIF orientation",
            "lay on white what is transparent",
            "convert to RGB" if channels == 3 else "convert to grey as Pillow does with L",
            sized.format(f"{size} x {size}"),
        ],
        "input": {"name": _INPUT, "type": "uint8", "shape": ["batch", channels, size, size]},
        "output": {"name": _OUTPUT, "type": "float32", "shape": ["batch", dim], "length": 1},
        "versions": versions("robustmetric", "torch"),
    }


def _content(to: str, product: Product, example: Tensor, about: dict[str, Any]) -> bytes:
    """Return the file of a `product`, followed along an `example` (2, C, S, S)."""
    try:
        with _quiet():
            return _WRITERS[to](product, example, json.dumps(about, indent=1))
    except MemoryError:
        raise
    except ImportError as error:
        raise UserError(
            f"onnx needs a package that is not installed ({error}): pip install 'robustmetric[onnx]', or "
            "export to torchscript or torch-export",
            parameter="to",
        ) from None
    except Exception as error:  # the exporters raise nearly anything
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        told = _first_line(cause)
        if told.startswith("Constraints violated"):
            told = "it fixes the number of images in a batch"
        raise UserError(
            f"{to} cannot take this network ({told}): choose another format, or take out of the network what "
            "depends on the values or the number of images",
            parameter="to",
        ) from error


def _graph(product: nn.Module, example: Tensor) -> torch.export.ExportedProgram:
    # Some versions of torch take no slice of a batch whose length may be the largest whole number.
    shapes = ({0: torch.export.Dim("batch", max=2**30)},)
    graph = torch.export.export(product, (example,), dynamic_shapes=shapes, strict=False)
    for module in graph.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths of this machine
    return graph


def _torch_export(product: nn.Module, example: Tensor, about: str) -> bytes:
    file = io.BytesIO()
    torch.export.save(_graph(product, example), file, extra_files={f"{ABOUT}.json": about})
    return file.getvalue()


def _torchscript(product: nn.Module, example: Tensor, about: str) -> bytes:
    file, kept = io.BytesIO(), io.BytesIO()
    script = torch.jit.trace(product, example, check_trace=False)
    torch.jit.save(script, file, _extra_files={f"{ABOUT}.json": about})
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(kept, "w") as new:
        for entry in old.infolist():
            if not entry.filename.endswith(".debug_pkl"):  # paths of this machine
                new.writestr(zipfile.ZipInfo(entry.filename), old.read(entry))
    return kept.getvalue()


def _onnx(product: nn.Module, example: Tensor, about: str) -> bytes:
    import onnxruntime  # noqa: F401
    import onnxscript  # noqa: F401
    from onnx.helper import set_model_props

    made = torch.onnx.export(
        _graph(product, example),
        (example,),
        dynamo=True,
        verbose=False,
        input_names=[_INPUT],
        output_names=[_OUTPUT],
    )
    model = made.model_proto  # type: ignore[union-attr]
    # What the exporter notes of where each came from, and its own names for the number of images.
    for part in (*model.graph.node, *model.graph.input, *model.graph.output):
        del part.metadata_props[:]
    for value in (*model.graph.input, *model.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    del model.graph.value_info[:]
    set_model_props(model, {ABOUT: about})
    content: bytes = model.SerializeToString()
    return content


_WRITERS = {"onnx": _onnx, "torchscript": _torchscript, "torch-export": _torch_export}


def _loaded(to: str, path: Path) -> Callable[[Tensor], Tensor]:
    """Read an exported file back, as a function from pixels (N, C, S, S) to embeddings (N, D)."""
    if to == "onnx":
        import onnxruntime

        session = onnxruntime.InferenceSession(path.read_bytes(), providers=["CPUExecutionProvider"])
        return lambda images: torch.from_numpy(session.run([_OUTPUT], {_INPUT: images.numpy()})[0])
    with _quiet(), path.open("rb") as file:
        if to == "torchscript":
            script: nn.Module = torch.jit.load(file, map_location="cpu")
            return script.__call__
        return torch.export.load(file).module().__call__


@contextmanager
def _quiet() -> Iterator[None]:
    """Leave out what torch prints about its future, its graphs and its traces: the file is tried instead."""
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


def _samples(run: Run, product: Product) -> tuple[Tensor, Tensor]:
    """Return the pixels (N, C, S, S) that a file is tried on, and the run's embeddings of them."""
    shape = (product.channels, product.size, product.size)
    noise = torch.Generator().manual_seed(0)
    images = [torch.randint(256, (_NOISE, *shape), dtype=torch.uint8, generator=noise)]
    found = [_embedded(run, product.network, images[0])]
    for level in (0, 255):
        edge = torch.full((1, *shape), level, dtype=torch.uint8)
        try:
            found.append(_embedded(run, product.network, edge))
        except BrokenEmbeddingsError:  # it has no direction, there or here
            continue
        images.append(edge)
    return torch.cat(images), torch.cat(found)


def _embedded(run: Run, network: nn.Module, pixels: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Embed pixels as an evaluation of the run does."""
    crop = run.inputs.crop if run.inputs.resize is not None else None
    with torch.no_grad():
        return embed(network, ImageArray(pixels.permute(0, 2, 3, 1).numpy(), crop)[:].to(dtype))


def _allowed(run: Run, product: Product, images: Tensor, wanted: Tensor) -> float:
    """Return how far apart rounding alone may put two programs of the network.

    Embeddings within ROUNDING count as equal everywhere. Where the network's own rounding is more, as double
    precision shows, two programs that round twice as much in another order are four times as far apart.
    """
    try:
        exact = _embedded(run, copy.deepcopy(product.network).double(), images, torch.float64)
    except Exception:  # a network that takes single precision alone
        return ROUNDING
    return min(max(ROUNDING, 4 * float((wanted - exact).norm(dim=1).max())), _FARTHEST)


def _difference(program: Callable[[Tensor], Tensor], images: Tensor, wanted: Tensor) -> float:
    """Return the largest distance of a program's embeddings to those wanted; NaN if one is."""
    apart = []
    for rows in (slice(0, 1), slice(len(images) - 1, None), slice(0, 3), slice(None)):
        part, expected = images[rows], wanted[rows]
        try:
            with torch.no_grad():
                z = program(part)
            told = "" if z.shape == expected.shape else f"returns {tuple(z.shape)}"
        except Exception as error:
            told = f"fails: {_first_line(error)}"
        if told:
            raise UserError(
                f"the network in the file, given {len(part)} images, {told}; nothing was written: let the "
                "network take any number of images",
                parameter="to",
            )
        apart.append((z.double() - expected.double()).norm(dim=1))
    return float(torch.cat(apart).max())


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)
