"""Every kind of data is read: each row once, in order, as its loader would give it."""

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
    WeightedRandomSampler,
)

import caveat
from caveat import rows as rows_module
from caveat.batches import tensors
from caveat.engine import cost
from caveat.rows import Rows, free_of_gpu
from tests.task_data import Augmented, Lazy, N, Named, Stream, as_dict, data, every_kind, task


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
        "arrays",
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
        (
            lambda x, y: DataLoader(TensorDataset(x, y), 4, sampler=WeightedRandomSampler([1.0] * N, N)),
            "would count as two observations",
        ),
        (
            lambda x, y: DataLoader(TensorDataset(x, y), 4, sampler=torch.utils.data.RandomSampler(x, True)),
            "each row once",
        ),
        (lambda x, y: DataLoader(TensorDataset(x, y), batch_sampler=[[0, 0], [1, 2]]), "the loader's list weights"),
        (lambda x, y: DataLoader(TensorDataset(x, y), sampler=torch.utils.data.SequentialSampler(x[:3])), "leaves out"),
        (lambda x, y: DataLoader(TensorDataset(x, y), batch_size=None), "whole batches.*with a batch size"),
        (lambda x, y: DataLoader(Stream(), batch_size=None), "whole batches.*with a batch size"),
        (lambda x, y: (x.numpy(), y.numpy().astype(str)), r"targets are words \('\d'.*Categorical\(names="),
        (lambda x, y: (x.numpy().astype(str), y.numpy()), r"an array of <U\d+, and numbers are needed"),
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
        (lambda x, y: [(row, "cat") for row in x], r"targets are words \('cat'\).*give each row classes.index"),
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


@pytest.mark.parametrize("limit", ["MOST_STREAMED", "MOST_STREAMED_BYTES"])
def test_a_stream_without_end_is_refused_where_memory_would_be(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Endless(IterableDataset):
        def __iter__(self):
            while True:
                yield torch.ones(4), 0

    monkeypatch.setattr(rows_module, limit, 20 if limit == "MOST_STREAMED" else 20 * 16)
    for endless in (Endless(), DataLoader(Endless(), 4)):
        with pytest.raises(ValueError, match=r"stream Endless has more than 20 rows.*has not ended.*list\(stream\)"):
            Rows(endless)


def test_a_stream_is_evaluated_and_predicted() -> None:
    posterior = caveat.fit(task(data()), caveat.MAP(training=caveat.Training(epochs=0)), progress=False)
    whole, stream = (caveat.evaluate(posterior, {"all": rows}) for rows in (data(), DataLoader(Stream(), 5)))
    assert whole["all"].metrics == stream["all"].metrics
    loader = DataLoader(Stream(), 5)
    assert torch.equal(posterior.predict(loader).probs, posterior.predict(data()[0]).probs)


def test_words_are_targets_where_the_likelihood_names_the_classes(tmp_path) -> None:
    x, y = data()
    names = ["left", "right", "above"]  # not in the order of the alphabet
    words = [names[label] for label in y]
    likelihood = caveat.Categorical(names=names)
    by_number = caveat.Task(Named(), (x, y), caveat.Categorical(), validation=0.3)
    kinds = [
        list(zip(x, words, strict=True)),
        [{"x": row, "label": word} for row, word in zip(x, words, strict=True)],
        (x.numpy(), numpy.array(words)),
        DataLoader(list(zip(x, words, strict=True)), 4),
    ]
    for kind in kinds:
        made = caveat.Task(Named(), kind, likelihood, validation=0.3)
        assert torch.equal(made.train.targets(), by_number.train.targets())
        assert torch.equal(made.validation.targets(), by_number.validation.targets())
    fitted = caveat.fit(caveat.Task(Named(), kinds[0], likelihood), caveat.MAP(training=caveat.Training(epochs=0)),
                        progress=False)  # fmt: skip
    posterior = caveat.load(fitted.save(tmp_path / "posterior"), Named())
    assert posterior.network.likelihood.names == tuple(names)
    found = caveat.evaluate(posterior, {"words": kinds[0], "numbers": (x, y)}, folder=tmp_path / "scores")
    assert found["words"].metrics == found["numbers"].metrics
    assert found.content["class_names"] == names
    assert posterior.calibrate(kinds[1]).predict(x).label_set(0.9).shape == (N, 3)
    with pytest.raises(ValueError, match=r"target 'below' is no class of.*add it there"):
        caveat.Task(Named(), [(row, "below") for row in x], likelihood)
    with pytest.raises(ValueError, match="has 2 names, but the network has 3 outputs"):
        caveat.Task(Named(), (x, y), caveat.Categorical(names=names[:2]))
    with pytest.raises(ValueError, match="two different words or more"):
        caveat.Categorical(names=["a", "a"])


def test_a_data_set_without_length_is_refused() -> None:
    class Endless(Dataset):
        def __getitem__(self, i: int) -> tuple[Tensor, int]:
            return data()[0][i], 0

    with pytest.raises(ValueError, match="Endless has no length: give it __len__"):
        Rows(Endless())


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


def test_what_torch_keeps_of_a_gpu_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (10, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 80)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 30)
    assert free_of_gpu(torch.device("cuda")) == cost.free_bytes(torch.device("cuda")) == 60
