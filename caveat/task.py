"""A task: a network and the data it is to explain. The only place where a mini-batch is scaled to the whole data set.

    log p(D, theta) ~ N/B sum_{i in batch} log p(y_i | f(x_i, theta)) + log p(theta)

The task reads the data set by index, not through the user's loader: in order, without padding or augmentation where
exact sums are needed (curvature, HMC, evidence), shuffled by an explicit generator and augmented for training.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from caveat.batches import Inputs, map_tensors, move, tensors
from caveat.likelihoods import Bernoulli, Categorical, Hyper, Likelihood
from caveat.likelihoods.protocol import TargetFault
from caveat.likelihoods.sigmoids import ends_in_sigmoid
from caveat.likelihoods.token_labels import read_labels
from caveat.network import Initialise, Network, ParameterFilter
from caveat.priors import Params, Prior
from caveat.rows import Data, Rows
from caveat.storage import code_digest, settings_digest

__all__ = ["Augment", "Task"]

Augment = Callable[[Inputs, torch.Generator], Inputs]


class Task:
    """A network and its training data, with validation data when a method is to tune itself.

    Args:
        model: the module (copied, never touched).
        data: training rows: a `DataLoader`, a map-style `Dataset`, or a pair of tensors. A loader's batch size is the
            one of training unless that says otherwise; without a loader it is 128.
        likelihood: what the outputs say about the targets.
        prior: over the weights; `GaussianPrior(1.0)` unless given.
        validation: a share of the rows (split off once, by index), or validation data of their own.
        parameters: which parameters inference is about: a name pattern, several, or a predicate.
        augment: `augment(x, generator) -> x` on a training batch; never used for exact sums.
        initialise: how fresh weights are drawn: by default by the module's own initialisers; name patterns draw the
            parameters that they match and leave the others as they are (a new head on a pretrained trunk); a function
            draws in place on a module.
        split_seed: which rows a validation share takes.
    """

    def __init__(
        self,
        model: nn.Module,
        data: Data,
        likelihood: Likelihood,
        prior: Prior | None = None,
        *,
        validation: float | Data | None = None,
        parameters: ParameterFilter = "*",
        augment: Augment | None = None,
        initialise: Initialise | None = None,
        split_seed: int = 0,
    ) -> None:
        self.network = Network(model, likelihood, prior, parameters, initialise)
        self.augment = augment
        names = self.network.class_names
        rows = Rows(data, names=names)
        self.validation: Rows | None = None
        if isinstance(validation, float):
            rows, self.validation = _split(rows, validation, split_seed)
        elif validation is not None:
            self.validation = Rows(validation, names=names)
        self.train = rows
        self.warnings: list[str] = []
        with torch.random.fork_rng(devices=[]):  # for data that are augmented as they are read
            self._check()

    def __repr__(self) -> str:
        network = self.network
        held_out = "" if self.validation is None else f", {len(self.validation):,} validation rows"
        kinds = f"{type(network.module).__name__}, {type(network.likelihood).__name__}"
        return f"Task({kinds}, {network.n_parameters:,} weights, {self.n:,} rows{held_out})"

    @property
    def n(self) -> int:
        """The number of training rows."""
        return len(self.train)

    def example(self, device: torch.device) -> Inputs:
        """The inputs of the first two training rows, for passes that find out how a network is built."""
        x, _ = next(self.train.batches([torch.arange(min(self.n, 2))], device))
        return x

    def log_joint(
        self,
        outputs: Tensor,
        targets: Tensor,
        params: Params,
        hyper: Hyper,
        *,
        batch_rows: int | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """Unbiased estimate of log p(D, theta) from the outputs of a batch.

        When the batch of `batch_rows` rows is spread over ranks, each counts its rows and its `share` of the prior, so
        that the ranks' values and gradients sum to those of the whole.
        """
        network = self.network
        likelihood = network.likelihood.log_prob(outputs, targets, hyper).sum()
        scaled = self.n / (batch_rows or len(targets)) * likelihood
        if not share:
            return scaled
        return scaled + share * network.prior.log_prob({name: params[name] for name in network.names})

    def loss(
        self,
        outputs: Tensor,
        targets: Tensor,
        params: Params,
        hyper: Hyper,
        *,
        batch_rows: int | None = None,
        share: float = 1.0,
    ) -> Tensor:
        """What `log_joint` is over -N, by as few operations as there can be: a small network's step notices each."""
        loss = self.network.likelihood.log_prob(outputs, targets, hyper).sum() * (-1 / (batch_rows or len(targets)))
        if not share:
            return loss
        prior = self.network.prior.log_prob({name: params[name] for name in self.network.names})
        return loss - share / self.n * prior

    def log_likelihood(self, network: Network, params: Params, hyper: Hyper, rows: Rows | None = None) -> Tensor:
        """Mean log likelihood of a row over all training rows (or those given), without gradients; float64."""
        rows = self.train if rows is None else rows
        total = torch.zeros((), dtype=torch.float64)
        with torch.no_grad():
            # Without gradients four times the rows of a training batch take less memory than it does.
            for x, y in rows.on(network.device).ordered(4 * rows.batch_size, network.device):
                total += network.likelihood.log_prob(network(params, x), y, hyper).sum().double().cpu()
        return total / len(rows)

    def fitted_hyper(self, network: Network, params: Params, rows: Rows | None = None) -> Hyper:
        """What the likelihood learns beside the weights, by maximum likelihood at these weights."""
        if not self.hyper:
            return {}
        outputs, targets = self.outputs(network, params, self.train if rows is None else rows)
        hyper = {k: v.to(network.device) for k, v in self.hyper.items()}
        return network.likelihood.fitted_hyper(outputs, targets, hyper)

    def outputs(self, network: Network, params: Params, rows: Rows) -> tuple[Tensor, Tensor]:
        """Outputs and targets of rows, in order, without gradients."""
        with torch.no_grad():
            pairs = [(network(params, x), y) for x, y in rows.ordered(4 * rows.batch_size, network.device)]
        return torch.cat([outputs for outputs, _ in pairs]), torch.cat([targets for _, targets in pairs])

    def fingerprint(self) -> dict[str, str]:
        """Digests of the network, of its likelihood and prior, and of the rows."""
        rows = {"data": self.train, "validation": self.validation}
        code = {} if self.augment is None else {"code of augment": code_digest(self.augment)}
        return (
            {
                "network": self.network.fingerprint(),
                "likelihood": settings_digest(self.network.likelihood),
                "prior": settings_digest(self.network.prior),
                "augment": "none" if self.augment is None else getattr(self.augment, "__qualname__", "given"),
            }
            | {name: part.fingerprint() for name, part in rows.items() if part is not None}
            | code
        )

    def _check(self) -> None:
        """Send the first rows through the network and read all targets: a mistake shows now, not an hour later."""
        output = self._first_output()
        self._read_labels()
        likelihood = self.network.likelihood
        for name, rows in (("training", self.train), ("validation", self.validation)):
            if rows is None:
                continue
            try:
                targets = rows.targets()
                likelihood.check(output.expand(len(targets), *output.shape[1:]), targets)
            except TargetFault as fault:
                numbered = fault.numbered(rows.number_in_data(fault.row))
                raise ValueError(f"the {name} data do not fit: {numbered}") from fault
            except ValueError as error:
                raise ValueError(f"the {name} data do not fit: {error}") from error
            rows.known_finite = rows.in_memory
            if rows is self.train:
                self._tell_of_shapes(targets)
                self.hyper, self.baseline = likelihood.initial_hyper(targets), likelihood.baseline(targets)

    def _tell_of_shapes(self, targets: Tensor) -> None:
        """Warn where predictions have an axis that the targets lack: what is computed of both would be broadcast."""
        if not isinstance(self.network.likelihood, Categorical) and targets.ndim == 1:
            self.warnings.append(
                f"targets have the shape {tuple(targets.shape)}, and predictions will have {(self.n, 1)}: "
                "compare them with y[:, None], since prediction.mean - y would be a table of all pairs"
            )

    def _read_labels(self) -> None:
        """See in the first rows whether labels are to be scored one position later, as those of language models are."""
        likelihood, network = self.network.likelihood, self.network
        if not isinstance(likelihood, Categorical):
            return
        x, labels = next(self.train.batches([torch.arange(min(self.n, 2))]))
        likelihood, told = read_labels(
            likelihood, lambda inputs: network(network.params(), move(inputs, network.device)), x, labels
        )
        self.network = network.with_likelihood(likelihood)
        self.warnings += [told] if told else []

    def _first_output(self) -> Tensor:
        """The network's output for the first row, [1, ...]."""
        x = self._first_inputs()
        self.network.check_inputs(x)
        passed = map_tensors(lambda tensor: tensor.to(self.network.device, copy=True), x)
        shapes = [tuple(tensor.shape) for tensor in tensors(x)]
        try:
            with torch.no_grad():
                outputs = self.network(self.network.params(), passed).cpu()
        except Exception as error:
            raise ValueError(
                f"the network could not take the first training rows (inputs {shapes}): {error}"
            ) from error
        likelihood = self.network.likelihood
        if isinstance(likelihood, Bernoulli) and ends_in_sigmoid(
            lambda: self.network(self.network.params(), move(x, self.network.device))
        ):
            raise ValueError("the network ends in a sigmoid, and Bernoulli takes logits: leave the sigmoid out")
        if outputs.ndim == 0 or len(outputs) != min(self.n, 2):
            raise ValueError(
                f"the network's outputs {tuple(outputs.shape)} for inputs {shapes} are not one for each row"
            )
        if bool(outputs.isnan().any()):
            raise ValueError("the network's outputs for the first training rows are NaN: look at its weights")
        if not _same(move(passed, torch.device("cpu")), x):
            raise ValueError(
                "the module changes its inputs in place, so that a second pass would see others: "
                "take inplace=True off its first layer, or let forward start with x = x.clone()"
            )
        return outputs[:1]

    def _first_inputs(self) -> Inputs:
        """The inputs of the first rows, which are read twice to see whether they stay the same."""
        first = [torch.arange(min(self.n, 2))]
        reads = []
        for seed in (0, 1):
            torch.default_generator.manual_seed(seed)
            reads.append(next(self.train.batches(first))[0])
        if not _same(*reads):
            self.warnings.append(
                "the training data differ each time they are read (augmentation inside the data set?): exact sums over "
                "the data will be noisy; pass a data set without it, and augment=... for training"
            )
        return reads[0]


def _same(x: Inputs, other: Inputs) -> bool:
    return all(torch.equal(a, b) for a, b in zip(tensors(x), tensors(other), strict=True))


def _split(rows: Rows, share: float, seed: int) -> tuple[Rows, Rows]:
    held_out = round(share * len(rows))
    rest = len(rows) - held_out
    if held_out < 1 or rest < 1:
        raise ValueError(
            f"validation={share} of {len(rows)} rows: must be above 0 and below 1 and leave rows on both sides"
        )
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    return rows.part(order[held_out:].sort().values), rows.part(order[:held_out].sort().values)
