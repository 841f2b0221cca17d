"""Requests to `caveat serve` from many clients at once: errors, throughput and how long an answer takes.

    python benchmarks/service.py posteriors/digits --requests 1000 --clients 8

The server is a process of its own, started as people start it; each client keeps its connection and sends one row after
the other. The posterior is a folder that `caveat fit` wrote.
"""

import argparse
import csv
import json
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPConnection
from pathlib import Path
from statistics import quantiles


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def wait_until_it_answers(server: subprocess.Popen[bytes], port: int) -> None:
    for _ in range(600):
        if server.poll() is not None:
            raise RuntimeError("the server has ended")
        try:
            ask(HTTPConnection("127.0.0.1", port, timeout=5), "GET", "/health")
        except OSError:
            time.sleep(0.1)
        else:
            return
    raise RuntimeError("the server does not answer")


def ask(client: HTTPConnection, verb: str, path: str, body: str | None = None) -> dict:
    client.request(verb, path, body)
    reply = client.getresponse()
    content: dict = json.loads(reply.read())
    if reply.status != 200:
        raise RuntimeError(f"{reply.status}: {content}")
    return content


def one_client(port: int, body: str, count: int) -> list[float]:
    """Seconds of each request."""
    client, seconds = HTTPConnection("127.0.0.1", port, timeout=60), []
    for _ in range(count):
        began = time.perf_counter()
        rows = ask(client, "POST", "/predict", body)["rows"]
        assert len(rows) == 1
        seconds.append(time.perf_counter() - began)
    client.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("posterior")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--out", type=Path, help="a csv file, to which a line is added")
    options = parser.parse_args()
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, "-m", "caveat.cli", "serve", "--posterior", options.posterior, "--port", str(port)]
    )
    try:
        wait_until_it_answers(server, port)
        card = ask(HTTPConnection("127.0.0.1", port, timeout=60), "GET", "/card")
        body = json.dumps({"inputs": [card["example"]]})
        alone = one_client(port, body, 50)
        shares = [len(range(k, options.requests, options.clients)) for k in range(options.clients)]
        began = time.perf_counter()
        with ThreadPoolExecutor(options.clients) as pool:
            seconds = [s for part in pool.map(lambda n: one_client(port, body, n), shares) for s in part]
        whole = time.perf_counter() - began
        health = ask(HTTPConnection("127.0.0.1", port, timeout=60), "GET", "/health")
    finally:
        server.terminate()
        server.wait()
    p50, p99 = (1e3 * quantiles(seconds, n=100)[k] for k in (49, 98))
    rows_a_pass = (health["requests"] - 50) / (health["batches"] - 50)
    line = {
        "method": card["method"].partition("(")[0],
        "draws": card["draws"],
        "requests": len(seconds),
        "clients": options.clients,
        "alone_p50_ms": f"{1e3 * sorted(alone)[25]:.1f}",
        "requests_a_second": f"{len(seconds) / whole:.0f}",
        "p50_ms": f"{p50:.1f}",
        "p99_ms": f"{p99:.1f}",
        "rows_a_pass": f"{rows_a_pass:.1f}",
        "errors": 0,  # one would have raised
    }
    print(", ".join(f"{key} {value}" for key, value in line.items()))
    if options.out is not None:
        new = not options.out.exists()
        with options.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, line, lineterminator="\n")
            if new:
                writer.writeheader()
            writer.writerow(line)


if __name__ == "__main__":
    main()
