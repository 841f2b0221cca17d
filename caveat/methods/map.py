"""MAP: the single most probable setting of the weights, optionally with its confidence tuned on validation data.

    theta* = argmax  sum_i log p(y_i | f(x_i, theta)) + log p(theta)

A point has no epistemic uncertainty, but it is where most other methods start, and MAP with temperature scaling
(softmax(f / T), T fitted on held-out rows) is the bar that any of them has to clear.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import torch

from caveat.engine.method import Method
from caveat.engine.run import Info, Run, StartsFrom
from caveat.engine.state_checks import check_hyper, check_names, check_point
from caveat.engine.training import ADAM, Training, fit_temperature, train_point
from caveat.knobs import check_knobs
from caveat.network import Network, Params
from caveat.storage import State
from caveat.task import Task

__all__ = ["MAP"]


@dataclass(frozen=True)
class MAP(Method):
    """The most probable weights; with temperature=True their confidence is scaled to fit validation data."""

    temperature: bool = False  # fit one temperature on the task's validation rows
    training: Training = ADAM
    starts_from: ClassVar[StartsFrom] = "scratch"
    quick: ClassVar["MAP"]
    default_draws: ClassVar[int] = 1

    def __post_init__(self) -> None:
        check_knobs(self)
        object.__setattr__(self, "training", self.training.filled(ADAM))

    def memory(self, network: Network) -> int:
        """Bytes of one copy of the weights."""
        return network.n_parameters * network.dtype.itemsize

    def fit(self, task: Task, start: State, run: Run) -> tuple[State, Info]:
        """Train the weights, then fit the temperature where that is asked for."""
        network = task.network.to(run.device)
        if self.temperature and task.validation is None:
            raise ValueError("temperature=True is fitted on validation data: give the task validation=0.1, or a loader")
        point = train_point(task, network, start, self.training, run)
        hyper = point.hyper
        if self.temperature and task.validation is not None:
            outputs, targets = task.outputs(network, point.params, task.validation)
            hyper = fit_temperature(network.likelihood, outputs.unsqueeze(0), targets, hyper)
            if not 0.01 < float(hyper["temperature"]) < 100:
                run.warnings.append(
                    f"the temperature went to {float(hyper['temperature']):.2g}, the end of its range: the validation "
                    "rows are too few or too easy to set it"
                )
        diagnostics = point.report() | {k: v.tolist() for k, v in hyper.items()}
        return {"params": point.params, "hyper": hyper}, run.info(network, "point estimate", diagnostics)

    def check_state(self, state: State, network: Network) -> None:
        """Refuse a state that is not a point of the network."""
        check_names("state", state, ["params", "hyper"])
        check_point("params", state["params"], network)
        check_hyper(state["hyper"], network)

    def draws(self, state: State, network: Network, n: int, rng: torch.Generator) -> Iterator[Params]:
        """The same weights, n times."""
        for _ in range(n):
            yield state["params"]


MAP.quick = MAP(training=Training(epochs=40))
