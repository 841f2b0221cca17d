"""bayesian-torch's side, in a process of its environment: its own conversion of the same network, its own KL.

It draws weights, one draw for all rows of a batch (Reparameterization, its fastest: one product a layer) or with signs
that differ by row (Flipout, two products, the nearest to local reparameterisation, in which rows are independent); it
has no local reparameterisation, and is not compiled. Optimisers, and on a GPU type and layout, are those of our side.
A prediction is ten passes in eval mode and the mean of their softmax.
"""

import contextlib
import functools
import importlib
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .cases import CASES
from .job import Job
from .sizes import storage_bytes
from .timing import Clock, in_turns
from .watch import Watch


def library() -> Any:
    """What converts a network, and has its KL."""
    return importlib.import_module("bayesian_torch.models.dnn_to_bnn")


def convert(job: Job, module: nn.Module) -> None:
    """Make a network bayesian-torch's."""
    prior = {"prior_mu": 0.0, "prior_sigma": 1.0, "posterior_mu_init": 0.0, "posterior_rho_init": -4.6}
    library().dnn_to_bnn(module, prior | {"type": job.way.split()[1], "moped_enable": False})


def train(job: Job, module: nn.Module, x: Tensor, y: Tensor, watch: Watch) -> dict[str, Any]:
    """All of the rows once, watched."""
    cuda = job.device != "cpu"
    convert(job, module)
    module.to(job.device).train()
    x, y = x.to(job.device), y.to(job.device)
    if cuda and x.ndim == 4:
        module.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    autocast = functools.partial(torch.autocast, "cuda", torch.bfloat16) if cuda else contextlib.nullcontext
    scales = [p for name, p in module.named_parameters() if "rho" in name]
    means = [p for name, p in module.named_parameters() if "rho" not in name]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.SGD(means, 1e-3, momentum=0.9, nesterov=True, fused=cuda),
        torch.optim.Adam(scales, 1e-2, fused=cuda),
    ]
    for rows, targets in zip(x.split(job.batch), y.split(job.batch), strict=True):
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        watch.before()
        with autocast():
            loss = F.cross_entropy(module(rows), targets) + 0.1 * library().get_kl_loss(module) / len(x)
        loss.backward()
        if watch.step == job.interval:
            tensors = [*module.parameters(), *module.buffers()] + [p.grad for p in module.parameters()]
            tensors += [v for o in optimizers for kept in o.state.values() for v in kept.values()]
            watch.sizes["training_bytes"] = storage_bytes(t for t in tensors if isinstance(t, Tensor))
        for optimizer in optimizers:
            optimizer.step()
        watch.after()
    return watch.found(exchanges=False)


def predict(job: Job) -> dict[str, Any]:
    """Seconds of a prediction, and the bytes of the network's file."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(job.threads)
    torch.manual_seed(0)
    module = CASES[job.case].build()
    convert(job, module)
    module.to(job.device).eval()
    x = torch.randn(job.batch, *CASES[job.case].shape, device=job.device)

    def draws() -> Tensor:
        return torch.stack([module(x).softmax(-1) for _ in range(10)]).mean(0)

    with torch.inference_mode():
        found = in_turns({job.way: draws}, job.interval, Clock(job.device, job.processor_time))[job.way]
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    return found | {"stored_bytes": file.tell()}
