"""Rows in blocks: all of them once, in order, whatever the size of the loader's batches."""

import torch
from torch.utils.data import DataLoader, TensorDataset

from caveat.evaluate.predictions import file_stem, row_blocks, row_uncertainty
from caveat.rows import Rows


def test_batches_are_joined_until_a_block_is_full():
    x, y = torch.arange(22.0)[:, None], torch.arange(22)
    blocks = list(row_blocks(Rows(DataLoader(TensorDataset(x, y), batch_size=4)), 10))
    assert [len(targets) for _, targets in blocks] == [12, 10]
    torch.testing.assert_close(torch.cat([inputs for inputs, _ in blocks]), x)


def test_uncertainty_is_entropy_or_the_summed_variance():
    assert row_uncertainty({"entropy": torch.tensor([0.5]).numpy()}).tolist() == [0.5]
    assert row_uncertainty({"variance": torch.tensor([[1.0, 2.0]]).numpy()}).tolist() == [3.0]


def test_files_are_named_after_their_data_sets():
    assert [file_stem(name) for name in ("Rotated 60", "gaussian_noise 0.5", "///")] == [
        "rotated-60",
        "gaussian-noise-0.5",
        "data",
    ]
