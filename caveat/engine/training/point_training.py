"""Training a point: the weights and the noise that maximise log p(D, theta), from given starting values."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.captured_steps import CaptureError
from caveat.engine.run import Run
from caveat.engine.torch_settings import compiled
from caveat.engine.training.arrival import warn_if_no_optimum
from caveat.engine.training.knobs import Training
from caveat.engine.training.learned_noise import warn_of_noise
from caveat.engine.training.loop import BatchPart, Loop, OptimizerOf, Variables, run_loop
from caveat.engine.training.side_by_side import run_loops_together
from caveat.likelihoods import Hyper, Likelihood, learned_noise
from caveat.network import Network, Params
from caveat.priors import gaussian_precisions, weight_decay
from caveat.randomness import seeded
from caveat.storage import State
from caveat.task import Task

__all__ = ["Forward", "Point", "PointTraining", "row_losses", "train_point", "train_points",
           "training_report"]  # fmt: skip

Forward = Callable[[Network, Inputs, BatchPart, torch.Generator], Tensor]


@dataclass(frozen=True)
class Point:
    """Weights (with the buffers that training changed), what was learned along with them, and the training history."""

    params: Params
    hyper: Hyper
    history: list[dict[str, float]]

    def report(self) -> dict[str, Any]:
        """How training went."""
        return training_report(self.history)

    def draw(self) -> Params:
        """The point as a draw of the weights, with the noise that was learned among them as "hyper/log_noise"."""
        learned = {f"hyper/{name}": value for name, value in self.hyper.items() if name == "log_noise"}
        return self.params | learned


def train_point(
    task: Task,
    network: Network,
    start: State,
    training: Training,
    run: Run,
    *,
    forward: Forward | None = None,
    after_epoch: Callable[[int, Variables], None] | None = None,
    extra: Params | None = None,
) -> Point:
    """Train weights and noise from `start`, which has the groups "params" and "hyper".

    Training whose length nobody gave takes the last epoch that validation rows cannot tell from the best. In the end,
    noise that is learned is set to its maximum-likelihood value on validation rows, or on training rows if there are
    none. `forward(trainee, x, part, rng)` replaces the plain training pass of the network that is trained.
    `after_epoch(epoch, variables)` may read the variables and update running quantities in `extra`.
    """
    if training.epochs == 0:
        params = dict(start["params"])
        return Point(params, task.fitted_hyper(network, params, task.validation), [])
    trained = PointTraining(task, network, start, training, run, forward, after_epoch, extra)
    if run.beside is not None:
        try:
            if run.beside.train([trained.loop]):
                return trained.point()
        except CaptureError as error:
            run.warnings.append(f"{error}: networks are trained one after the other")
    run_loop(trained.loop)
    return trained.point()


def train_points(
    task: Task, network: Network, starts: Sequence[State], training: Training, runs: Sequence[Run]
) -> Iterator[Point]:
    """Train a point from every start, each in a run of its own: side by side on a GPU, else one after the other."""
    beside = runs[0].beside if runs else None
    if (_together(runs) or beside is not None) and training.epochs != 0:
        trained = [PointTraining(task, network, start, training, run) for start, run in zip(starts, runs, strict=True)]
        loops = [each.loop for each in trained]
        for run in runs:
            run.restart_clock(1 / len(runs))
        try:
            if beside is None or not beside.train(loops):
                run_loops_together(loops)
        except CaptureError as error:
            runs[0].warnings.append(f"{error}: networks are trained one after the other")
        else:
            yield from (each.point() for each in trained)
            return
    for start, run in zip(starts, runs, strict=True):
        run.restart_clock()
        yield train_point(task, network, start, training, run)


def _together(runs: Sequence[Run]) -> bool:
    return len(runs) > 1 and runs[0].device.type == "cuda"


class PointTraining:
    """A point that is being trained, and the loop that trains it. Arguments are those of `train_point`."""

    def __init__(
        self,
        task: Task,
        network: Network,
        start: State,
        training: Training,
        run: Run,
        forward: Forward | None = None,
        after_epoch: Callable[[int, Variables], None] | None = None,
        extra: Params | None = None,
        optimizer: OptimizerOf | None = None,
    ) -> None:
        """`optimizer` makes the optimiser of the weights, in the place of the one that the knobs name."""
        self.task, self.network, self.run = task, network, run
        trainee = network.with_fixed(start["params"])
        variables = _variables(trainee, start, run, extra)
        decay = weight_decay(gaussian_precisions(network.prior, network.params()), task.n)
        self._written = _written_buffers(task, network)
        self._owned = {*self._written, *start["params"]}
        forward = forward or _plain_pass
        training_pass = compiled(forward) if training.compile else forward

        def loss(x: Inputs, y: Tensor, part: BatchPart, rng: torch.Generator) -> tuple[Tensor, Tensor]:
            outputs = training_pass(trainee, x, part, rng)
            outputs = outputs if outputs.dtype == torch.float64 else outputs.float()
            value = task.loss(
                outputs,
                y,
                variables.weights,
                variables.hyper,
                batch_rows=part.batch_rows,
                share=part.prior_share if decay is None else 0.0,
            )
            return value, outputs

        def losses() -> Tensor:
            assert task.validation is not None
            outputs, targets = task.outputs(trainee, {}, task.validation)
            hyper = {name: value.to(outputs.device) for name, value in task.hyper.items()}
            return row_losses(network.likelihood, outputs, targets, hyper)

        def after(epoch: int) -> None:
            variables.buffers |= dict(trainee.module.named_buffers())  # a module may have replaced one
            run.ranks.average(variables.buffers[name] for name in self._written)
            if after_epoch is not None:
                after_epoch(epoch, variables)

        # A path that a method follows, and an optimiser with more than weights in it, go on to their ends.
        followed = after_epoch is not None or optimizer is not None
        open_ended = training.epochs is None and not training.patience and not followed
        self._is_optimum = not followed  # whether that is what training goes for
        self.loop = Loop(
            task,
            network,
            variables,
            loss,
            training,
            run,
            decay=decay,
            validate=None if task.validation is None else lambda: float(losses().mean()),
            after_epoch=after,
            row_losses=losses if open_ended and task.validation is not None else None,
            optimizer=optimizer,
        )

    def point(self) -> Point:
        """What was trained, once the loop is at its end."""
        variables, history = self.loop.variables, self.loop.history
        moved = {name: t for name, t in variables.buffers.items() if name in self._owned}
        params = {name: t.detach().contiguous() for name, t in (variables.weights | moved).items()}
        hyper = self.task.fitted_hyper(self.network, params, self.task.validation)
        warn_of_noise(self.task, self.run)
        point = Point(params, hyper, history)
        taken = point.report()["taken_epoch"]
        if self._is_optimum and taken == history[-1]["epoch"]:  # an earlier one is no optimum, on purpose
            warn_if_no_optimum(self.task, self.network, params, self.run, f"the point after {taken} epochs of training")
        return point


def _plain_pass(trainee: Network, x: Inputs, part: BatchPart, rng: torch.Generator) -> Tensor:
    return trainee.training_pass(x)


def training_report(history: list[dict[str, float]]) -> dict[str, Any]:
    """How training went: its history, and where there is one, the epoch that was taken and why."""
    if not history:
        return {"history": history}
    kept = [record["epoch"] for record in history if record.get("kept")]
    last = history[-1]["epoch"]
    return {
        "history": history,
        "epochs": last,
        "taken_epoch": kept[-1] if kept else last,
        "taken_by": "validation" if kept else "the end of training",
    }


def row_losses(likelihood: Likelihood, outputs: Tensor, targets: Tensor, hyper: Hyper) -> Tensor:
    """The losses of validation rows, [R], with the noise that they show, which is kept: that of training rows falls."""
    hyper = likelihood.fitted_hyper(outputs, targets, hyper) if hyper else {}
    return -likelihood.log_prob(outputs, targets, hyper).double()


def _written_buffers(task: Task, network: Network) -> list[str]:
    """The names of the buffers that a training pass writes, from one such pass on copies."""
    before, after = network.buffers(), network.buffers()
    with seeded(0, network.device), torch.no_grad():
        x, _ = next(task.train.batches([torch.arange(min(task.n, 8))], network.device))
        network(network.params() | after, x, train=True)
    return [name for name in before if not torch.equal(before[name], after[name])]


def _variables(trainee: Network, start: State, run: Run, extra: Params | None) -> Variables:
    """The trainee's tensors, with gradients for the weights and, where it is to be learned, for the noise."""
    hyper = {name: t.to(run.device, copy=True) for name, t in start["hyper"].items()}
    if (noise_to_learn := learned_noise(trainee.likelihood, hyper)) is not None:
        noise_to_learn.requires_grad_()
    parameters = dict(trainee.module.named_parameters())
    weights = {name: parameters[name].requires_grad_() for name in trainee.names}
    return Variables(weights, hyper, dict(trainee.module.named_buffers()), extra or {})
