import json

import numpy as np
import pytest

from caveat import CorruptFile
from caveat.report import read


def test_reads_every_run_with_map_first(classification):
    runs = read(classification)
    assert [run.label for run in runs] == ["MAP", "Deep ensemble", "SWAG"]
    assert runs[1].fields == {"training": {"epochs": 60}}
    assert runs[0].class_names == ("cat", "dog", "owl", "fox")
    assert runs[0].clean.name == "clean"
    assert [scored.severity for scored in runs[0].shifts["rotated"]] == [15.0, 30.0, 60.0]
    assert [scored.name for scored in runs[0].ood] == ["photographs"]
    assert runs[0].clean.predictions["probs"].shape == (120, 4)


def test_data_without_a_clean_family_starts_at_the_first_test_set(binary, change_metrics):
    change_metrics(binary / "laplace", lambda content: content["data"][0].update(family="holdout"))
    run = read(binary)[0]
    assert run.clean.name == "clean"
    assert run.shifts == {}


def test_independent_labels_are_rows_of_no_and_yes(binary, change_metrics):
    change_metrics(binary / "laplace", lambda content: content.update(class_names=["beach", "city", "forest"]))
    assert read(binary)[0].clean.predictions["probs"].shape == (60, 2)


def test_samples_are_not_loaded(binary):
    path = binary / "laplace" / "predictions" / "clean.npz"
    np.savez(path, **np.load(path), samples=np.zeros((3, 60, 2)))
    assert "samples" not in read(binary)[0].clean.predictions


def test_no_folder(tmp_path):
    with pytest.raises(FileNotFoundError, match="is not a folder"):
        read(tmp_path / "nothing")


def test_no_runs(tmp_path):
    with pytest.raises(FileNotFoundError, match="run `caveat evaluate` first"):
        read(tmp_path)


def test_a_run_in_place_of_a_results_folder(classification):
    with pytest.raises(FileNotFoundError, match="give its parent"):
        read(classification / "map")


def test_truncated_metrics(classification):
    path = classification / "map" / "metrics.json"
    path.write_text(path.read_text()[:500])
    with pytest.raises(ValueError, match=r"map.metrics.json is not a whole file .*; evaluate this run again"):
        read(classification)


def test_an_edited_number_is_refused_with_the_name_of_the_file(classification):
    path = classification / "map" / "metrics.json"
    text = path.read_text()
    accuracy = json.loads(text)["data"][0]["metrics"]["accuracy"]["mean"]
    assert f'"mean": {accuracy!r}' in text
    path.write_text(text.replace(f'"mean": {accuracy!r}', '"mean": 0.999'))
    with pytest.raises(CorruptFile, match=r"map.metrics.json was changed after it was written: .*; evaluate this run"):
        read(classification)
    content = json.loads(text)
    del content["checksum"]
    path.write_text(json.dumps(content))
    with pytest.raises(CorruptFile, match=r"map.metrics.json is not a whole file"):
        read(classification)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.update(format=9), "has format version 9, this library reads versions 1 to 2"),
        (lambda c: c.pop("label"), "lacks 'label'"),
        (lambda c: c.update(kind="ranking"), "kind is 'ranking'"),
        (lambda c: c.update(data=[]), "lists no data sets"),
        (lambda c: c.update(data=3), "wrong type"),
        (lambda c: c["data"][0].update(role="train"), "has role 'train'"),
        (lambda c: c["data"][0].update(file="../../secret.npz"), "outside the run's folder"),
        (lambda c: c["data"][1].update(name="clean"), "names a data set twice"),
        (lambda c: c["data"][0].update(rows=99), "evaluate both on the same data"),
        (lambda c: c.update(label="MAP"), "both labelled 'MAP'"),
        (lambda c: c.update(class_names=["a", "b", "c", "d"]), "one folder holds one task"),
        (lambda c: c.update(kind="regression", class_names=[]), "one folder holds one task"),
    ],
)
def test_metrics_that_do_not_fit(classification, change_metrics, change, message):
    change_metrics(classification / "swag", change)
    with pytest.raises(ValueError, match=message):
        read(classification)


def test_missing_predictions(classification):
    (classification / "swag" / "predictions" / "clean.npz").unlink()
    with pytest.raises(FileNotFoundError, match="is missing although"):
        read(classification)[2].clean.predictions  # noqa: B018


def test_truncated_predictions(classification):
    path = classification / "swag" / "predictions" / "clean.npz"
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"swag.predictions.clean\.npz is cut or damaged .*; evaluate this run again"):
        read(classification)[2].clean.predictions  # noqa: B018


def test_pickled_predictions_are_not_opened(classification):
    path = classification / "swag" / "predictions" / "clean.npz"
    arrays = dict(np.load(path))
    np.savez(path, **{**arrays, "extra": np.array([{}] * 120, dtype=object)})
    with pytest.raises(ValueError, match="cut or damaged"):
        read(classification)[2].clean.predictions  # noqa: B018


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"log_prob": None}, "holds no array log_prob"),
        ({"entropy": np.zeros(7)}, r"entropy has shape \(7,\), metrics.json says 120 rows"),
        ({"probs": np.zeros((120, 3))}, "names 4 classes"),
        ({"thumbnails": np.zeros((8, 8, 8))}, "thumbnails must be uint8"),
        ({"thumbnail_rows": np.arange(3)}, "thumbnails must be uint8"),
        ({"thumbnail_rows": np.arange(8) + 115}, "point outside the 120 rows"),
    ],
)
def test_predictions_that_do_not_fit(classification, change, message):
    path = classification / "swag" / "predictions" / "clean.npz"
    arrays = {**np.load(path), **change}
    np.savez(path, **{key: value for key, value in arrays.items() if value is not None})
    with pytest.raises(ValueError, match=message):
        read(classification)[2].clean.predictions  # noqa: B018


def test_metrics_may_be_null(classification, change_metrics):
    change_metrics(classification / "swag", lambda c: c["data"][0]["metrics"]["nll"].update(mean=None, stderr=None))
    assert read(classification)[2].clean.metrics["nll"].mean is None
