"""Published predictions: rows found in any order, checked, refused where they cannot be about the data, fetched."""

import http.server
import json
import threading
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import caveat
from caveat import data
from caveat.cli import main
from caveat.data.dataset import unprepare
from caveat.references import find_references, import_reference, load_reference, published
from caveat.references.published import Origin, Published, fetch_reference
from caveat.references.row_order import match_inputs, stretch_of_labels

RNG = np.random.default_rng(0)
ORDER = RNG.permutation(50)


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A data set of small colour images in three classes, and an empty place for references."""
    x = RNG.integers(0, 256, (110, 3, 6, 6), dtype=np.uint8)
    y = np.arange(110) % 3
    np.savez(tmp_path / "images.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    monkeypatch.setenv("CAVEAT_REFERENCES", str(tmp_path / "references"))
    return str(tmp_path / "images.npz")


def probabilities(name: str) -> np.ndarray:
    """Mostly right probabilities for the test rows, in the data set's order."""
    y = data.load(name).test.tensors[1].numpy()
    logits = RNG.normal(size=(len(y), 3)) + 3 * np.eye(3)[y]
    return np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)


def raw_inputs(name: str) -> np.ndarray:
    loaded = data.load(name)
    return unprepare(loaded.test.tensors[0], loaded.preprocessing)


@pytest.mark.parametrize("form", ["bytes", "flat, channels last, scaled by channel", "channels last"])
def test_rows_are_found_by_their_inputs_whatever_their_order(images: str, tmp_path: Path, form: str) -> None:
    probs, x = probabilities(images), raw_inputs(images)[ORDER]
    if "last" in form:
        x = x.transpose(0, 2, 3, 1)
    if "flat" in form:
        x = ((x / 255 - [0.4, 0.5, 0.6]) / [0.2, 0.3, 0.1]).reshape(len(x), -1).astype(np.float32)
        np.savetxt(tmp_path / "x.csv", x)
    else:
        np.save(tmp_path / "x.npy", x)
    np.savetxt(tmp_path / "probs.csv", probs[ORDER], delimiter=",")
    inputs = tmp_path / ("x.csv" if "flat" in form else "x.npy")
    import_reference(tmp_path / "probs.csv", Origin(images), name="them", inputs=inputs)
    reference = load_reference("them")
    torch.testing.assert_close(reference.parts["clean"]["probs"][0], torch.from_numpy(probs).float())
    assert find_references()["them"] == tmp_path / "references" / "them"


def test_fidelity_with_published_predictions_is_that_with_their_numbers(images: str, tmp_path: Path) -> None:
    probs = np.stack([probabilities(images) for _ in range(2)])
    np.savez(tmp_path / "two.npz", probs=probs)
    import_reference(tmp_path / "two.npz", Origin(images, "mlp", prior_precision=7.0))
    reference = load_reference("two")
    assert reference.chains == 2
    assert "published predictions for 50 rows" in reference.summary()
    loaded = data.load(images)
    x, y = loaded.train.tensors
    task = caveat.Task(caveat.models.for_data("mlp", x.shape[1:], 3), (x, y), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=2)), progress=False)
    found = caveat.fidelity(posterior, reference, loaded.test)
    ours = posterior.predict(loaded.test.tensors[0]).probs.double()
    mixture = torch.from_numpy(probs.mean(0))
    variation = (ours - mixture).abs().sum(-1).mean() / 2
    assert found["total_variation"].mean == pytest.approx(float(variation), abs=1e-6)
    between = np.abs(probs[0] - probs[1]).sum(-1).mean() / 2
    assert found.floor["total_variation"].mean == pytest.approx(between, abs=1e-6)
    assert any("precision=7.0" in note for note in found.notes)
    unknown = caveat.load_reference(import_reference(tmp_path / "two.npz", Origin(images), name="unknown"))
    assert caveat.fidelity(posterior, unknown, loaded.test).notes == ()


def test_labels_tell_which_rows_predictions_are_about(images: str, tmp_path: Path) -> None:
    y = torch.tensor([0, 1, 1, 2, 0, 2, 1])
    assert stretch_of_labels(y, y[2:5]) == 2
    assert stretch_of_labels(y, y[:1]) is None, "there are two"
    assert stretch_of_labels(y, torch.tensor([2, 2])) is None
    assert stretch_of_labels(y[:1], y) is None
    probs = probabilities(images)
    np.save(tmp_path / "first.npy", probs[:20])
    with pytest.raises(ValueError, match="nothing says which these are"):
        import_reference(tmp_path / "first.npy", Origin(images))
    import_reference(tmp_path / "first.npy", Origin(images), first=0)
    test = data.load(images).test.tensors[0]
    torch.testing.assert_close(
        load_reference("first").parts["clean"]["inputs"].float(), test[:20], atol=2e-3, rtol=2e-3
    )
    np.save(tmp_path / "middle.npy", probs[11:31])
    np.save(tmp_path / "y.npy", data.load(images).test.tensors[1].numpy()[11:31])
    import_reference(tmp_path / "middle.npy", Origin(images), first=11, labels=tmp_path / "y.npy")
    torch.testing.assert_close(
        load_reference("middle").parts["clean"]["inputs"].float(), test[11:31], atol=2e-3, rtol=2e-3
    )
    for wrong, reason in ((31, "nothing says which"), (-1, "first=-1"), (10, "labels differ")):
        with pytest.raises(ValueError, match=reason):
            import_reference(
                tmp_path / "middle.npy", Origin(images), name="wrong", first=wrong, labels=tmp_path / "y.npy"
            )


def test_predictions_of_other_rows_are_refused(images: str, tmp_path: Path) -> None:
    probs, y = probabilities(images), data.load(images).test.tensors[1].numpy()
    np.save(tmp_path / "shuffled.npy", probs[ORDER])
    np.save(tmp_path / "labels.npy", y[ORDER])
    np.save(tmp_path / "others.npy", RNG.integers(0, 256, (50, 3, 6, 6)))
    np.save(tmp_path / "wide.npy", RNG.random((50, 4)))
    at = partial(import_reference, tmp_path / "shuffled.npy", Origin(images))
    with pytest.raises(ValueError, match="a guess for"):
        at()
    with pytest.raises(ValueError, match="labels differ from"):
        at(labels=tmp_path / "labels.npy")
    with pytest.raises(ValueError, match=r"0 of 50 rows of .* were found"):
        at(inputs=tmp_path / "others.npy")
    with pytest.raises(ValueError, match="give as many numbers a row"):
        at(inputs=tmp_path / "wide.npy")
    assert not (tmp_path / "references").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (np.full((50, 3), 0.4), "a row's sum is 0.2 away from 1"),
        (np.array([[1.5, -0.5, 0.0]] * 50), "no probabilities"),
        (np.full((50, 4), 0.25), r"for 3 classes it is to be \[rows, 3\]"),
        (np.full((50, 3), "a"), "not numbers"),
        (np.full((50, 3), np.nan), "negative, NaN or infinite"),
    ],
)
def test_what_are_no_probabilities_is_refused(images: str, tmp_path: Path, content: np.ndarray, message: str) -> None:
    np.save(tmp_path / "bad.npy", content)
    with pytest.raises(ValueError, match=message):
        import_reference(tmp_path / "bad.npy", Origin(images))


@pytest.mark.parametrize("columns", [[0, 2, 1], [2, 1, 0]])
def test_classes_in_another_order_are_refused(images: str, tmp_path: Path, columns: list[int]) -> None:
    """With two columns exchanged most rows are right, but for those classes."""
    np.save(tmp_path / "probs.npy", probabilities(images)[:, columns])
    with pytest.raises(ValueError, match=r"columns are in another order than the classes: with '.' and '.' exchanged"):
        import_reference(tmp_path / "probs.npy", Origin(images))


def test_an_empty_table_is_refused(images: str, tmp_path: Path) -> None:
    (tmp_path / "empty.csv").touch()
    with pytest.raises(ValueError, match=r"empty.csv cannot be read as numbers \(its first line is empty\)"):
        import_reference(tmp_path / "empty.csv", Origin(images))


def test_nothing_is_unpickled(images: str, tmp_path: Path) -> None:
    np.save(tmp_path / "bad.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read as numbers"):
        import_reference(tmp_path / "bad.npy", Origin(images))


def test_copies_of_a_row_are_all_found_and_rows_that_are_missing_are_not() -> None:
    x = torch.rand(6, 2, 3, 3, generator=torch.Generator().manual_seed(0))
    x[3] = x[1]
    places = match_inputs(x, x.numpy()[[5, 1, 0]])
    assert places.tolist() == [2, 1, -1, 1, -1, 0]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[str]:
    """A web server of a folder, on this machine."""
    folder = tmp_path / "web"
    folder.mkdir()

    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder))) as web:
        thread = threading.Thread(target=web.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{web.server_port}/"
        web.shutdown()
        thread.join()


def test_a_known_reference_is_fetched_checked_and_kept(
    images: str, tmp_path: Path, server: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    probs, x = probabilities(images), raw_inputs(images)
    y = data.load(images).test.tensors[1].numpy()
    np.savetxt(tmp_path / "web" / "probs.csv", probs[ORDER], delimiter=",")
    np.savetxt(tmp_path / "web" / "x.csv", x[ORDER].reshape(50, -1))
    right = {"accuracy": round(float((probs.argmax(1) == y).mean()), 3)}
    known = Published(Origin(images), server, "probs.csv", inputs="x.csv", scores=right)
    monkeypatch.setitem(published.PUBLISHED, "theirs", known)
    with pytest.raises(FileNotFoundError, match="caveat reference fetch theirs"):
        load_reference("theirs")
    assert main(["reference", "fetch", "theirs", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["facts"]["scores"]["accuracy"]["mean"] == pytest.approx(right["accuracy"], abs=6e-4)
    torch.testing.assert_close(load_reference("theirs").parts["clean"]["probs"][0], torch.from_numpy(probs).float())
    assert main(["reference", "list"]) == 0
    assert "theirs" in capsys.readouterr().out

    wrong = Published(Origin(images), server, "probs.csv", inputs="x.csv", scores={"accuracy": 0.1})
    monkeypatch.setitem(published.PUBLISHED, "other", wrong)
    with pytest.raises(ValueError, match=r"where 0\.1 is known"):
        fetch_reference("other")
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)  # between attempts
    digest = Published(Origin(images), server, "probs.csv", checksums={"probs.csv": "md5:" + "0" * 32})
    monkeypatch.setitem(published.PUBLISHED, "digest", digest)
    with pytest.raises(ValueError, match="does not have the published checksum"):
        fetch_reference("digest")
    assert find_references()["other"] is None
    assert find_references()["digest"] is None


def test_the_command_line_imports(images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savetxt(tmp_path / "p.csv", probabilities(images), delimiter=",")
    arguments = ["reference", "import", str(tmp_path / "p.csv"), "--data", images, "--name", "mine", "--draws", "9"]
    assert main(arguments) == 0
    assert "mine: published predictions for 50 rows, accuracy" in capsys.readouterr().out
    assert load_reference("mine").draws == 9
    assert main(arguments) == 1, "nothing is overwritten"
