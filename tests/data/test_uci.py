import numpy as np
import pytest
import torch

from caveat.data import load
from caveat.data.uci import KEYS, TABLES, checksum

SIZES = {  # rows, features, test rows of a standard split, test rows of a gap split
    "boston": (506, 13, 51, 168),
    "concrete": (1030, 8, 103, 344),
    "energy": (768, 8, 77, 256),
    "kin8nm": (8192, 8, 819, 2730),
    "naval": (11934, 16, 1193, 3978),
    "power": (9568, 4, 957, 3190),
    "protein": (45730, 9, 4573, 15244),
    "wine": (1599, 11, 160, 532),
    "yacht": (308, 6, 31, 102),
}


def write_yacht(folder):
    rng = np.random.default_rng(0)
    masks = {"yacht_test": np.zeros((3, 20), dtype=bool), "yacht_gap_test": np.zeros((2, 20), dtype=bool)}
    for split in range(3):
        masks["yacht_test"][split, split] = True
    masks["yacht_gap_test"][1, 10:15] = True
    masks["yacht_gap_test"][0, :4] = True
    x, y = rng.normal(size=(20, 2)), np.arange(20.0)
    np.savez(folder / "uci_yacht.npz", yacht_x=np.asfortranarray(x), yacht_y=y, **masks)


def test_split_and_gap_choose_the_mask(tmp_path):
    write_yacht(tmp_path)
    assert load("uci/yacht", tmp_path).test.tensors[1].tolist() == [[0.0]]
    assert load("uci/yacht", tmp_path, split=2).test.tensors[1].tolist() == [[2.0]]
    gap = load("uci/yacht", tmp_path, split=1, gap=True)
    assert gap.test.tensors[1].flatten().tolist() == [10.0, 11.0, 12.0, 13.0, 14.0]
    assert len(gap.train) == 15
    assert gap.preprocessing["split"] == "gap split 1"


def test_a_split_that_is_not_there_is_refused(tmp_path):
    write_yacht(tmp_path)
    with pytest.raises(ValueError, match="split=3, but uci/yacht has standard splits 0 to 2"):
        load("uci/yacht", tmp_path, split=3)
    with pytest.raises(ValueError, match="split=-1, but uci/yacht has gap splits 0 to 1"):
        load("uci/yacht", tmp_path, split=-1, gap=True)


def test_a_missing_table_says_how_to_get_it(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"uci_regression.npz\n(.|\n)*caveat.data.download\(\"uci/wine\"\)"):
        load("uci/wine", tmp_path)


@pytest.mark.parametrize("table", SIZES)
def test_real_tables(need, table):
    folder = need("uci_regression.npz")
    rows, features, n_test, n_gap = SIZES[table]
    with np.load(folder / "uci_regression.npz") as npz:
        arrays = {key: npz[f"{table}_{key}"] for key in KEYS}
    assert checksum(arrays) == TABLES[table].sha256
    assert arrays["test"].shape == (TABLES[table].n_splits, rows)
    last = TABLES[table].n_splits - 1
    dataset = load(f"uci/{table}", folder, split=last)
    assert dataset.train.tensors[0].shape == (rows - n_test, features)
    assert dataset.test.tensors[0].shape == (n_test, features)
    np.testing.assert_allclose(dataset.test.tensors[1].squeeze(1), arrays["y"][arrays["test"][last]], rtol=1e-6)
    gap = load(f"uci/{table}", folder, split=features - 1, gap=True)
    assert len(gap.test) == n_gap
    for x in (dataset.train.tensors[0], gap.train.tensors[0]):
        assert torch.isfinite(x).all()
        varying = [column for column in range(features) if column not in dataset.preprocessing["constant_features"]]
        torch.testing.assert_close(x.mean(0), torch.zeros(features), atol=1e-5, rtol=0)
        torch.testing.assert_close(x[:, varying].std(0, correction=0), torch.ones(len(varying)), atol=1e-4, rtol=0)


def test_real_naval_has_two_constant_features(need):
    assert load("uci/naval", need("uci_regression.npz")).preprocessing["constant_features"] == [8, 11]
