"""Networks that take several inputs, names, flags and tokens are exported, for any number of rows."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import caveat
from caveat.batches import map_tensors

SHORT = caveat.Training(epochs=2, batch_size=20)
ENSEMBLE = caveat.DeepEnsemble(members=2, training=SHORT)
LINEARISED = caveat.LastLayerLaplace(precision=1.0, default_draws=3)
ROWS = 40


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.of_image, self.of_table, self.out = nn.Linear(3, 8), nn.Linear(2, 8), nn.Linear(8, 3)

    def forward(self, image: Tensor, table: Tensor, doubled: bool = False) -> Tensor:
        outputs: Tensor = self.out(torch.tanh(self.of_image(image) + self.of_table(table)))
        return 2 * outputs if doubled else outputs


class Batch(Two):
    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(**batch)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.norm, self.out = nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None) -> Tensor:
        h = self.norm(self.embedding(input_ids)).relu()
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        weights = mask.unsqueeze(-1).to(h.dtype)
        return self.out((h * weights).sum(1) / weights.sum(1).clamp_min(1))


def numbers(*shape: int) -> Tensor:
    return torch.randn(ROWS, *shape, generator=torch.Generator().manual_seed(len(shape)))


def tokens() -> Tensor:
    return torch.randint(11, (ROWS, 5), generator=torch.Generator().manual_seed(0))


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "two": (Two, (numbers(3), numbers(2))),
    "names": (Two, {"table": numbers(2), "image": numbers(3)}),
    "a flag": (Two, {"image": numbers(3), "table": numbers(2), "doubled": True}),
    "one dict": (Batch, {"image": numbers(3), "table": numbers(2)}),
    "tokens": (Tokens, tokens()),
    "tokens and mask": (Tokens, {"input_ids": tokens(), "attention_mask": (tokens() > 3).long()}),
}


class Examples(torch.utils.data.Dataset):
    def __init__(self, x: Any) -> None:
        self.x, self.y = x, torch.arange(ROWS) % 3

    def __len__(self) -> int:
        return ROWS

    def __getitem__(self, i: int) -> Any:
        return map_tensors(lambda tensor: tensor[i], self.x), self.y[i]


def collated(examples: list[Any]) -> Any:
    inputs, labels = zip(*examples, strict=True)
    if isinstance(inputs[0], Tensor):
        return torch.stack(inputs), torch.stack(labels)
    if isinstance(inputs[0], tuple):
        return tuple(torch.stack(part) for part in zip(*inputs, strict=True)), torch.stack(labels)
    first = inputs[0]
    joined = {k: torch.stack([x[k] for x in inputs]) if isinstance(v, Tensor) else v for k, v in first.items()}
    return joined, torch.stack(labels)


def fitted(make: Callable[[], nn.Module], x: Any, method: Any) -> caveat.Posterior:
    torch.manual_seed(0)
    task = caveat.Task(make(), DataLoader(Examples(x), 20, collate_fn=collated), caveat.Categorical())
    start = caveat.MAP(training=SHORT) if method.starts_from == "trained" else None
    return caveat.fit(task, method, start=start, progress=False)


def called(module: Any, x: Any, one: bool) -> dict[str, Tensor]:
    """The module as its network is called; names may come in another order."""
    if isinstance(x, tuple):
        return module(*x)
    return module(**dict(reversed(x.items()))) if isinstance(x, dict) and not one else module(x)


def check(posterior: caveat.Posterior, x: Any, given: dict[str, Tensor]) -> None:
    prediction: Any = posterior.predict(x)
    torch.testing.assert_close(given["mean"], prediction.probs, rtol=0, atol=1e-5)
    torch.testing.assert_close(given["epistemic"], prediction.epistemic, rtol=0, atol=1e-5)


@pytest.mark.parametrize("method", [ENSEMBLE, LINEARISED], ids=["ensemble", "linearised"])
@pytest.mark.parametrize("name", CASES)
def test_a_file_takes_what_the_network_takes(name: str, method: Any, tmp_path: Path) -> None:
    make, x = CASES[name]
    posterior = fitted(make, x, method)
    alone = torch.export.load(caveat.export(posterior, tmp_path / "posterior.pt2")).module()
    for rows in (1, 7):
        few = map_tensors(lambda tensor, rows=rows: tensor[:rows], x)
        check(posterior, few, called(alone, few, make is Batch))


@pytest.mark.parametrize("name", ["names", "tokens and mask"])
def test_an_onnx_file_has_inputs_of_these_names(name: str, tmp_path: Path) -> None:
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    make, x = CASES[name]
    posterior = fitted(make, x, ENSEMBLE)
    file = caveat.export(posterior, tmp_path / "posterior.onnx")
    session = runtime.InferenceSession(file.read_bytes(), providers=["CPUExecutionProvider"])
    few = {key: value[:7] for key, value in x.items()}
    assert {place.name for place in session.get_inputs()} == few.keys()
    values = session.run(["mean", "epistemic"], {key: value.numpy() for key, value in few.items()})
    check(posterior, few, dict(zip(("mean", "epistemic"), map(torch.from_numpy, map(np.asarray, values)), strict=True)))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("method", [ENSEMBLE, LINEARISED], ids=["ensemble", "linearised"])
def test_a_network_for_one_number_of_rows_is_refused_with_the_reason(method: Any, tmp_path: Path) -> None:
    class RowByRow(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([super(RowByRow, self).forward(row) for row in x])

    posterior = fitted(lambda: RowByRow(3, 3), numbers(3), method)
    with pytest.raises(ValueError, match=r"does not take this network for any number of rows .*a constant \(3\)"):
        caveat.export(posterior, tmp_path / "posterior.pt2")
    assert not (tmp_path / "posterior.pt2").exists()
