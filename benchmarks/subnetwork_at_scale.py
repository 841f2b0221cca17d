"""The paper's size on a GPU: ResNet-18, 50,000 rows of CIFAR's shape, a full covariance over 42,438 of 11.2M weights.

    python benchmarks/subnetwork_at_scale.py            # one CUDA GPU with 64 GB, about two minutes

Seconds and peak memory of the whole fit (weights chosen by the energy score, GGN over all rows, factor; none skipped),
with bfloat16 and with full arithmetic, of 10,000 predictions from 100 draws, and of their exact means and covariances,
after a small fit that is not timed (a process's first pass loads CUDA's libraries: some eight seconds).
The rows are random, the labels the network's own choices: time does not depend on what they say.
"""

import sys
import time
from collections.abc import Callable
from typing import Any

import torch

import caveat
from caveat.models import resnet18

ROWS, PREDICTED, WEIGHTS = 50_000, 10_000, 42_438


def problem(rows: int = ROWS) -> tuple[caveat.Task, torch.Tensor]:
    """A network that is fairly sure of its own labels."""
    torch.manual_seed(0)
    model = resnet18().eval().cuda()
    x = torch.randn(rows, 3, 32, 32)
    with torch.no_grad():
        outputs = torch.cat([model(part.cuda()) for part in x.split(1000)])
        scale = 3 / outputs.std()
        model.head.bias.copy_(scale * (model.head.bias - outputs.mean(0)))  # type: ignore[union-attr, operator]
        model.head.weight.mul_(scale)  # type: ignore[union-attr, operator]
    labels = (outputs - outputs.mean(0)).argmax(1).cpu()
    return caveat.Task(model.cpu(), (x, labels), caveat.Categorical(), caveat.GaussianPrior(25.0)), x


def timed(label: str, work: Callable[[], Any]) -> Any:
    """Do it, and print what it took."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    began = time.monotonic()
    result = work()
    torch.cuda.synchronize()
    print(
        f"| {label} | {time.monotonic() - began:.1f} s | {torch.cuda.max_memory_allocated() / 1e9:.1f} GB |", flush=True
    )
    return result


def main() -> None:
    """Print the table."""
    if not torch.cuda.is_available():
        raise SystemExit("this benchmark needs a CUDA GPU; benchmarks/laplace.py runs on a CPU")
    small, x = problem(2000)
    for arithmetic in ("bfloat16", "full"):
        method = caveat.SubnetworkLaplace(1000, arithmetic=arithmetic, precision="given", skip=0.0)
        caveat.fit(small, method, device="cuda", progress=False).predict(x[:1000])
    task, x = problem()
    pieces = x[:PREDICTED].split(1000)
    print(f"| {torch.cuda.get_device_name()} | seconds | peak |\n|---|---|---|")
    for arithmetic in ("bfloat16", "full"):
        method = caveat.SubnetworkLaplace(WEIGHTS, arithmetic=arithmetic, precision="given", skip=0.0)
        posterior = timed(f"fit, {arithmetic}", lambda m=method: caveat.fit(task, m, device="cuda", progress=False))
        timed("10,000 predictions", lambda p=posterior: [p.predict(part) for part in pieces])
        timed("10,000 exact covariances", lambda p=posterior: [p.moments(part) for part in pieces])


if __name__ == "__main__":
    sys.exit(main())
