"""An exported file says what `predict` says, for any number of rows, and holds nothing of the data."""

from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import caveat

SHORT = caveat.Training(epochs=3, batch_size=20)
METHODS: dict[str, Any] = {
    "MAP": caveat.MAP(training=SHORT),
    "DeepEnsemble": caveat.DeepEnsemble(members=3, training=SHORT),
    "LastLayerLaplace": caveat.LastLayerLaplace(precision=1.0, default_draws=6),
    "SubnetworkLaplace": caveat.SubnetworkLaplace(weights=20, precision=1.0, default_draws=6),
    "SampledLaplace": caveat.SampledLaplace(samples=6, precision=1.0),
    "Ensemble": caveat.Ensemble(caveat.LastLayerLaplace(default_draws=3), members=2, training=SHORT),
    "SSVI": caveat.SSVI(density=0.5, interval=3, default_draws=3, training=SHORT),
}
QUICK = {
    ("SubnetworkLaplace", "classes", ".onnx"),
    ("LastLayerLaplace", "numbers", ".pt2"),
    ("Ensemble", "numbers", ".pt2"),
}
CASES = [
    pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow)
    for case in ((m, kind, ending) for m in METHODS for kind in ("classes", "numbers") for ending in (".pt2", ".onnx"))
]


def rows() -> Tensor:
    return torch.randn(60, 1, 6, 6, generator=torch.Generator().manual_seed(1))


def module(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    first = [nn.Conv2d(1, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()]
    return nn.Sequential(*first, nn.Linear(27, 8), nn.Tanh(), nn.Linear(8, outputs))


@cache
def posterior(method: str, kind: str) -> caveat.Posterior:
    x = rows()
    if kind == "classes":
        task = caveat.Task(module(3), (x, torch.arange(60) % 3), caveat.Categorical())
    else:
        y = 50 + 7 * x.flatten(1)[:, :2]
        task = caveat.Task(module(2), (x, y), caveat.Gaussian(standardise=True))
    start = caveat.MAP(training=SHORT) if METHODS[method].starts_from == "trained" else None
    return caveat.fit(task, METHODS[method], start=start, progress=False)


def parts(prediction: Any) -> dict[str, Tensor]:
    mean = prediction.probs if prediction.kind == "classification" else prediction.mean
    return {"mean": mean, "aleatoric": prediction.aleatoric, "epistemic": prediction.epistemic}


def run_file(file: Path, x: Tensor) -> dict[str, Any]:
    if file.suffix == ".pt2":
        loaded: dict[str, Tensor] = torch.export.load(file).module()(x)
        return loaded
    runtime = pytest.importorskip("onnxruntime")
    session = runtime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    values = session.run(names, {session.get_inputs()[0].name: x.numpy()})
    return {name: torch.from_numpy(np.asarray(value)) for name, value in zip(names, values, strict=True)}


@pytest.mark.parametrize(("method", "kind", "ending"), CASES)
def test_a_file_is_equal_to_predict(method: str, kind: str, ending: str, tmp_path: Path) -> None:
    if ending == ".onnx":
        pytest.importorskip("onnxscript")
        pytest.importorskip("onnxruntime")
    fitted = posterior(method, kind)
    file = caveat.export(fitted, tmp_path / f"posterior{ending}")
    for count in (1, 5):
        x = rows()[:count]
        expected = parts(fitted.predict(x))
        given = run_file(file, x)
        assert given.keys() == expected.keys()
        for name, value in expected.items():
            scale = max(1.0, float(value.abs().max()))
            torch.testing.assert_close(given[name], value, rtol=0, atol=1e-5 * scale, msg=lambda m, n=name: f"{n}: {m}")
    content = file.read_bytes()
    for row in rows().flatten(1):
        assert row[:6].numpy().tobytes() not in content


def test_rows_that_are_given_as_an_example_are_not_in_the_file(tmp_path: Path) -> None:
    fitted = posterior("MAP", "classes")
    x = rows()
    file = caveat.export(fitted, tmp_path / "posterior.pt2", example=x[:2])
    content = file.read_bytes()
    assert not any(row[:6].numpy().tobytes() in content for row in x.flatten(1))
    weight = next(iter(fitted.state["params"].values()))
    assert weight.flatten()[:6].numpy().tobytes() in content  # as they would be there


def test_what_is_written_is_said_by_the_ending(tmp_path: Path) -> None:
    fitted = posterior("MAP", "classes")
    with pytest.raises(ValueError, match=r"the ending says what is written: .pt2 \(torch\) or .onnx"):
        caveat.export(fitted, tmp_path / "posterior.pth")
    (tmp_path / "there.pt2").write_text("mine")
    with pytest.raises(FileExistsError, match="choose another file"):
        caveat.export(fitted, tmp_path / "there.pt2")
    assert (tmp_path / "there.pt2").read_text() == "mine"
