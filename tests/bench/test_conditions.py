"""Inputs that predictions are drawn over."""

from pathlib import Path

import numpy as np

from tests.bench.small import run


def test_inputs_of_one_or_two_numbers_have_a_plane(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for columns in (1, 2):
        x = rng.uniform(-1, 1, (60, columns))
        lines = [",".join(f"{v:.4f}" for v in (*row, np.sin(row.sum()))) for row in x]
        (tmp_path / f"toy{columns}.csv").write_text("\n".join([",".join("abc"[: columns + 1]), *lines]) + "\n")
    (tmp_path / "toy.toml").write_text('data = ["toy1.csv", "toy2.csv"]\nmodels = ["mlp"]\n[map]\nepochs = 2\n')
    done = run(tmp_path / "toy.toml", tmp_path / "out")
    assert not done.failed
    for name, shape in (("toy1", (200, 1)), ("toy2", (3600, 2))):
        with np.load(next((tmp_path / "out").glob(f"cells/{name}-*/plane.npz"))) as plane:
            assert plane["x"].shape == shape
            assert plane["mean"].shape == (shape[0], 1)
            assert plane["x"].min() < -2.5, (
                "standardised inputs end near -1.7, and the line goes on for half their range"
            )
