"""A posterior's prediction as one file: inputs -> mean, aleatoric, epistemic, for any number of rows.

    .pt2     `torch.export`: loaded by torch alone
    .onnx    for onnxruntime and others that read ONNX

Nothing of the data is in the file. Exporters keep the inputs that they were shown, a whole tensor even for a slice of
it: what they are shown here is made up.
"""

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from torch.export import ExportedProgram

from caveat.batches import Inputs
from caveat.engine.served import OUTPUTS, served_program
from caveat.files import whole_file
from caveat.posterior import Posterior

__all__ = ["export"]


def export(
    posterior: Posterior,
    file: str | Path,
    *,
    draws: int | None = None,
    seed: int = 0,
    example: Inputs | None = None,
) -> Path:
    """Write the prediction to a file, by its ending `.pt2` or `.onnx`; returns its path.

    Args:
        posterior: of any method that `posterior.module()` takes, on the device where the file will be used.
        file: an existing one is refused.
        draws: posterior draws; the method's own number, or its closed form, unless given.
        seed: of the draws.
        example: a few rows of inputs, of which only shapes and types are used; not needed unless that is asked for.
    """
    file = Path(file)
    if file.suffix not in (".pt2", ".onnx"):
        raise ValueError(f"export({str(file)!r}): the ending says what is written: .pt2 (torch) or .onnx")
    if file.exists():
        raise FileExistsError(f"{file} exists: choose another file")
    if file.suffix == ".onnx":
        _refuse_without_onnx()
    module = posterior.module(draws=draws, seed=seed, example=example)
    rows = posterior.example(example)
    with _quietly(), torch.no_grad():
        program = served_program(module, posterior.network, rows)
        content = _pt2(program) if file.suffix == ".pt2" else _onnx(program)
    file.parent.mkdir(parents=True, exist_ok=True)
    with whole_file(file) as place:
        place.write_bytes(content)
    return file


def _pt2(program: ExportedProgram) -> bytes:
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    return buffer.getvalue()


def _onnx(program: ExportedProgram) -> bytes:
    converted = torch.onnx.export(program, dynamo=True, verbose=False)
    assert converted is not None  # it is None where a path is given
    graph = converted.model.graph
    for node in graph:  # a step inside may have the name of an output
        for value in node.outputs:
            if value.name in OUTPUTS:
                value.name = f"{value.name}_within"
    for value, name in zip(graph.outputs, OUTPUTS, strict=True):
        value.name = name
    content: bytes = converted.model_proto.SerializeToString()
    return content


def _refuse_without_onnx() -> None:
    try:
        import onnx
        import onnxscript
    except ImportError as error:
        raise ImportError('an .onnx file needs the extra: pip install "caveat[onnx]"; a .pt2 file does not') from error
    del onnx, onnxscript


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Exporters talk of operators of packages that are not installed, and of their own deprecations."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
