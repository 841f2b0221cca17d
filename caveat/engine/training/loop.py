"""The one training loop: mini-batch descent on -log p(D, theta) / N, shared by every method that trains.

`optimise` moves tensors given a loss; the method decides what the tensors are (weights, or means and scales of
weights). A Gaussian prior enters as weight decay added to the gradient, which is exactly its gradient; any other prior
is in the loss; either way the optimum is the MAP. Only "adamw" decouples the decay, which is not the MAP, and warns of
it. An epoch's order, masks and augmentation depend on one number drawn from the run's generator, so a run that is
resumed at the start of an epoch continues exactly as it would have.
"""

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, first_not_finite, map_tensors
from caveat.engine.cost import forward_flops
from caveat.engine.run import Run
from caveat.engine.training.knobs import Training
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.randomness import seeded
from caveat.rows import Batch
from caveat.storage import State
from caveat.task import Task

__all__ = [
    "BatchPart",
    "Loop",
    "Loss",
    "Moments",
    "Variables",
    "optimise",
    "run_loop",
    "steps_per_epoch",
    "total_steps",
]

OptimizerOf = Callable[[list[dict[str, Any]]], torch.optim.Optimizer]  # of groups with "highest" and "weight_decay"
Moments = Callable[[Tensor], list[Tensor]]  # the optimiser's moments of a tensor, each shaped as the tensor


@dataclass(frozen=True)
class BatchPart:
    """A rank's rows of a step's batch and its share of the prior, so that the ranks' losses sum to the batch's."""

    start: int  # the place of its first row in the batch
    batch_rows: int  # of all ranks
    prior_share: float

    @classmethod
    def of_rank(cls, shares: tuple[Tensor, ...], rank: int) -> "BatchPart":
        """The part of one rank, given the rows of every rank; ranks that have rows share the prior evenly."""
        counts = [share.shape[0] for share in shares]
        return cls(sum(counts[:rank]), sum(counts), 1 / sum(count > 0 for count in counts))


class Loss(Protocol):
    """The loss of a rank's part of a batch: the losses of all ranks sum to what is minimised.

    That is -log p(D, theta) / N, without the prior's part where the prior acts as weight decay.
    """

    def __call__(self, x: Inputs, y: Tensor, part: BatchPart, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss, [], and the outputs [B, ...] of these rows; `rng` is the same on all ranks."""


@dataclass
class Variables:
    """The tensors that training moves, in place."""

    weights: Params  # those under the prior
    hyper: Hyper = field(default_factory=dict)  # learned beside them (log noise), or constant when it has no gradient
    buffers: Params = field(default_factory=dict)  # written by the forward pass (BatchNorm)
    extra: Params = field(default_factory=dict)  # updated by the method after each epoch (running moments)
    scales: Params = field(default_factory=dict)  # logarithms, such as those of standard deviations: moved by Adam
    scale_rate: float = 1e-2  # the highest learning rate of the scales

    def groups(self) -> State:
        """All tensors, by group."""
        groups = {"weights": self.weights, "hyper": self.hyper, "buffers": self.buffers, "extra": self.extra}
        return groups | ({"scales": self.scales} if self.scales else {})

    def trained(self) -> list[Tensor]:
        """The tensors that the optimiser moves."""
        return [t for t in (*self.weights.values(), *self.hyper.values(), *self.scales.values()) if t.requires_grad]


def optimise(
    task: Task,
    network: Network,
    variables: Variables,
    loss: Loss,
    training: Training,
    run: Run,
    *,
    decay: dict[str, float] | None = None,
    validate: Callable[[], float] | None = None,
    after_epoch: Callable[[int], None] | None = None,
    after_step: Callable[[Moments], None] | None = None,
    training_flops: float | None = None,
    row_losses: Callable[[], Tensor] | None = None,
) -> list[dict[str, float]]:
    """Train the variables in place; returns the history, one record an epoch.

    Where `training` leaves the number of epochs open and there are many, about a hundred of them have a record. `decay`
    is the weight decay of each weight tensor, where the prior acts as decay instead of being in the loss. With
    `validate` (lower is better) and `training.patience`, the best epoch's values are restored at the end. With
    `row_losses`, which gives the losses [R] of validation rows, it is the last epoch of those that have a record which
    these rows cannot tell from the best: whose mean loss is within a standard error of the difference. Records of
    epochs that were the ones to take have "kept". `after_step` may change the variables, and with them the optimiser's
    moments of a tensor. `training_flops` is the cost of a row, forward and backward, where it is not that of the
    network's own passes.
    """
    loop = Loop(
        task,
        network,
        variables,
        loss,
        training,
        run,
        decay=decay,
        validate=validate,
        after_epoch=after_epoch,
        after_step=after_step,
        training_flops=training_flops,
        row_losses=row_losses,
    )
    run_loop(loop)
    return loop.history


def run_loop(loop: "Loop") -> None:
    """Run what is left of a loop."""
    with loop.run.bar(loop.epochs * loop.steps, "batch") as bar:
        bar.update(loop.epoch * loop.steps)
        while not loop.finished:
            loop.run_epoch(bar)
            loop.end_epoch()
    loop.finish()


class Loop:
    """How far training is: the epoch, the optimisers, the best values so far. Arguments are those of `optimise`."""

    def __init__(
        self,
        task: Task,
        network: Network,
        variables: Variables,
        loss: Loss,
        training: Training,
        run: Run,
        *,
        decay: dict[str, float] | None = None,
        validate: Callable[[], float] | None = None,
        after_epoch: Callable[[int], None] | None = None,
        after_step: Callable[[Moments], None] | None = None,
        training_flops: float | None = None,
        row_losses: Callable[[], Tensor] | None = None,
        optimizer: OptimizerOf | None = None,
    ) -> None:
        if training.patience and validate is None:
            raise ValueError(
                f"Training(patience={training.patience}) stops on validation data: "
                "give the task validation=0.1, or a loader"
            )
        self.task, self.network, self.variables, self.loss = task, network, variables, loss
        self.training, self.run = training, run
        self.descent = training.descent
        self.clip = self.descent.clip
        self.optimizers = _optimizers(variables, training, decay, run, optimizer)
        self.validate, self.after_epoch, self.after_step = validate, after_epoch, after_step
        self.training_flops = training_flops  # of a row: None until measured
        self.row_losses = row_losses
        self.steps = steps_per_epoch(task.n, training.batch_size or task.train.batch_size)
        self.epochs = training.epochs_for(self.steps)
        # Epochs from one record of the history to the next: a hundred records say all of a training without a length.
        self.stride = 1 if training.epochs is not None or training.patience else max(1, self.epochs // 100)
        self.rows = task.train.on(run.device)
        self.channels_last = training.channels_last and not _overruns(network, run)
        if self.channels_last:
            for tensor in variables.weights.values():
                tensor.data = _channels_last(tensor.data)
        self.epoch = 0
        self.history: list[dict[str, float]] = []
        self.best: State = {}
        self.best_losses: Tensor | None = None  # [R], of validation rows at the best epoch so far
        self.shown_at = self.checked_at = 0.0  # when the progress was last shown, and the loss last checked
        self.restore()

    @property
    def finished(self) -> bool:
        """Whether all epochs were run, or validation says that more would not help."""
        return self.epoch >= self.epochs or self.stale()

    def end_epoch(self) -> None:
        """What follows on an epoch: the method's own work, validation, a checkpoint where one is due."""
        if self.after_epoch is not None:
            self.after_epoch(self.epoch)
        if self.row_losses is not None and self.has_record():
            self.select(self.row_losses())
        elif self.validate is not None and self.has_record():
            self.record(self.validate())
        if self.run.checkpoint_due():
            self.checkpoint()

    def finish(self) -> None:
        """Return to the best epoch's values, where validation chooses."""
        if self.best:
            _copy(self.best, self.variables.groups())

    def run_epoch(self, bar: Any) -> None:
        """Make one pass over the training rows."""
        run, started = self.run, time.monotonic()
        seed = int(torch.randint(2**62, (), generator=run.rng))
        order = torch.randperm(self.task.n, generator=torch.Generator().manual_seed(seed)).tensor_split(self.steps)
        alone = run.ranks.size == 1
        shares = [(positions,) if alone else positions.tensor_split(run.ranks.size) for positions in order]
        batches = self.rows.batches([part for s in shares if len(part := s[run.ranks.rank])], run.device)
        total = torch.zeros((), dtype=torch.float64, device=run.device)
        on_cpu, read = run.device.type == "cpu", 0.0  # on a CPU losses are summed as numbers, which takes no calls
        with seeded(seed + run.ranks.rank, run.device):  # for randomness inside the module, such as dropout
            shared = torch.Generator(run.device).manual_seed(seed)  # noise of whole batches, the same on all ranks
            of_rank = torch.Generator(run.device).manual_seed(seed + run.ranks.size + run.ranks.rank)
            for step, parts in enumerate(shares):
                self._set_rate(self.rate_of(step))
                self._forget_gradients()
                if parts[run.ranks.rank].shape[0]:
                    x, y = next(batches)
                    x = x if self.task.augment is None else self.task.augment(x, of_rank)
                    value = self._backward((x, y), parts, shared, bar)
                    if on_cpu:
                        read += value.item()
                    else:
                        total += value.double()
                self._move()
                bar.update()
        total += read
        run.ranks.add([total])
        self.count_epoch(float(total), time.monotonic() - started)

    def _forget_gradients(self) -> None:
        """As `zero_grad` does, without what it reports to a profiler, which a small network's step would notice."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for tensor in group["params"]:
                    tensor.grad = None

    def count_epoch(self, total: float, seconds: float) -> None:
        """Take note of an epoch that was run, with the sum of its steps' losses."""
        self.epoch += 1
        self.run.gradient_evaluations += 1
        self.run.flops += self.task.n * (self.training_flops or 0.0)
        self._check_finite(total, None)
        rate = float(self.optimizers[0].param_groups[0]["lr"])
        if self.has_record():
            self.history.append({"epoch": self.epoch, "loss": total / self.steps, "rate": rate, "seconds": seconds})

    def has_record(self) -> bool:
        """Whether the history has a record of the present epoch."""
        return self.epoch % self.stride == 0 or self.epoch == self.epochs

    def _backward(self, batch: Batch, parts: tuple[Tensor, ...], rng: torch.Generator, bar: Any) -> Tensor:
        """Add the gradients of this rank's part of a batch; returns its loss, []."""
        x, y = batch
        part = BatchPart.of_rank(parts, self.run.ranks.rank)
        self.measure_flops(x, len(y))
        value, outputs = self.loss_of(batch, part, rng)
        value.backward()
        now = time.monotonic()
        if self.run.device.type == "cpu" or now - self.checked_at > 1:  # reading a number waits for the device
            self.checked_at = now
            self._check_finite(value.item(), x)
        if not bar.disable and now - self.shown_at > 0.5:
            self.shown_at = now
            bar.set_postfix_str(f"epoch {self.epoch + 1}/{self.epochs}, {_quality(self, outputs, y)}", refresh=False)
        return value.detach()

    def measure_flops(self, x: Inputs, rows: int) -> None:
        """Find what a row costs, forward and backward, unless it is known."""
        if self.training_flops is None:
            weights = self.variables.weights  # only those of the network itself: a method may train others
            known = {name: t.detach() for name, t in weights.items() if name in self.network.names}
            self.training_flops = 3 * forward_flops(self.network, known, x) / rows

    def loss_of(self, batch: Batch, part: BatchPart, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """The loss of a part of a batch, [], in the precision and memory format of the knobs, and its outputs."""
        x, y = batch
        if self.channels_last:
            x = map_tensors(_channels_last, x)
        bfloat16 = self.training.precision == "bfloat16"
        try:
            with torch.autocast(self.run.device.type, torch.bfloat16) if bfloat16 else contextlib.nullcontext():
                return self.loss(x, y, part, rng)
        except ValueError as error:
            if "more than 1 value per channel" not in str(error):
                raise
            raise ValueError(
                f"BatchNorm cannot be trained on {len(y)} row at a time: use a batch_size of at least 2 for each rank"
            ) from error

    def _move(self) -> None:
        if self.run.ranks.size > 1:
            trained = self.variables.trained()
            for tensor in trained:
                tensor.grad = torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            self.run.ranks.add([t.grad for t in trained if t.grad is not None])
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.variables.trained(), self.clip)
        for optimizer in self.optimizers:
            optimizer.step()
        if self.after_step is not None:
            self.after_step(self.moments)

    def moments(self, tensor: Tensor) -> list[Tensor]:
        """The optimiser's moments of a tensor: whatever it stores that is shaped as the tensor."""
        states = (optimizer.state.get(tensor, {}) for optimizer in self.optimizers)
        return [v for state in states for v in state.values() if isinstance(v, Tensor) and v.shape == tensor.shape]

    def rate_of(self, step: int) -> float:
        """The learning rate of a step of this epoch, as a share of its highest."""
        return self.descent.rate((self.epoch + (step + 0.5) / self.steps) / self.epochs, self.training.milestones)

    def _set_rate(self, share: float) -> None:
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["highest"] * share

    def _check_finite(self, loss: float, x: Inputs) -> None:
        if math.isfinite(loss):
            return
        row = None if x is None else first_not_finite(x)
        cause = (
            f"the inputs of row {row} of the batch are not finite: clean them or look at augment="
            if row is not None
            else f"lower learning_rate (now {self.training.descent.learning_rate:g}), set clip=1, or lengthen "
            f"warmup (now {self.training.descent.warmup:g})"
        )
        raise FloatingPointError(f"the training loss became {loss} in epoch {self.epoch + 1} of {self.epochs}; {cause}")

    def record(self, validation: float) -> None:
        """Record the validation loss of the epoch, and copy the values if it is the best so far."""
        shared = torch.tensor(validation, dtype=torch.float64, device=self.run.device)
        self.run.ranks.add([shared])  # so that all ranks stop at the same epoch
        validation = float(shared) / self.run.ranks.size
        best = min((record["validation"] for record in self.history[:-1]), default=math.inf)
        self.history[-1]["validation"] = validation
        if validation < best and self.training.patience:
            self._keep()

    def select(self, losses: Tensor) -> None:
        """Record the mean of the validation rows' losses [R]; copy the values if no better epoch is told from this."""
        shared = losses.double().to(self.run.device)
        self.run.ranks.add([shared])  # so that all ranks take the same epoch
        losses = shared.cpu() / self.run.ranks.size
        self.history[-1]["validation"] = float(losses.mean())
        if self.best_losses is None or losses.mean() < self.best_losses.mean():
            self.best_losses = losses
        differences = losses - self.best_losses
        error = float(differences.std(correction=0)) / math.sqrt(max(len(losses) - 1, 1))
        if float(differences.mean()) <= error:
            self._keep()

    def _keep(self) -> None:
        """Copy the present values, and say so in the record."""
        self.history[-1]["kept"] = 1.0
        self.best = {
            g: {n: t.detach().clone() for n, t in group.items()} for g, group in self.variables.groups().items()
        }

    def stale(self) -> bool:
        """Whether the validation loss has not improved for `patience` epochs."""
        if not self.training.patience or not self.history:
            return False
        losses = [record["validation"] for record in self.history]
        return len(losses) - 1 - losses.index(min(losses)) >= self.training.patience

    def checkpoint(self) -> None:
        """Store everything that the next epoch depends on."""
        carry = {f"now.{name}": group for name, group in self.variables.groups().items()}
        carry |= {f"best.{name}": group for name, group in self.best.items()}
        for place, optimizer in enumerate(self.optimizers):
            carry[f"optimizer{place or ''}"] = {
                f"{i}.{name}": torch.as_tensor(v)
                for i, values in optimizer.state_dict()["state"].items()
                for name, v in values.items()
                if v is not None
            }
        carry["rng"] = {"state": self.run.rng.get_state()}
        if self.best_losses is not None:
            carry["best_losses"] = {"rows": self.best_losses}
        self.run.checkpoint(carry, {"epoch": self.epoch, "history": self.history})

    def restore(self) -> None:
        """Continue from the last checkpoint, if there is one."""
        resumed = self.run.resume()
        if resumed is None:
            return
        carry, note = resumed
        self.epoch, self.history = note["epoch"], note["history"]
        _copy({g.removeprefix("now."): t for g, t in carry.items() if g.startswith("now.")}, self.variables.groups())
        self.best = {g.removeprefix("best."): dict(t) for g, t in carry.items() if g.startswith("best.")}
        self.best_losses = carry["best_losses"]["rows"] if "best_losses" in carry else None
        for place, optimizer in enumerate(self.optimizers):
            content = optimizer.state_dict()
            for key, value in carry[f"optimizer{place or ''}"].items():
                index, name = key.split(".", 1)
                content["state"].setdefault(int(index), {})[name] = value.clone()
            optimizer.load_state_dict(content)
        self.run.rng.set_state(carry["rng"]["state"])


def steps_per_epoch(n: int, batch_size: int) -> int:
    """How many batches of nearly equal size an epoch has; none has a single row, which BatchNorm could not take."""
    steps = math.ceil(n / batch_size)
    return steps - 1 if n // steps == 1 and batch_size > 1 and n > 1 else steps


def total_steps(task: Task, training: Training) -> int:
    """How many steps the whole training has, at least one."""
    steps = steps_per_epoch(task.n, training.batch_size or task.train.batch_size)
    return max(1, training.epochs_for(steps) * steps)


def _copy(source: State, target: State) -> None:
    with torch.no_grad():
        for group, tensors in source.items():
            for name, value in tensors.items():
                target[group][name].copy_(value)


def _overruns(network: Network, run: Run) -> bool:
    """Whether gradients on a CPU would write past their memory with channels last (oneDNN issue 6035); warns if so."""
    for name, layer in network.module.named_modules() if run.device.type == "cpu" else ():
        strided = isinstance(layer, nn.Conv2d) and layer.kernel_size == (1, 1) and max(layer.stride) > 1
        if strided and layer.in_channels // layer.groups < 16:
            run.warnings.append(
                f"channels_last=True was left out: on a CPU torch's gradient of {name}, a strided 1x1 convolution with "
                "fewer than 16 input channels, is wrong with it, or crashes"
            )
            return True
    return False


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor


def _optimizers(
    variables: Variables, training: Training, decay: dict[str, float] | None, run: Run, of_weights: OptimizerOf | None
) -> list[torch.optim.Optimizer]:
    """The optimiser of the weights and, where they have one of their own or there are scales, others for the rest."""
    by_decay: dict[float, list[Tensor]] = {}
    for name, tensor in variables.weights.items():
        by_decay.setdefault((decay or {}).get(name, 0.0), []).append(tensor)
    rate = training.descent.learning_rate
    groups: list[dict[str, Any]] = [{"params": ts, "highest": rate, "weight_decay": d} for d, ts in by_decay.items()]
    learned = [tensor for tensor in variables.hyper.values() if tensor.requires_grad]
    # The loss has unit curvature in log noise, so its rate does not depend on the network's.
    noise = [{"params": learned, "highest": max(rate, 1e-2), "weight_decay": 0.0}] if learned else []
    if of_weights is None:
        optimizers = [_optimizer([*groups, *noise], training, decay, run)]
    else:
        optimizers = [of_weights(groups), *([torch.optim.Adam(noise, 1e-2, fused=_fused(run))] if noise else [])]
    if variables.scales:
        scales = [{"params": [*variables.scales.values()], "highest": variables.scale_rate}]
        optimizers.append(torch.optim.Adam(scales, variables.scale_rate, fused=_fused(run)))
    return optimizers


def _optimizer(
    groups: list[dict[str, Any]], training: Training, decay: dict[str, float] | None, run: Run
) -> torch.optim.Optimizer:
    kind, rate = training.descent.optimizer, training.descent.learning_rate
    if kind == "sgd":
        nesterov = training.momentum > 0
        return torch.optim.SGD(groups, rate, momentum=training.momentum, nesterov=nesterov, fused=_fused(run))
    if kind == "adam":
        return torch.optim.Adam(groups, rate, fused=_fused(run))
    if decay is None:
        raise ValueError("optimizer='adamw' needs a Gaussian prior of one precision a tensor: use 'adam' or 'sgd'")
    run.warnings.append("adamw: the prior acts as decoupled weight decay, so the result is not the MAP")
    return torch.optim.AdamW(groups, rate, fused=_fused(run))


def _fused(run: Run) -> bool | None:
    """True on a GPU and a CPU, for one kernel over all tensors of a step; elsewhere torch chooses."""
    return True if run.device.type in ("cuda", "cpu") else None


def _quality(loop: Loop, outputs: Tensor, y: Tensor) -> str:
    """The quality of the last batch's predictions, as text for the progress bar."""
    hyper = {name: t.detach() for name, t in loop.variables.hyper.items()}
    prediction = loop.network.likelihood.predictive(outputs.detach().unsqueeze(0), hyper)
    loss = -float(prediction.log_prob(y).mean())
    if prediction.kind == "classification":
        table = prediction.columns(y)
        return f"loss {loss:.3f}, accuracy {float((table['probs'].argmax(-1) == table['targets']).float().mean()):.3f}"
    error = prediction.samples.mean(0) - y.reshape(prediction.samples.shape[1:])
    return f"loss {loss:.3f}, rmse {float(error.square().mean().sqrt()):.3g}"
