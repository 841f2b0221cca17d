import numpy as np
import pytest
import torch
from PIL import Image

import caveat.data
from caveat.data import load, names


def test_the_public_names():
    assert set(caveat.data.__all__) == {
        "DataSet",
        "crop_and_flip",
        "prepare",
        "prepare_table",
        "download",
        "from_frame",
        "load",
        "names",
        "out_of_distribution",
        "ood_pairs",
        "rotate",
        "shift",
        "shifted",
        "Shift",
        "SHIFTS",
        "Conditions",
        "conditions",
        "CORRUPTIONS",
        "gap_mask",
        "gap_split",
    }
    assert callable(caveat.data.download)


def test_names_have_one_line_each():
    known = names()
    assert {"digits", "mnist", "cifar100", "toy_regression", "uci/boston", "uci/yacht"} <= set(known)
    assert sum(name.startswith("uci/") for name in known) == 9
    assert all(line and "\n" not in line for line in known.values())


def test_every_name_loads_or_says_what_is_missing(tmp_path):
    embedded = {"digits", "grainy_digits", "breast_cancer", "diabetes"}
    for name in embedded:
        assert load(name).name == name
    for name in set(names()) - embedded - {"mnist1d"}:  # generated, see test_embedded
        with pytest.raises(FileNotFoundError, match=f"the data set {name} was not found(.|\n)*{tmp_path}"):
            load(name, tmp_path)


@pytest.mark.parametrize("name", ["mnits", "uci/bostn", "no/such/folder", "table.txt"])
def test_unknown_names_list_the_known_ones(name):
    with pytest.raises(ValueError, match=f"'{name}' is neither a known data set nor a path.*digits.*uci/yacht"):
        load(name)


@pytest.mark.parametrize("name", ["missing.npz", "missing.csv"])
def test_a_missing_file_is_named(tmp_path, name):
    with pytest.raises(FileNotFoundError, match=f"{name} does not exist"):
        load(str(tmp_path / name))


@pytest.mark.parametrize("choice", [{"split": 1}, {"gap": True}])
def test_splits_of_sets_without_any_are_refused(choice):
    with pytest.raises(ValueError, match="'digits' has none"):
        load("digits", **choice)


def save_npz(path, **changes):
    rng = np.random.default_rng(0)
    arrays = {"x_train": rng.normal(size=(8, 2)), "x_test": rng.normal(size=(4, 2))}
    np.savez(path, **(arrays | changes))
    return str(path)


def test_npz_with_labels_is_classification(tmp_path):
    path = save_npz(tmp_path / "mine.npz", y_train=np.array([5, 7] * 4), y_test=np.array([[7], [7], [9], [5]]))
    dataset = load(path)
    assert (dataset.name, dataset.likelihood, dataset.n_outputs) == ("mine", "categorical", 3)
    assert dataset.class_names == ("5", "7", "9")
    assert dataset.test.tensors[1].tolist() == [1, 1, 2, 0]


def test_npz_with_text_labels(tmp_path):
    dataset = load(save_npz(tmp_path / "mine.npz", y_train=np.array(["b", "a"] * 4), y_test=np.array(["a"] * 4)))
    assert dataset.class_names == ("a", "b")
    assert dataset.train.tensors[1].tolist() == [1, 0] * 4


def test_npz_with_numbers_is_regression(tmp_path):
    y = np.arange(24.0).reshape(8, 3)
    dataset = load(save_npz(tmp_path / "mine.npz", y_train=y, y_test=y[:4]))
    assert (dataset.likelihood, dataset.n_outputs, dataset.class_names) == ("gaussian", 3, ())


@pytest.mark.parametrize(("y", "value"), [(np.ones((8, 2)), "1, 1"), (np.full(8, 3), "3"), (np.array(["a"] * 8), "a")])
def test_a_constant_target_is_refused(tmp_path, y, value):
    with pytest.raises(ValueError, match=f"mine.npz: the target is {value} in every row"):
        load(save_npz(tmp_path / "mine.npz", y_train=y, y_test=y[:4]))


def test_npz_with_a_table_of_labels_is_refused(tmp_path):
    path = save_npz(tmp_path / "mine.npz", y_train=np.ones((8, 3), dtype=int), y_test=np.ones((4, 3), dtype=int))
    with pytest.raises(ValueError, match=r"mine.npz: y_train has shape \(8, 3\); class labels are one a row"):
        load(path)


def test_npz_without_a_test_part_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"mine.npz lacks y_test"):
        load(save_npz(tmp_path / "mine.npz", y_train=np.ones(8)))


def test_csv(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("a,b,t\n" + "".join(f"{i},{-i},{'yes' if i % 2 else 'no'}\n" for i in range(50)))
    dataset = load(str(path), seed=3)
    assert (dataset.likelihood, dataset.class_names) == ("categorical", ("no", "yes"))
    assert (len(dataset.train), len(dataset.test)) == (40, 10)
    assert torch.bincount(dataset.test.tensors[1]).tolist() == [5, 5]
    assert torch.equal(load(str(path), seed=3).test.tensors[0], dataset.test.tensors[0])
    assert not torch.equal(load(str(path), seed=4).test.tensors[0], dataset.test.tensors[0])
    path.write_text("a,t\n1,0.5\n2,0.25\n")
    with pytest.raises(ValueError, match=r"mine.csv: 2 rows are too few"):
        load(str(path))


def test_the_target_of_a_csv_by_name(tmp_path):
    path = tmp_path / "mine.csv"
    path.write_text("t, a,b\n" + "".join(f"{i % 2},{i},{-i}\n" for i in range(10)))
    dataset = load(str(path), target="t")
    assert (dataset.preprocessing["columns"], dataset.preprocessing["target"]) == (["a", "b"], "t")
    assert dataset.class_names == ("0", "1")
    with pytest.raises(ValueError, match=r"mine.csv lacks the column z; it has t, a, b"):
        load(str(path), target="z")
    with pytest.raises(ValueError, match="target='t' is to be of a csv or parquet file, which 'digits' is not"):
        load("digits", target="t")
    path.write_text("a,a,t\n1,2,3\n")
    with pytest.raises(ValueError, match=r"mine.csv has more than one column named 'a'"):
        load(str(path))


def image_folder(folder, classes, each):
    rng = np.random.default_rng(0)
    for name in classes:
        (folder / name).mkdir(parents=True)
        for index in range(each):
            Image.fromarray(rng.integers(0, 256, (6, 5), dtype=np.uint8)).save(folder / name / f"{index}.png")


def test_a_folder_of_classes_is_split_at_random(tmp_path):
    image_folder(tmp_path / "animals", ("cat", "dog"), each=10)
    dataset = load(str(tmp_path / "animals"))
    assert (dataset.name, dataset.class_names) == ("animals", ("cat", "dog"))
    assert dataset.train.tensors[0].shape == (16, 1, 6, 5)
    assert torch.bincount(dataset.test.tensors[1]).tolist() == [2, 2]


def test_a_folder_with_train_and_test_keeps_them(tmp_path):
    image_folder(tmp_path / "train", ("cat", "dog"), each=3)
    image_folder(tmp_path / "test", ("cat", "dog"), each=1)
    dataset = load(str(tmp_path))
    assert (len(dataset.train), len(dataset.test)) == (6, 2)
    image_folder(tmp_path / "test", ("elk",), each=1)
    with pytest.raises(ValueError, match=r"train has the classes \('cat', 'dog'\), test has \('cat', 'dog', 'elk'\)"):
        load(str(tmp_path))


def test_toy_regression(tmp_path):
    x = np.linspace(-1, 1, 12, dtype=np.float32)
    features, y = np.stack([x, x**2], axis=1), x[:, None]
    np.savez(
        tmp_path / "toy_regression_bnn_hmc.npz",
        f_train=features,
        y_train=y,
        f_test=features[:5],
        y_test_noiseless=y[:5],
    )
    dataset = load("toy_regression", tmp_path)
    np.testing.assert_array_equal(dataset.train.tensors[0], features)  # not standardised
    np.testing.assert_array_equal(dataset.test.tensors[1], y[:5])
    assert dataset.preprocessing["features"] == "(x, x^2)"


def test_real_toy_regression(need):
    dataset = load("toy_regression", need("toy_regression_bnn_hmc.npz"))
    x = dataset.train.tensors[0]
    assert x.shape == (120, 2)
    torch.testing.assert_close(x[:, 1], x[:, 0] ** 2)
