"""A task reads every kind of data, each row once, and scales batches so that they are unbiased for the whole."""

from collections import UserDict

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    IterableDataset,
    Subset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

from caveat import Bernoulli, Categorical, EmpCovPrior, Gaussian, GaussianPrior, LaplacePrior, Task
from caveat.batches import tensors
from caveat.rows import Rows

N = 13


def data(n: int = N, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(1), dtype=dtype)
    return x, torch.arange(n) % 3


def linear(dtype: torch.dtype = torch.float32) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)


def task(rows, likelihood=None, **options) -> Task:
    return Task(options.pop("model", None) or linear(), rows, likelihood or Categorical(), **options)


class Lazy(Dataset):
    """Rows read one by one, as from files."""

    def __init__(self, n: int = N) -> None:
        self.x, self.y = data(n)
        self.read: list[int] = []

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        self.read.append(i)
        return self.x[i], int(self.y[i])


class Plain:
    """Map-style without torch's base class, as in other libraries."""

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> dict:
        return {"x": data()[0][i], "labels": int(data()[1][i])}


class Augmented(Lazy):
    """Noise drawn from the global random state each time a row is read."""

    def __getitem__(self, i: int) -> tuple[Tensor, int]:
        return self.x[i] + torch.rand(4), int(self.y[i])


class Stream(IterableDataset):
    def __iter__(self):
        yield from zip(*data(), strict=True)


class Named(nn.Module):
    """Takes its inputs by name or by position."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x: Tensor, shift: Tensor | None = None) -> Tensor:
        return self.layer(x if shift is None else x + shift)


def as_dict(rows: list[tuple[Tensor, Tensor]]) -> dict:
    return {"x": torch.stack([x for x, _ in rows]), "labels": torch.tensor([int(y) for _, y in rows])}


def every_kind() -> dict:
    x, y = data()
    pair = TensorDataset(x, y)
    padded = TensorDataset(torch.cat([x[:2], x]), torch.cat([y[:2], y]))
    return {
        "pair": (x, y),
        "dataset": pair,
        "loader": DataLoader(pair, 5),
        "shuffled loader": DataLoader(pair, 5, shuffle=True, drop_last=True),
        "lazy": Lazy(),
        "lazy loader": DataLoader(Lazy(), 4, shuffle=True),
        "list": list(zip(x, y, strict=True)),
        "subset": Subset(padded, range(2, N + 2)),
        "subset of subset": Subset(Subset(padded, list(range(1, N + 2))), torch.arange(1, N + 1)),
        "subset sampler": DataLoader(padded, 4, sampler=SubsetRandomSampler([*range(N + 1, 1, -1)])),
        "batch sampler": DataLoader(pair, batch_sampler=BatchSampler(SubsetRandomSampler(range(N)), 4, False)),
        "dict batches": DataLoader(pair, 4, collate_fn=as_dict),
        "mapping batches": DataLoader(Lazy(), 4, collate_fn=lambda rows: UserDict(as_dict(rows))),
        "other library": DataLoader(Plain(), 4, shuffle=True),
        "worker": DataLoader(Lazy(), 4, num_workers=1),
    }


@pytest.mark.parametrize("kind", every_kind())
def test_every_kind_of_data_gives_each_row_once_in_order(kind: str) -> None:
    (x, y), model, rows = data(), Named(), every_kind()[kind]
    state = torch.get_rng_state()
    made = task(rows, model=model)
    assert made.n == N
    read = list(made.train.ordered())
    assert torch.equal(torch.cat([targets for _, targets in read]), y)
    assert torch.equal(torch.cat([tensors(inputs)[0] for inputs, _ in read]), x)
    inputs, targets = made.train.everything()
    assert torch.equal(tensors(inputs)[0], x)
    assert torch.equal(targets, y)
    assert made.warnings == []
    picked, targets = next(made.train.batches([torch.tensor([7, 2, 7])]))
    assert torch.equal(tensors(picked)[0], x[[7, 2, 7]])
    assert torch.equal(targets, y[[7, 2, 7]])
    assert made.fingerprint() == task(rows, model=model).fingerprint()
    assert torch.equal(torch.get_rng_state(), state)


def test_batch_size_is_the_loaders() -> None:
    kinds = every_kind()
    assert [len(y) for _, y in task(kinds["loader"]).train.ordered()] == [5, 5, 3]
    assert [len(y) for _, y in task(kinds["loader"]).train.ordered(size=6)] == [6, 6, 1]
    assert Rows(kinds["batch sampler"]).batch_size == 4
    assert Rows(kinds["pair"]).batch_size == 128


def test_tensors_are_read_at_once_unless_the_loader_collates_them() -> None:
    kinds = every_kind()
    assert {kind for kind, rows in kinds.items() if Rows(rows).in_memory} == {
        "pair",
        "dataset",
        "loader",
        "shuffled loader",
        "subset",
        "subset of subset",
        "subset sampler",
        "batch sampler",
    }


def test_several_inputs() -> None:
    x, y = data()
    shift = x.flip(0)
    for rows in (
        (x, shift, y),
        DataLoader(TensorDataset(x, shift, y), 4),
        [((x[i], shift[i]), y[i]) for i in range(N)],
    ):
        made = task(rows, model=Named())
        (inputs, targets), model = next(made.train.ordered(N)), made.network
        assert isinstance(inputs, tuple)
        assert torch.equal(targets, y)
        expected = nn.functional.linear(x + shift, model.params()["layer.weight"], model.params()["layer.bias"])
        torch.testing.assert_close(model(model.params(), inputs), expected)


def test_rows_padded_by_the_batch_are_read() -> None:
    """Sequences of different lengths, padded to the longest of their batch, as text is."""
    lengths = [2, 5, 3, 7, 1, 4]
    sequences = [(torch.ones(n), n % 2) for n in lengths]

    def pad(rows: list) -> dict:
        padded = nn.utils.rnn.pad_sequence([x for x, _ in rows], batch_first=True)
        return {"x": padded, "labels": torch.tensor([y for _, y in rows])}

    class Pool(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(1, 2)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x.sum(1, keepdim=True))

    made = task(DataLoader(sequences, 2, collate_fn=pad), model=Pool())
    assert [tuple(x["x"].shape) for x, _ in made.train.ordered()] == [(2, 5), (2, 7), (2, 4)]
    assert made.warnings == []


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        (lambda x, y: DataLoader(TensorDataset(x, y), 4, sampler=WeightedRandomSampler([1.0] * N, N)), "Subset of it"),
        (
            lambda x, y: DataLoader(TensorDataset(x, y), 4, sampler=torch.utils.data.RandomSampler(x, True)),
            "each row once",
        ),
        (lambda x, y: DataLoader(TensorDataset(x, y), batch_sampler=[[0, 0], [1, 2]]), "the loader's list weights"),
        (lambda x, y: DataLoader(TensorDataset(x, y), sampler=torch.utils.data.SequentialSampler(x[:3])), "leaves out"),
        (lambda x, y: DataLoader(TensorDataset(x, y), batch_size=None), "whole batches.*with a batch size"),
        (lambda x, y: Stream(), r"Stream, which cannot be read by index.*list\(iterable\)"),
        (lambda x, y: DataLoader(Stream(), 4), r"Stream, which cannot be read by index.*list\(iterable\)"),
        (lambda x, y: (x.numpy(), y.numpy()), "a tuple of numpy arrays.*torch.from_numpy"),
        (lambda x, y: x, "the data is a Tensor.*a pair of tensors"),
        (lambda x, y: 3, "the data is a int"),
        (lambda x, y: (x, y[:-1]), r"\[13, 12\] rows"),
        (lambda x, y: (x[:0], y[:0]), "empty"),
        (lambda x, y: DataLoader(TensorDataset(x[:0], y[:0]), 4), "empty"),
        (lambda x, y: DataLoader(TensorDataset(x, y), sampler=SubsetRandomSampler([])), "empty"),
        (lambda x, y: [], "empty"),
        (lambda x, y: (x,), "without targets.*pairs"),
        (lambda x, y: DataLoader(TensorDataset(x), 4), "without targets.*pairs"),
        (
            lambda x, y: DataLoader(TensorDataset(x, y), collate_fn=lambda r: {"x": as_dict(r)["x"]}),
            "name them one of labels",
        ),
        (
            lambda x, y: DataLoader(TensorDataset(x, y), 4, collate_fn=lambda r: (as_dict(r)["x"], y[:1])),
            "came with targets",
        ),
        (lambda x, y: [(row, "cat") for row in x], "makes no tensor"),
        (
            lambda x, y: (x, y.float()),
            "training data do not fit: Categorical needs integer class labels, got torch.float32",
        ),
        (lambda x, y: (x, y + 1), "labels run from 1 to 3, but the network has 3 outputs"),
        (lambda x, y: (x, y - 1), "labels run from -1 to 1"),
        (lambda x, y: (x.double(), y), "inputs are torch.float64 but"),
        (lambda x, y: (x[:, :3], y), r"could not take the first training rows \(inputs \[\(2, 3\)\]\)"),
        (lambda x, y: (x, y[:, None]), "need labels of shape"),
    ],
)
def test_data_that_cannot_be_used_are_refused(rows, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        task(rows(*data()))


def test_a_data_set_without_length_is_refused() -> None:
    class Endless(Dataset):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return data()[0][i], 0

    with pytest.raises(ValueError, match="Endless has no length: give it __len__"):
        Rows(Endless())


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_inputs_that_are_not_finite_are_found_before_training(value: float) -> None:
    x, y = data()
    x[9, 2] = value
    lazy = Lazy()
    lazy.x = x
    for rows in ((x, y), lazy, DataLoader(lazy, 4), Subset(TensorDataset(x, y), range(3, N))):
        with pytest.raises(ValueError, match=r"training data.*NaN or infinity, first in row 9: clean or impute"):
            task(rows)
    clean = data()
    with pytest.raises(ValueError, match=r"validation data.*row 9"):
        task(clean, validation=(x, y))


def test_networks_that_cannot_be_used_are_refused() -> None:
    x, y = data()

    class Shaped(nn.Module):
        def __init__(self, make) -> None:
            super().__init__()
            self.layer, self.make = nn.Linear(4, 3), make

        def forward(self, x: Tensor) -> Tensor:
            return self.make(self.layer(x))

    for make, said in (
        (lambda out: out.mean(), "are not one for each row"),
        (lambda out: torch.cat([out, out]), r"outputs \(4, 3\) for inputs \[\(2, 4\)\] are not one for each row"),
        (lambda out: out * float("nan"), "are NaN"),
        (lambda out: out["logits"], "could not take the first training rows"),
        (lambda out: (out, out), "must return one tensor"),
    ):
        with pytest.raises(ValueError, match=said):
            task((x, y), model=Shaped(make))
    in_place = nn.Sequential(nn.ReLU(inplace=True), nn.Linear(4, 3))
    with pytest.raises(ValueError, match="changes its inputs in place"):
        task((x, y), model=in_place)
    task((x, y), model=nn.Sequential(nn.Linear(4, 3), nn.ReLU(inplace=True), nn.Linear(3, 3)))


def test_one_row_is_enough() -> None:
    x, y = data(1)
    made = task((x, y))
    assert made.n == 1
    assert [len(targets) for _, targets in made.train.ordered()] == [1]


def test_validation_share_is_disjoint_complete_and_repeatable() -> None:
    kinds = every_kind()
    made = task(kinds["loader"], validation=0.3)
    assert made.validation is not None
    train, held_out = made.train.indices.tolist(), made.validation.indices.tolist()
    assert len(held_out) == 4  # round(0.3 * 13)
    assert made.n == 9
    assert sorted(train + held_out) == list(range(N))
    torch.manual_seed(12345)
    again = task(kinds["loader"], validation=0.3)
    assert again.train.indices.tolist() == train
    assert again.validation is not None
    assert again.validation.indices.tolist() == held_out
    assert task(kinds["loader"], validation=0.3, split_seed=1).train.indices.tolist() != train
    rows = torch.cat([y for _, y in made.validation.ordered()])
    assert torch.equal(rows, data()[1][held_out])
    with pytest.raises(ValueError, match=r"validation=0\.01 of 13 rows: must be above 0 and below 1"):
        task(kinds["loader"], validation=0.01)
    with pytest.raises(ValueError, match="leave rows on both sides"):
        task(kinds["loader"], validation=1.0)


def test_validation_data_of_their_own() -> None:
    x, y = data(6)
    made = task(data(), validation=DataLoader(TensorDataset(x, y), 4))
    assert made.n == N
    assert made.validation is not None
    assert len(made.validation) == 6
    with pytest.raises(ValueError, match="validation data do not fit: labels run from 1 to 3"):
        task(data(), validation=(x, y + 1))


def exact(made: Task, params: dict, hyper: dict) -> Tensor:
    """log p(D, theta) by a plain sum over rows, in float64."""
    x, y = made.train.everything()
    log_likelihood = sum(
        made.network.likelihood.log_prob(made.network(params, x[i : i + 1]), y[i : i + 1], hyper) for i in range(len(y))
    )
    return log_likelihood.sum() + made.network.prior.log_prob(params)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(), Bernoulli()])
def test_log_joint_is_unbiased_and_exact_on_the_whole(likelihood) -> None:
    n = 12
    x, y = data(n, torch.float64)
    targets = y if isinstance(likelihood, Categorical) else torch.stack([y % 2, y // 2, y * 0], 1).double()
    made = Task(linear(torch.float64), (x, targets), likelihood, LaplacePrior(0.7))
    params, hyper = made.network.params(), made.hyper
    whole = exact(made, params, hyper)
    estimates = [made.log_joint(made.network(params, a), b, params, hyper) for a, b in made.train.ordered(4)]
    assert len(estimates) == 3
    torch.testing.assert_close(torch.stack(estimates).mean(), whole, rtol=1e-12, atol=0)
    everything = made.log_joint(made.network(params, x), targets, params, hyper)
    torch.testing.assert_close(everything, whole, rtol=1e-12, atol=0)
    mean = made.log_likelihood(made.network, params, hyper)
    prior = made.network.prior.log_prob(params)
    assert mean.dtype == torch.float64
    torch.testing.assert_close(n * mean + prior, whole, rtol=1e-12, atol=0)


def test_unequal_batches_are_unbiased_when_weighted_by_their_rows() -> None:
    made = Task(linear(torch.float64), data(N, torch.float64), Categorical())
    params = made.network.params()
    batches = list(made.train.ordered(5))  # 5, 5 and a partial batch of 3
    estimates = torch.stack([made.log_joint(made.network(params, x), y, params, {}) for x, y in batches])
    weights = torch.tensor([len(y) / N for _, y in batches], dtype=torch.float64)
    torch.testing.assert_close((weights * estimates).sum(), exact(made, params, {}), rtol=1e-12, atol=0)


def test_parts_of_a_batch_on_two_ranks_sum_to_the_batch() -> None:
    made = Task(linear(torch.float64), data(N, torch.float64), Categorical(), GaussianPrior(3.0))
    params = {name: p.requires_grad_() for name, p in made.network.params().items()}
    (x, y) = next(made.train.ordered(5))
    whole = made.log_joint(made.network(params, x), y, params, {})
    gradients = torch.autograd.grad(whole, list(params.values()))
    parts = [
        made.log_joint(made.network(params, a), b, params, {}, batch_rows=5, share=0.5)
        for a, b in zip(x.tensor_split(2), y.tensor_split(2), strict=True)
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole, rtol=1e-12, atol=0)
    for part, gradient in zip(torch.autograd.grad(parts[0] + parts[1], list(params.values())), gradients, strict=True):
        torch.testing.assert_close(part, gradient, rtol=1e-12, atol=1e-12)
    empty = made.log_joint(made.network(params, x[:0]), y[:0], params, {}, batch_rows=5, share=0.0)
    assert float(empty.detach()) == 0.0


def test_log_joint_counts_the_prior_of_selected_parameters_only() -> None:
    made = Task(linear(torch.float64), data(N, torch.float64), Categorical(), parameters="2.*")
    params = made.network.params() | {"0.weight": torch.full((5, 4), 100.0, dtype=torch.float64)}
    x, y = made.train.everything()
    outputs = made.network(params, x)
    value = made.log_joint(outputs, y, params, {})
    prior = GaussianPrior().log_prob(made.network.params())
    torch.testing.assert_close(value, Categorical().log_prob(outputs, y, {}).sum() + prior, rtol=1e-12, atol=0)


def test_log_likelihood_of_given_rows_even_of_none() -> None:
    made = task(data(), validation=0.3)
    params = made.network.params()
    assert made.validation is not None
    x, y = made.validation.everything()
    expected = Categorical().log_prob(made.network(params, x), y, {}).mean()
    torch.testing.assert_close(made.log_likelihood(made.network, params, {}, made.validation), expected.double())
    none = made.log_likelihood(made.network, params, {}, made.train.part(torch.arange(0)))
    assert bool(none.isnan())  # and not the mean over the training rows


def test_fitted_hyper_is_the_noise_of_the_residuals() -> None:
    x, _ = data(N, torch.float64)
    y = x[:, :3] * 2
    made = Task(linear(torch.float64), DataLoader(TensorDataset(x, y), 4), Gaussian())
    params = made.network.params()
    residuals = made.network(params, x) - y
    fitted = made.fitted_hyper(made.network, params)
    torch.testing.assert_close(fitted["log_noise"].exp() ** 2, residuals.square().mean(0), rtol=1e-10, atol=0)
    torch.testing.assert_close(made.hyper["log_noise"].exp(), y.std(0, correction=0), rtol=1e-10, atol=0)
    assert task(data()).fitted_hyper(made.network, params) == {}


def test_baseline_is_what_ignoring_the_inputs_gives() -> None:
    y = data()[1]
    share = torch.bincount(y).double() / N
    assert task(data()).baseline == pytest.approx(float((share * share.log()).sum()))


@pytest.mark.parametrize("workers", [0, 1])
def test_augmentation_inside_the_data_set_is_warned_of(workers: int) -> None:
    state = torch.get_rng_state()
    made = task(DataLoader(Augmented(), 4, num_workers=workers))
    assert torch.equal(torch.get_rng_state(), state)
    (warning,) = made.warnings
    assert "differ each time they are read" in warning
    assert "augment=" in warning
    assert made.train.fingerprint() == made.train.fingerprint()
    assert torch.equal(torch.get_rng_state(), state)


def test_augmentation_in_workers_changes_with_the_seed_of_an_epoch() -> None:
    rows = Rows(DataLoader(Augmented(), N, num_workers=1))

    def epoch(seed: int) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return next(rows.ordered())[0]

    assert torch.equal(epoch(0), epoch(0))
    assert not torch.equal(epoch(0), epoch(1))


def test_large_lazy_data_are_sampled_for_checks() -> None:
    class Many(Dataset):
        def __init__(self) -> None:
            self.read: set[int] = set()

        def __len__(self) -> int:
            return 2**24 + 4  # more than float32 counts

        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            self.read.add(i)
            return torch.zeros(1), 0

    many = Many()
    made = task(DataLoader(many, 5000), model=nn.Linear(1, 2))
    made.train.fingerprint()
    assert min(many.read) == 0
    assert max(many.read) == 2**24 + 3
    assert 10_000 <= len(many.read) <= 10_020


def test_fingerprint_tells_tasks_apart() -> None:
    x, y = data()
    changed = x.clone()
    changed[0, 0] += 1
    original = task((x, y)).fingerprint()
    for key, other in (
        ("data", task((changed, y))),
        ("data", task((x, y.int()))),
        ("data", task((x[:-1], y[:-1]))),
        ("prior", task((x, y), prior=GaussianPrior(2.0))),
        ("prior", task((x, y), prior=LaplacePrior(1.0))),
        ("likelihood", task((x, y), Categorical(class_weights=(1.0, 2.0, 3.0)))),
        ("network", task((x, y), parameters="0.*")),
    ):
        found = other.fingerprint()
        assert [name for name in original if found[name] != original[name]] == [key]
    split = [task((x, y), validation=0.3, split_seed=seed).fingerprint() for seed in (0, 1)]
    assert split[0]["validation"] != split[1]["validation"]
    covariances = [EmpCovPrior("0.weight", scale * torch.eye(4)) for scale in (1.0, 2.0)]
    assert len({task((x, y), prior=prior).fingerprint()["prior"] for prior in covariances}) == 2


def test_fingerprint_takes_any_type_and_any_prior() -> None:
    x, y = data()
    made = Task(linear(torch.bfloat16), (x.bfloat16(), y), Categorical())
    assert made.fingerprint()["data"] == made.fingerprint()["data"]

    class Own:
        def log_prob(self, params: dict) -> Tensor:
            return torch.zeros(())

        def sample(self, like: dict, rng: torch.Generator) -> dict:
            return like

    assert task((x, y), prior=Own()).fingerprint()["prior"] == "Own"


def test_parts_and_rows_without_targets() -> None:
    x, y = data()
    part = Rows((x, y)).part(torch.tensor([4, 1]))
    assert torch.equal(next(part.ordered())[0], x[[4, 1]])
    assert torch.equal(part.part(torch.tensor([1])).indices, torch.tensor([1]))
    for rows in (DataLoader(TensorDataset(x), 4), (x,), list(x)):
        blind = Rows(rows, needs_targets=False)
        inputs, targets = blind.everything()
        assert torch.equal(inputs, x)
        assert len(targets) == N
    assert Rows((x, y)).on(torch.device("cpu")).in_memory


def test_in_memory_inputs_are_looked_at_once() -> None:
    x, y = data()
    made = task((x, y), validation=0.3)
    assert made.validation is not None
    assert made.train.known_finite
    assert made.validation.known_finite
    assert not task(Lazy()).train.known_finite
