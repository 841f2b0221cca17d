"""The density that chains move by, against autograd of the log joint as it is defined, dense and in float64."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

import caveat
from caveat.engine.chains import log_posterior as target
from caveat.engine.chains.coordinates import Coordinates
from caveat.engine.chains.log_posterior import LogPosterior, PassSettings, RowPieces, log_likelihood_of, vmap_takes
from caveat.network import Network
from caveat.task import Task

WIDTH = {"Categorical": 3, "Bernoulli": 2, "Gaussian": 2, "HeteroscedasticGaussian": 4, "Poisson": 2}
COVARIANCE = torch.tensor([[2.0, 0.5, 0, 0], [0.5, 1, 0, 0], [0, 0, 0.1, 0], [0, 0, 0, 0.5]], dtype=torch.float64)
PRIORS = {
    "gaussian": caveat.GaussianPrior({"0.*": 4.0, "*": 0.5}),
    "laplace": caveat.LaplacePrior(0.7),
    "student": caveat.StudentTPrior(0.5, 3.0),
    "logistic": caveat.LogisticPrior(0.5),
    "mixture": caveat.GaussianMixturePrior((0.3, 1.0), (0.4, 0.6)),
    "empcov": caveat.EmpCovPrior("0.weight", COVARIANCE, alpha=0.5, epsilon=0.1, precision=2.0),
}


def rows(likelihood: str, n: int = 11) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(5)
    x = torch.randn(n, 4, generator=rng, dtype=torch.float64)
    signal = torch.randn(n, 2, generator=rng, dtype=torch.float64)
    targets = {
        "Categorical": torch.randint(3, (n,), generator=rng),
        "Bernoulli": (signal > 0).double(),
        "Gaussian": 3 * signal + 1,
        "HeteroscedasticGaussian": signal,
        "Poisson": torch.poisson(signal.exp(), generator=rng),
    }
    return x, targets[likelihood]


def mlp(likelihood: str) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, WIDTH[likelihood])).double()


def log_joint(task: Task, coordinates: Coordinates, position: Tensor) -> Tensor:
    """At one position [P], by the definition; the logarithm of noise that is learned is N(log(spread) - 1, 1)."""
    network, params = task.network, coordinates.split(coordinates.weights(position))
    hyper, density = dict(task.hyper), torch.zeros((), dtype=torch.float64)
    if "hyper/log_noise" in params:
        log_noise = params.pop("hyper/log_noise")
        centre = task.hyper["log_noise"] - 1
        density = -0.5 * ((log_noise - centre).square() + math.log(2 * math.pi)).sum()
        hyper["log_noise"] = log_noise
    x, y = task.train.everything()
    return network.likelihood.log_prob(network(params, x), y, hyper).sum() + network.prior.log_prob(params) + density


def assert_density_is_that_of_the_definition(
    task: Task, chains: int = 1, temperature: float = 1.0, width: bool = False
) -> None:
    coordinates = Coordinates.of(task.network, task.hyper)
    if width:
        coordinates = coordinates.with_width(torch.linspace(0.2, 2, coordinates.size).double())
    log_posterior = LogPosterior(task.network, coordinates, chains, task.hyper, temperature)
    pieces = RowPieces(task.train, task.network)
    for seed in (0, 1):  # twice: nothing of the first may stay
        rng = torch.Generator().manual_seed(seed)
        position = 0.7 * torch.randn(chains, coordinates.size, generator=rng, dtype=torch.float64)
        likelihood, gradient = log_posterior.gradient(position, pieces.part())
        exact, wanted = [], []
        for one in position:
            leaf = one.clone().requires_grad_()
            value = log_joint(task, coordinates, leaf)
            exact.append(value.detach())
            wanted.append(torch.autograd.grad(value, leaf)[0] / temperature)
        torch.testing.assert_close(gradient, torch.stack(wanted), rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(
            likelihood + log_posterior.log_prior(position), torch.stack(exact), rtol=1e-11, atol=1e-9
        )


@pytest.mark.parametrize("likelihood", WIDTH)
@pytest.mark.parametrize("chains", [1, 3])
def test_every_likelihood(likelihood: str, chains: int) -> None:
    task = Task(mlp(likelihood), rows(likelihood), getattr(caveat, likelihood)(), PRIORS["gaussian"])
    assert_density_is_that_of_the_definition(task, chains)


@pytest.mark.parametrize("prior", PRIORS)
@pytest.mark.parametrize("chains", [1, 2])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_every_prior_with_noise_to_be_learned(prior: str, chains: int, temperature: float) -> None:
    task = Task(mlp("Gaussian"), rows("Gaussian"), caveat.Gaussian(standardise=True), PRIORS[prior])
    assert_density_is_that_of_the_definition(task, chains, temperature, width=temperature != 1)


def test_weighted_classes_and_noise_that_is_given() -> None:
    weighted = caveat.Categorical(class_weights=(0.5, 2.0, 0.0), ignore_index=1)
    assert_density_is_that_of_the_definition(Task(mlp("Categorical"), rows("Categorical"), weighted))
    given = caveat.Gaussian(noise=0.3)
    assert_density_is_that_of_the_definition(Task(mlp("Gaussian"), rows("Gaussian"), given), chains=2)


class ThirdParty(nn.Module):
    """In-place activations, BatchNorm, several inputs by name, a frozen bias, a tied weight, a parameter of no axes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(4, 6)
        self.norm = nn.BatchNorm1d(6)
        self.twice, self.again = nn.Linear(6, 6), nn.Linear(6, 6)
        self.again.weight = self.twice.weight
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.head = nn.Linear(6, 3)
        self.stem.bias.requires_grad_(False)

    def forward(self, features: Tensor, scale: Tensor) -> dict[str, Tensor]:
        h = nn.functional.silu(self.norm(self.stem(features * scale)), inplace=True)
        return {"logits": self.head(self.again(torch.tanh_(self.twice(h) * self.gain)))}


class ByName(Dataset):
    def __init__(self) -> None:
        self.x, self.y = rows("Categorical")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"features": self.x[i], "scale": 1 + self.x[i, :1] ** 2, "labels": self.y[i]}


@pytest.mark.parametrize("chains", [1, 2])
def test_what_real_modules_hold(chains: int) -> None:
    torch.manual_seed(0)
    module = ThirdParty().double()
    module.norm.running_mean.normal_()
    module.norm.running_var.uniform_(0.5, 2)
    before = copy.deepcopy(module.state_dict())
    task = Task(module, ByName(), caveat.Categorical())
    assert "stem.bias" not in task.network.names
    assert "again.weight" not in task.network.names
    assert_density_is_that_of_the_definition(task, chains)
    assert vmap_takes(task.network, next(task.train.ordered())[0])
    for state in (module.state_dict(), task.network.module.state_dict()):
        assert all(torch.equal(value, before[name]) for name, value in state.items()), "the module was touched"


def test_recurrent_and_convolutional_layers() -> None:
    torch.manual_seed(0)

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.lstm, self.head = nn.Embedding(7, 4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.lstm(self.embedding(tokens))[0][:, -1])

    tokens, labels = torch.randint(7, (9, 5)), torch.randint(2, (9,))
    assert_density_is_that_of_the_definition(Task(Recurrent().double(), (tokens, labels), caveat.Categorical()))
    images = torch.randn(9, 2, 6, 6, dtype=torch.float64)
    conv = nn.Sequential(nn.Conv2d(2, 3, 3), nn.ReLU(inplace=True), nn.Flatten(), nn.Linear(48, 2)).double()
    prior = caveat.EmpCovPrior.from_inputs("0.weight", conv[0].weight, images)
    task = Task(conv, (images, labels), caveat.Categorical(), prior)
    assert_density_is_that_of_the_definition(task, chains=1)
    assert_density_is_that_of_the_definition(task, chains=2)


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Room for three or four rows' activations."""
    monkeypatch.setattr(target, "_STACK_BYTES", 600)


def sizes(pieces: RowPieces, part: int = 0) -> list[int]:
    return [len(y) for _, y in pieces.part(part)]


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("kept", [True, False])
def test_pieces_do_not_change_the_sum(kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not kept:
        monkeypatch.setattr(target, "free_bytes", lambda device: 8)
    task = Task(mlp("Categorical"), rows("Categorical", 23), caveat.Categorical(), PRIORS["laplace"])
    pieces = RowPieces(task.train, task.network)
    assert (pieces._batches is not None) == kept
    assert len(sizes(pieces)) > 4
    assert sum(sizes(pieces)) == 23
    assert_density_is_that_of_the_definition(task)
    assert_density_is_that_of_the_definition(task, chains=2)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("parts", [2, 3])
def test_parts_have_every_row_once_and_sum_to_the_whole(parts: int) -> None:
    task = Task(mlp("Categorical"), rows("Categorical", 23), caveat.Categorical(), PRIORS["student"])
    coordinates = Coordinates.of(task.network, {})
    pieces, whole = RowPieces(task.train, task.network, parts), RowPieces(task.train, task.network)
    seen = torch.cat([x for part in range(parts) for x, _ in pieces.part(part)])  # type: ignore[arg-type]
    everything = torch.cat([x for x, _ in pieces.everything()])  # type: ignore[arg-type]
    assert torch.equal(seen, everything)
    order = lambda x: x[x[:, 0].argsort()]  # noqa: E731
    assert torch.equal(order(seen), order(task.train.everything()[0]))
    counts = [sum(sizes(pieces, part)) for part in range(parts)]
    assert max(counts) - min(counts) <= 1
    log_posterior = LogPosterior(task.network, coordinates, 1, {}, temperature=0.5)
    position = torch.randn(1, coordinates.size, dtype=torch.float64)
    found = [log_posterior.gradient(position, pieces.part(part), prior_weight=1 / parts) for part in range(parts)]
    likelihood, gradient = log_posterior.gradient(position, whole.part())
    torch.testing.assert_close(sum(value for value, _ in found), likelihood)
    torch.testing.assert_close(sum(gradient for _, gradient in found), gradient)


def test_times_counts_the_likelihood_and_prior_counts_itself() -> None:
    task = Task(mlp("Gaussian"), rows("Gaussian"), caveat.Gaussian(), PRIORS["gaussian"])
    coordinates = Coordinates.of(task.network, task.hyper)
    log_posterior, batches = (
        LogPosterior(task.network, coordinates, 1, task.hyper),
        list(RowPieces(task.train, task.network).part()),
    )
    position = torch.randn(1, coordinates.size, dtype=torch.float64)
    only = [
        log_posterior.gradient(position, batches, prior_weight=0)[1],
        log_posterior.gradient(position, [], prior_weight=1)[1],
    ]
    torch.testing.assert_close(only[1], -position)
    value, both = log_posterior.gradient(position, batches, likelihood_weight=2.5, prior_weight=0.25)
    torch.testing.assert_close(both, 2.5 * only[0] + 0.25 * only[1])
    torch.testing.assert_close(
        value, log_posterior.gradient(position, batches)[0]
    )  # the value is that of the rows given


def test_float32_gives_float64_sums_that_differ_by_rounding_of_rows_only() -> None:
    x, y = rows("Categorical", 500)
    exact = Task(mlp("Categorical"), (x, y), caveat.Categorical(), PRIORS["laplace"])
    task = Task(mlp("Categorical").float(), (x.float(), y), caveat.Categorical(), PRIORS["laplace"])
    log_posterior, wide = (LogPosterior(t.network, Coordinates.of(t.network, {}), 1, {}) for t in (task, exact))
    for seed in range(5):
        position = torch.randn(1, log_posterior.coordinates.size, generator=torch.Generator().manual_seed(seed))
        value, gradient = log_posterior.gradient(position, RowPieces(task.train, task.network).part())
        wanted, along = wide.gradient(position.double(), RowPieces(exact.train, exact.network).part())
        assert value.dtype == log_posterior.log_prior(position).dtype == torch.float64
        torch.testing.assert_close(gradient.double(), along, rtol=1e-4, atol=1e-3)
        # 500 rows of a few nats, each off by 1e-7 of itself at random: a float32 sum would be off by ten times more.
        assert abs(float(value - wanted)) < 2e-5
        assert abs(float(log_posterior.log_prior(position) - wide.log_prior(position.double()))) < 2e-6


class DataDependent(nn.Module):
    """What torch.vmap cannot do: a branch on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.layer(x)
        return outputs if bool(outputs.sum() > 0) else outputs * 2


def test_modules_that_cannot_be_batched_are_told_apart() -> None:
    x, _ = rows("Categorical")
    assert not vmap_takes(Network(DataDependent().double(), caveat.Categorical()), x)
    assert vmap_takes(Network(mlp("Categorical"), caveat.Categorical()), x)
    assert_density_is_that_of_the_definition(Task(DataDependent().double(), rows("Categorical"), caveat.Categorical()))


STACKS = {
    "tanh": lambda width: nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, width)),
    "deep": lambda width: nn.Sequential(
        nn.Flatten(), nn.Linear(4, 5), nn.SiLU(), nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, width)
    ),
    "linear": lambda width: nn.Sequential(nn.Linear(4, width)),
}


@pytest.mark.parametrize("stack", STACKS)
@pytest.mark.parametrize("likelihood", WIDTH)
def test_backpropagation_written_out_is_that_of_autograd(stack: str, likelihood: str) -> None:
    torch.manual_seed(0)
    task = Task(STACKS[stack](WIDTH[likelihood]).double(), rows(likelihood), getattr(caveat, likelihood)())
    coordinates = Coordinates.of(task.network, task.hyper)
    slow, fast = (LogPosterior(task.network, coordinates, 1, task.hyper) for _ in range(2))
    assert LogPosterior.can_use_perceptron(task.network, task.train)
    fast.use_perceptron(task.train)
    assert fast._labels_only is (likelihood == "Categorical")
    position = torch.randn(1, coordinates.size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    pieces = RowPieces(task.train, task.network).part()
    for times in (1.0, 2.5):
        for one, other in zip(
            slow.gradient(position, pieces, likelihood_weight=times),
            fast.gradient(position, pieces, likelihood_weight=times),
            strict=True,
        ):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("likelihood", WIDTH)
def test_chains_that_go_through_together_are_as_alone(likelihood: str) -> None:
    torch.manual_seed(0)
    x, y = (t.float() if t.is_floating_point() else t for t in rows(likelihood))
    task = Task(STACKS["deep"](WIDTH[likelihood]), (x, y), getattr(caveat, likelihood)())
    coordinates = Coordinates.of(task.network, task.hyper)
    position, pieces = torch.randn(3, coordinates.size), RowPieces(task.train, task.network).part()
    together, alone = (
        LogPosterior(task.network, coordinates, 3, task.hyper),
        LogPosterior(task.network, coordinates, 1, task.hyper),
    )
    together.use_perceptron(task.train)
    alone.use_perceptron(task.train)
    values, gradients = together.gradient(position, pieces)
    densities = together.log_likelihood(position, pieces)
    for i in range(3):
        value, gradient = alone.gradient(position[i : i + 1], pieces)
        torch.testing.assert_close(value[0], values[i], rtol=1e-6, atol=0)
        torch.testing.assert_close(gradient[0], gradients[i], rtol=1e-5, atol=1e-5)
        density = alone.log_likelihood(position[i : i + 1], pieces)[0]
        torch.testing.assert_close(density, densities[i], rtol=1e-6, atol=0)


def test_what_is_not_a_plain_stack_is_left_to_autograd() -> None:
    shared = nn.Linear(4, 4)
    hooked = nn.Sequential(nn.Linear(4, 3))
    hooked[0].register_forward_hook(lambda *_: None)
    for module in (
        nn.Sequential(shared, nn.Tanh(), shared),
        nn.Sequential(nn.Linear(4, 3), nn.GELU()),
        nn.Sequential(nn.Linear(4, 3, bias=False)),
        nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)),
        hooked,
    ):
        task = Task(module.double(), rows("Categorical"), caveat.Categorical())
        assert not LogPosterior.can_use_perceptron(task.network, task.train)
    x, y = rows("Categorical")
    for likelihood in (caveat.Categorical(ignore_index=2), caveat.Categorical(class_weights=(1.0, 2.0, 3.0))):
        task = Task(mlp("Categorical"), (x, y), likelihood)
        coordinates = Coordinates.of(task.network, task.hyper)
        slow, fast = (LogPosterior(task.network, coordinates, 1, task.hyper) for _ in range(2))
        fast.use_perceptron(task.train)
        assert not fast._labels_only
        position, pieces = (
            torch.ones(1, coordinates.size, dtype=torch.float64),
            RowPieces(task.train, task.network).part(),
        )
        for one, other in zip(slow.gradient(position, pieces), fast.gradient(position, pieces), strict=True):
            torch.testing.assert_close(one, other)
    frozen = mlp("Categorical")
    frozen[0].bias.requires_grad_(False)  # type: ignore[index, union-attr]
    task = Task(frozen, (x, y), caveat.Categorical())
    assert not LogPosterior.can_use_perceptron(task.network, task.train)


def test_functions_count_in_the_size_of_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 1000)), nn.Parameter(torch.randn(1000, 3))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x @ self.a) @ self.b

    monkeypatch.setitem(target._ACTIVATION_BYTES, "cpu", 100_000)
    x, y = torch.randn(300, 4), torch.randint(3, (300,))
    network = Network(Bare(), caveat.Categorical())
    pieces = list(RowPieces(Task(Bare(), (x, y), caveat.Categorical()).train, network).part())
    assert 5 < len(pieces[0][1]) < 30  # some 4 or 8 kB a row
    with pytest.raises(ValueError, match=r"need weights of float32 or float64, these are torch\.bfloat16"):
        Coordinates.of(Network(Bare().bfloat16(), caveat.Categorical()), {})


def test_every_fit_has_a_compiled_pass_however_many_there_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch gives up on a piece of code that it has compiled eight times."""
    compiled, graphs = torch.compile, []

    def backend(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", lambda function, **how: compiled(function, backend=backend))
    x, y = rows("Categorical")
    for fits in range(1, 11):
        network = Network(mlp("Categorical"), caveat.Categorical())
        log_likelihood = log_likelihood_of(network, PassSettings(compile=True), rows=len(x))
        for _ in range(2):  # of two chains
            log_likelihood({name: w.requires_grad_() for name, w in network.params().items()}, {}, x, y)
        assert len(graphs) == fits
