"""Posteriors that inference and predictions are timed with: fitted for a few steps, since only their sizes matter.

On a GPU both parts are in float32 as torch has it: convolutions in TF32, products of matrices not. Unstructured layers
have no kernel there: a pass makes each layer's whole weight. All ways take turns in one process, in --rounds rounds,
nine where one takes over a second.
"""

import argparse
import warnings
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import caveat

from .cases import CASES, CHANNEL, SPARSE, method_of
from .timing import Clock


@dataclass(frozen=True)
class Fitted:
    """A network's posteriors by way, dense VI first."""

    module: nn.Module
    posteriors: dict[str, Any]
    x: Tensor  # rows on the device, as many as the largest batch at least
    batches: tuple[int, int]
    about: dict[str, Any]  # of every row of a table
    clock: Clock


def fitted(arguments: argparse.Namespace, case: str) -> Fitted:
    """By the ways that have one of our own."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(arguments.threads)
    device, processor_time = arguments.device, arguments.processor_time
    batches = (1, 8) if device == "cpu" else (1, 512)
    module = CASES[case].build()
    x = torch.randn(max(64, *batches), *CASES[case].shape)
    task = caveat.Task(module, (x, torch.randint(10, (len(x),))), caveat.Categorical(), caveat.GaussianPrior(1.0))
    training = caveat.Training(epochs=2, batch_size=len(x) // 4, optimizer="sgd", learning_rate=1e-2)
    ways = ["dense VI", *(way for way in arguments.way if way in SPARSE or way in CHANNEL)]
    posteriors = {way: caveat.fit(task, method_of(way, training), device=device, progress=False) for way in ways}
    about = {"case": case, "device": device, "threads": arguments.threads, "processor_time": processor_time}
    return Fitted(module, posteriors, x.to(device), batches, about, Clock(device, processor_time))
