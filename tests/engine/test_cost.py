"""Memory is measured in bytes and asked for before the work starts."""

import gc
import mmap
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from caveat.engine import cost
from caveat.engine.cost import (
    FlopCounter,
    forward_flops,
    free_bytes,
    peak_bytes,
    refuse_if_too_large,
    reset_peak,
    words,
)
from caveat.likelihoods import Categorical
from caveat.network import Network

CPU = torch.device("cpu")


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux starts a peak anew")
def test_peak_follows_an_allocation_and_can_start_anew() -> None:
    gc.collect()  # what other tests left would go in between
    reset_peak(CPU)
    before = peak_bytes(CPU)
    block = mmap.mmap(-1, 48 * 2**20)  # new pages; torch may be given memory that another test has let go
    for page in range(0, len(block), mmap.PAGESIZE):
        block[page] = 1
    during = peak_bytes(CPU)
    assert during - before > 40 * 2**20
    block.close()
    assert peak_bytes(CPU) == pytest.approx(during, abs=4 * 2**20)  # the system counts in steps
    reset_peak(CPU)
    assert peak_bytes(CPU) < during - 40 * 2**20


def test_systems_without_proc_are_measured_otherwise(monkeypatch) -> None:
    monkeypatch.setattr(cost, "_kilobytes", lambda file, key: None)
    assert free_bytes(CPU) is None
    refuse_if_too_large("anything", 10**18, CPU, "no advice")
    if sys.platform != "win32":
        assert peak_bytes(CPU) > 10 * 2**20


def test_values_of_proc_are_kilobytes(tmp_path: Path) -> None:
    file = tmp_path / "meminfo"
    file.write_text("MemTotal:       100 kB\nMemAvailable:    42 kB\nMemAvailableX:    1 kB\n\n")
    assert cost._kilobytes(str(file), "MemAvailable:") == 42 * 1024
    assert cost._kilobytes(str(file), "VmHWM:") is None
    assert cost._kilobytes(str(tmp_path / "none"), "VmHWM:") is None


def test_too_much_is_refused_with_both_numbers(monkeypatch) -> None:
    monkeypatch.setattr(cost, "free_bytes", lambda device: 4_000_000_000)
    refuse_if_too_large("42,000 weights", 4_000_000_000, CPU, "try fewer")
    with pytest.raises(MemoryError, match=r"42,000 weights needs 7\.1 GB, 4\.0 GB are free on cpu: try fewer"):
        refuse_if_too_large("42,000 weights", 7_100_000_000, CPU, "try fewer")


@pytest.mark.parametrize(
    ("count", "said"),
    [
        (0, "0 bytes"),
        (999, "999 bytes"),
        (1000, "1.0 kB"),
        (1549, "1.5 kB"),
        (999_949, "999.9 kB"),
        (999_950, "1.0 MB"),
        (10**6, "1.0 MB"),
        (7_100_000_000, "7.1 GB"),
        (2_500 * 10**9, "2.5 TB"),
        (12_345 * 10**12, "12345.0 TB"),
    ],
)
def test_words(count: int, said: str) -> None:
    assert words(count) == said


@pytest.mark.parametrize(
    "module",
    [
        nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5)),
        nn.Sequential(nn.Flatten(2), nn.TransformerEncoderLayer(64, 4, 32, batch_first=True)),
        nn.Sequential(nn.Flatten(2), nn.LSTM(64, 5)),
    ],
    ids=["convolutions", "attention", "recurrent"],
)
@pytest.mark.parametrize("graph", [False, True])
def test_operations_are_those_that_torch_counts(module: nn.Module, graph: bool) -> None:
    x = torch.randn(2, 3, 8, 8)
    with torch.set_grad_enabled(graph), FlopCounterMode(display=False) as expected:
        module.eval()(x)
    with torch.set_grad_enabled(graph), FlopCounter() as counter:
        module(x)
    assert counter.total == expected.get_total_flops()
    assert counter.total or not graph or "LSTM" in str(module)  # torch has no formula for fused ones


def test_a_pass_through_layers_that_torch_fuses_for_inference_is_counted() -> None:
    d, tokens = 64, 9
    module = nn.TransformerEncoderLayer(d, 4, 32, batch_first=True)
    network = Network(module, Categorical())
    x = torch.randn(2, tokens, d)
    products = 2 * tokens * 2 * (4 * d * d + 2 * d * 32)  # but for those of attention, which torch may not count
    assert products <= forward_flops(network, network.params(), x) < 1.2 * products
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_compiler_is_imported_for_training_alone() -> None:
    """It takes seconds; torch imports it for an optimiser."""
    script = """
import sys, torch, caveat
x = torch.randn(30, 4, generator=torch.Generator().manual_seed(0))
net = torch.nn.Linear(4, 2)
with torch.no_grad():
    net.weight.copy_(torch.tensor([[-3.0, 0, 0, 0], [3, 0, 0, 0]]))
task = caveat.Task(net, (x, (x[:, 0] > 0).long()), caveat.Categorical())
for method in (caveat.Laplace(), caveat.LastLayerLaplace(), caveat.SGMCMC.quick, caveat.AEB.quick):
    caveat.fit(task, method, progress=False).predict(x[:2])
assert "torch._dynamo" not in sys.modules
caveat.fit(task, caveat.LastLayerLaplace(), start=caveat.MAP.quick, progress=False)
assert "torch._dynamo" in sys.modules
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, timeout=120)
