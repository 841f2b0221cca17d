import gzip
import hashlib
import http.server
import io
import struct
import tarfile
import threading

import numpy as np
import pytest
import torch

from caveat.data import download, load
from caveat.data.download import RETRIES, SOURCES, PublicFiles, fetch
from caveat.data.uci import DATA, GAPS, KEYS, TABLES, remote_files


class Server(http.server.ThreadingHTTPServer):
    """Serves `files` (path -> content) and counts the requests; an integer content is an error status."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.files, self.requested = {}, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}/"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requested.append(self.path[1:])
        content = self.server.files.get(self.path[1:], 404)
        if isinstance(content, int):
            self.send_error(content)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr("pooch.core.time.sleep", lambda seconds: None)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def md5(content):
    return f"md5:{hashlib.md5(content).hexdigest()}"


def everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def small_mnist():
    def idx(array):
        return gzip.compress(
            bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()
        )

    images = np.random.default_rng(0).integers(0, 256, (10, 28, 28), dtype=np.uint8)
    labels = np.arange(10, dtype=np.uint8)
    return dict(zip(SOURCES["mnist"].checksums, (idx(images), idx(labels), idx(images), idx(labels)), strict=True))


def test_a_downloaded_set_can_be_loaded(server, tmp_path, monkeypatch):
    server.files = small_mnist()
    checksums = {file: md5(content) for file, content in server.files.items()}
    monkeypatch.setitem(SOURCES, "mnist", PublicFiles(server.url, checksums, folder="mnist"))
    assert download("mnist", tmp_path) == tmp_path
    assert load("mnist", tmp_path).train.tensors[1].tolist() == list(range(10))
    assert sorted(server.requested) == sorted(checksums)
    download("mnist", tmp_path)  # all there: nothing is asked for again
    assert len(server.requested) == 4


def test_a_damaged_file_is_fetched_again(server, tmp_path):
    server.files = {"values": b"right"}
    (tmp_path / "values").write_bytes(b"wrong")
    fetch(server.url, {"values": md5(b"right")}, tmp_path)
    assert (tmp_path / "values").read_bytes() == b"right"


def test_a_wrong_checksum_leaves_nothing_behind(server, tmp_path):
    server.files = small_mnist()  # not the real files
    first = next(iter(SOURCES["mnist"].checksums))
    with pytest.raises(ValueError, match=rf"{server.url}{first} does not have the published checksum md5:f68b3c2d"):
        download("mnist", tmp_path, base_url=server.url.rstrip("/"))
    assert everything_in(tmp_path) == []
    assert server.requested == [first] * (RETRIES + 1)


def test_a_server_error_is_tried_again_then_named(server, tmp_path):
    server.files = {"cifar-10-binary.tar.gz": 503}
    with pytest.raises(
        OSError, match=rf"cifar-10-binary.tar.gz could not be downloaded in {RETRIES + 1} attempts.*503"
    ):
        download("cifar10", tmp_path / "new", base_url=server.url)
    assert len(server.requested) == RETRIES + 1
    assert everything_in(tmp_path) == []


def test_a_server_that_recovers_is_enough(server, tmp_path, monkeypatch):
    server.files = {"values": 500}

    def recover(seconds):
        server.files["values"] = b"right"

    monkeypatch.setattr("pooch.core.time.sleep", recover)
    fetch(server.url, {"values": md5(b"right")}, tmp_path)
    assert (tmp_path / "values").read_bytes() == b"right"


def test_archives_are_unpacked_and_dropped(server, tmp_path, monkeypatch):
    record = np.zeros((4, 3073), dtype=np.uint8)
    record[:, 0] = [1, 2, 3, 4]
    record[:2, 1:] = 255
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for member in (*SOURCES["cifar10"].members, "../outside.txt"):
            info = tarfile.TarInfo(member)
            info.size = record.nbytes
            tar.addfile(info, io.BytesIO(record.tobytes()))
    server.files = {"cifar-10-binary.tar.gz": buffer.getvalue()}
    checksums = {"cifar-10-binary.tar.gz": md5(buffer.getvalue())}
    monkeypatch.setitem(SOURCES, "cifar10", PublicFiles(server.url, checksums, members=SOURCES["cifar10"].members))
    download("cifar10", tmp_path / "data")
    assert everything_in(tmp_path) == sorted(
        ["data", "data/cifar-10-batches-bin", *(f"data/{member}" for member in SOURCES["cifar10"].members)]
    )
    assert load("cifar10", tmp_path / "data").test.tensors[1].tolist() == [1, 2, 3, 4]
    download("cifar10", tmp_path / "data")
    assert len(server.requested) == 1


def uci_files(arrays, table):
    """The text files of one table, its target put between the features."""
    x, y, _, gaps = (arrays[key] for key in KEYS)
    columns = np.insert(x, 1, y, axis=1)
    features = [0, *range(2, x.shape[1] + 1)]
    base = f"{DATA}/{TABLES[table].folder}/data"
    files = {
        f"{base}/data.txt": "\n".join(" ".join(repr(float(value)) for value in row) for row in columns),
        f"{base}/index_features.txt": "\n".join(f"{column:.1f}" for column in features),
        f"{base}/index_target.txt": "1",
    }
    for gap, mask in enumerate(gaps):
        files[f"{GAPS}/{table}/data/index_test_{gap}.txt"] = "\n".join(map(str, np.flatnonzero(mask)[::-1]))
    return {path: text.encode() for path, text in files.items()}


def test_uci_tables_are_built_from_their_text_files(server, tmp_path, need):
    folder = need("uci_regression.npz")
    with np.load(folder / "uci_regression.npz") as npz:
        arrays = {key: npz[f"yacht_{key}"] for key in KEYS}
    server.files = uci_files(arrays, "yacht")
    download("uci/yacht", tmp_path, base_url=server.url)
    assert everything_in(tmp_path) == ["uci_yacht.npz"]
    for choice in ({"split": 19}, {"split": 5, "gap": True}):
        fetched, given = (load("uci/yacht", place, **choice) for place in (tmp_path, folder))
        for ours, theirs in zip(
            fetched.train.tensors + fetched.test.tensors, given.train.tensors + given.test.tensors, strict=True
        ):
            assert torch.equal(ours, theirs)


def test_uci_tables_that_are_not_the_published_ones_are_refused(server, tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.normal(size=(30, 6)),
        "y": rng.normal(size=30),
        "test": None,
        "gap_test": np.eye(6, 30, dtype=bool),
    }
    server.files = uci_files(arrays, "yacht")
    assert set(server.files) == set(remote_files("yacht"))
    with pytest.raises(ValueError, match="the files fetched for uci/yacht are not the published ones"):
        download("uci/yacht", tmp_path, base_url=server.url)
    assert everything_in(tmp_path) == []


def test_downloads_go_to_the_first_folder(server, tmp_path, monkeypatch):
    server.files = {"values": b"right"}
    monkeypatch.setitem(SOURCES, "mnist", PublicFiles(server.url, {"values": md5(b"right")}, folder="mnist"))
    cache = download("mnist")
    assert cache.name == "caveat"
    assert (cache / "mnist" / "values").exists()
    monkeypatch.setenv("CAVEAT_DATA", str(tmp_path / "environment"))
    assert download("mnist") == tmp_path / "environment"
    assert download("mnist", tmp_path / "given") == tmp_path / "given"


@pytest.mark.parametrize("name", ["digits", "uci/bostn", "toy_regression"])
def test_only_public_sets_can_be_downloaded(name, tmp_path):
    with pytest.raises(ValueError, match=f"'{name}' cannot be downloaded; these can: mnist, .*uci/yacht"):
        download(name, tmp_path)


def test_loading_never_downloads(server, tmp_path, monkeypatch):
    monkeypatch.setitem(SOURCES, "mnist", PublicFiles(server.url, dict(SOURCES["mnist"].checksums), folder="mnist"))
    with pytest.raises(FileNotFoundError):
        load("mnist", tmp_path)
    assert server.requested == []
