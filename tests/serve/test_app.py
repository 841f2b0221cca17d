"""The service over real HTTP: what it answers, what it refuses, and many clients at once."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from typing import Any

import pytest
import torch
from torch import nn

import caveat

pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")

from caveat.serve import Service, app_of  # noqa: E402 - after what it needs is known to be there

X = torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def fitted(likelihood: Any, y: torch.Tensor, outputs: int) -> caveat.Posterior:
    torch.manual_seed(0)
    task = caveat.Task(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, outputs)), (X, y), likelihood)
    method = caveat.DeepEnsemble(members=2, training=caveat.Training(epochs=2))
    return caveat.fit(task, method, progress=False)


@pytest.fixture(scope="module")
def posterior() -> caveat.Posterior:
    return fitted(caveat.Categorical(), torch.arange(40) % 3, 3)


def running(app: Any) -> Iterator[int]:
    """A server in a thread; gives its port."""
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error"))
    thread = threading.Thread(target=server.run)
    thread.start()
    while not server.started:
        assert thread.is_alive()
        time.sleep(0.01)
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join()


@pytest.fixture(scope="module")
def port(posterior: caveat.Posterior) -> Iterator[int]:
    service = Service.of(posterior, class_names=("ant", "bee", "<b>cat"), most_rows=8)
    yield from running(app_of(service, most_bytes=4000))


def ask(port: int, path: str, content: Any = None, connection: HTTPConnection | None = None) -> tuple[int, Any]:
    client = connection or HTTPConnection("127.0.0.1", port, timeout=30)
    body = content if isinstance(content, bytes | None) else json.dumps(content)
    client.request("GET" if body is None else "POST", path, body)
    reply = client.getresponse()
    text = reply.read()
    if connection is None:
        client.close()
    return reply.status, json.loads(text) if reply.headers["content-type"] == "application/json" else text.decode()


def test_it_answers_what_predict_says(posterior: caveat.Posterior, port: int) -> None:
    status, content = ask(port, "/predict", {"inputs": X[:5].tolist()})
    prediction: Any = posterior.predict(X[:5])
    assert status == 200
    assert torch.allclose(torch.tensor([row["probs"] for row in content["rows"]]), prediction.probs, atol=1e-6)
    for part in ("entropy", "aleatoric", "epistemic"):
        assert torch.allclose(
            torch.tensor([row[part] for row in content["rows"]]), getattr(prediction, part), atol=1e-6
        )
    names = ("ant", "bee", "<b>cat")
    assert [row["class"] for row in content["rows"]] == [names[label] for label in prediction.label.tolist()]


def test_numbers_come_with_their_interval() -> None:
    posterior = fitted(caveat.Gaussian(standardise=True), 20 + X[:, :1], 1)
    for port in running(app_of(Service.of(posterior, prepare=lambda numbers: torch.as_tensor(numbers) / 2))):
        status, content = ask(port, "/predict", {"inputs": (2 * X[:2]).tolist()})
        prediction: Any = posterior.predict(X[:2])
        assert status == 200
        lower, upper = prediction.interval(0.9)
        for name, value in (("mean", prediction.mean), ("lower_90", lower), ("upper_90", upper)):
            assert torch.allclose(torch.tensor([row[name] for row in content["rows"]]), value, atol=1e-4)


REFUSED: dict[str, tuple[Any, int, str]] = {
    "no json": (b"{", 422, "the body is not json"),
    "deep": (b"[" * 3000, 422, "the body is not json"),
    "another key": ({"rows": []}, 422, 'the one key "inputs"'),
    "text": ({"inputs": [["a", "b", "c", "d"]]}, 422, "not numbers"),
    "numbers as text": ({"inputs": [["1", "2", "3", "4"]]}, 422, "not numbers"),
    "a number as text": ({"inputs": [[1, 2, 3, "4"]]}, 422, "not numbers"),
    "yes and no": ({"inputs": [[True, False, True, True]]}, 422, "not numbers"),
    "nothing": ({"inputs": [[1, 2, 3, None]]}, 422, "row 0 holds NaN"),
    "bytes that are no text": (b'{"inputs": "\xff"}', 422, "the body is not json"),
    "a whole number of 400 digits": (b'{"inputs": [[1, 2, 3, 1' + b"0" * 400 + b"]]}", 422, "not numbers"),
    "ragged": ({"inputs": [[1, 2, 3, 4], [1]]}, 422, "not numbers in rows of one length"),
    "a row alone": ({"inputs": [1, 2, 3, 4]}, 422, r"the shape [4]: a list of rows, each of shape [4]"),
    "width": ({"inputs": [[1, 2, 3]]}, 422, "the shape [1, 3]"),
    "none": ({"inputs": []}, 422, "0 rows were sent, from 1 to 8"),
    "too many": ({"inputs": [[0, 0, 0, 0]] * 9}, 422, "9 rows were sent, from 1 to 8"),
    "nan": (b'{"inputs": [[1, 2, 3, NaN]]}', 422, "row 0 holds NaN or infinity"),
    "overflow": ({"inputs": [[1e300, 0, 0, 0]]}, 422, "too large for float32"),
    "bytes": ({"inputs": [[0.123456789012] * 4] * 100}, 413, "more than 4,000 bytes"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_it_cannot_take_is_refused_with_a_reason(port: int, name: str) -> None:
    content, status, reason = REFUSED[name]
    given, answer = ask(port, "/predict", content)
    assert given == status
    assert reason in answer["error"]
    assert ask(port, "/health")[1]["status"] == "ok"


def test_a_body_whose_length_is_not_said_is_cut_off(port: int) -> None:
    client = HTTPConnection("127.0.0.1", port, timeout=30)
    client.request("POST", "/predict", iter([b" " * 1000] * 10), {"Transfer-Encoding": "chunked"}, encode_chunked=True)
    assert client.getresponse().status == 413
    client.close()


def test_a_client_that_leaves_is_no_fault(port: int, caplog: pytest.LogCaptureFixture) -> None:
    body = json.dumps({"inputs": X[:1].tolist()}).encode()
    for sent in (body[:10], body):
        with socket.create_connection(("127.0.0.1", port)) as client:
            client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body) + sent)
    assert ask(port, "/predict", {"inputs": X[:1].tolist()})[0] == 200
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


def test_a_body_that_does_not_come_is_not_waited_for(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("caveat.serve.app.BODY_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        client.settimeout(30)
        assert client.recv(12) == b"HTTP/1.1 408"


def test_outputs_that_are_not_finite_are_refused() -> None:
    linear = nn.Linear(4, 1)
    nn.init.constant_(linear.weight, 1e4)
    task = caveat.Task(linear, (X, X[:, :1]), caveat.Gaussian())
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)
    for port in running(app_of(Service.of(posterior))):
        status, answer = ask(port, "/predict", {"inputs": [[3e38] * 4]})
        assert (status, "not finite" in answer["error"]) == (422, True)


def test_tokens_are_whole_numbers_that_the_network_knows() -> None:
    class Tokens(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.out = nn.Embedding(7, 8), nn.Linear(8, 3)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return self.out(self.embedding(tokens).mean(1))

    tokens = torch.randint(7, (40, 5), generator=torch.Generator().manual_seed(0))
    task = caveat.Task(Tokens(), (tokens, torch.arange(40) % 3), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False)
    for port in running(app_of(Service.of(posterior))):
        assert ask(port, "/predict", {"inputs": tokens[:2].tolist()})[0] == 200
        for row, reason in (([1, 2, 3, 4, 0.5], "whole numbers that int64 holds"), ([1e30] * 5, "whole numbers")):
            status, answer = ask(port, "/predict", {"inputs": [row]})
            assert (status, reason in answer["error"]) == (422, True)
        assert ask(port, "/predict", {"inputs": [[1, 2, 3, 4, 7]]})[0] == 422
        assert ask(port, "/predict", {"inputs": tokens[:2].tolist()})[0] == 200


def test_card_and_page_hold_nothing_of_the_data(port: int) -> None:
    status, card = ask(port, "/card")
    assert status == 200
    assert card["method"].startswith("DeepEnsemble")
    assert (card["input_shape"], card["weights"]) == ([4], 67)
    assert card["example"] not in [[round(v, 3) for v in row] for row in X.tolist()]
    status, page = ask(port, "/")
    assert status == 200
    assert "Try one input" in page
    assert "innerHTML" not in page  # names of classes are text
    assert ask(port, "/docs")[0] == 404


def test_eight_clients_at_once(posterior: caveat.Posterior, port: int) -> None:
    before = ask(port, "/health")[1]
    expected: Any = posterior.predict(X).probs

    def client(number: int) -> bool:
        connection = HTTPConnection("127.0.0.1", port, timeout=30)
        right = True
        for row in range(number, 40, 8):
            status, content = ask(port, "/predict", {"inputs": X[row : row + 1].tolist()}, connection)
            right &= status == 200
            right &= torch.allclose(torch.tensor(content["rows"][0]["probs"]), expected[row], atol=1e-5)
        connection.close()
        return bool(right)

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(client, range(8)))
    after = ask(port, "/health")[1]
    assert after["requests"] - before["requests"] == 40
    assert after["batches"] - before["batches"] <= 40
