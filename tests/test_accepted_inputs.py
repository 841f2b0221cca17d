"""What people hand over, taken as they mean it: tokenizers' mappings, arrays, samplers, dicts, coarse frozen bases."""

from collections import UserDict
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, jacrev
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset, WeightedRandomSampler

import caveat
from caveat.rows import Rows

POINT = caveat.MAP(training=caveat.Training(epochs=2))


def rows(n: int = 24) -> tuple[Tensor, Tensor]:
    x = torch.randn(n, 4, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def fitted(module: nn.Module, data, method: caveat.Method = POINT, **options) -> caveat.Posterior:
    return caveat.fit(caveat.Task(module, data, caveat.Categorical(), **options), method, progress=False)


class ByName(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, values: Tensor, scale: Tensor) -> Tensor:
        return self.layer(values) * scale.unsqueeze(-1)


class Whole(ByName):
    """Takes its batch as one dict."""

    def forward(self, batch: dict[str, Tensor]) -> Tensor:  # type: ignore[override]
        return super().forward(batch["values"], batch["scale"])


class Dicts(Dataset):
    def __len__(self) -> int:
        return 24

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        x, y = rows()
        return {"values": x[row], "scale": torch.tensor(1.0 + row), "labels": y[row]}


def test_any_mapping_is_predicted_as_the_dict_that_it_holds() -> None:
    x, _ = rows()
    posterior = fitted(ByName(), Dicts())
    given = {"values": x, "scale": torch.ones(24)}
    assert torch.equal(posterior.predict(UserDict(given)).probs, posterior.predict(given).probs)
    with pytest.raises(TypeError, match=r"not a UserDict of other things: call the tokenizer with return_tensors='pt'"):
        posterior.predict(UserDict({"values": [[1, 2], [3]]}))


def test_what_a_tokenizer_returns_is_predicted() -> None:
    transformers = pytest.importorskip("transformers", reason="needs transformers")
    x, _ = rows()
    posterior = fitted(ByName(), Dicts())
    given = {"values": x, "scale": torch.ones(24)}
    found = posterior.predict(transformers.BatchEncoding(given)).probs
    assert torch.equal(found, posterior.predict(given).probs)


def test_texts_in_the_place_of_tokens_are_answered_with_the_call_that_makes_them() -> None:
    posterior = fitted(ByName(), Dicts())
    for texts in ("a film", ["a film", "a book"]):
        with pytest.raises(TypeError, match=r"not a (str|list): give what the tokenizer makes.*padding=True"):
            posterior.predict(texts)


def test_a_dict_that_forward_takes_whole_is_passed_whole(tmp_path) -> None:
    torch.manual_seed(0)
    module = Whole()
    posterior = fitted(module, Dicts(), caveat.MAP(training=caveat.Training(epochs=0)))
    x, _ = rows()
    given = {"values": x, "scale": torch.full((24,), 2.0)}
    torch.testing.assert_close(posterior.predict(given).probs, (2 * module.layer(x)).softmax(-1).detach())
    trained = fitted(Whole(), Dicts(), caveat.MAP(training=caveat.Training(epochs=2)))
    trained.save(tmp_path / "posterior")
    assert torch.equal(caveat.load(tmp_path / "posterior", Whole()).predict(given).probs, trained.predict(given).probs)


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_arrays_are_predicted_in_the_weights_type(dtype: type) -> None:
    x, y = rows()
    posterior = fitted(nn.Linear(4, 3), (x, y))
    array = x.numpy().astype(dtype)
    assert torch.equal(posterior.predict(array).probs, posterior.predict(x).probs)
    assert torch.equal(posterior.predict(np.asfortranarray(array)[::-1]).probs, posterior.predict(x.flip(0)).probs)
    named = fitted(ByName(), Dicts())
    given = {"values": x, "scale": torch.ones(24)}
    found = named.predict({"values": array, "scale": np.ones(24)}).probs
    assert torch.equal(found, named.predict(given).probs)


class ByLength(Sampler):
    """Every row once, in a random order that puts like with like, as LengthGroupedSampler does."""

    def __init__(self, n: int, generator: torch.Generator | None = None) -> None:
        self.n, self.generator = n, generator

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(self.n, generator=self.generator).tolist())


class Twice(ByLength):
    def __iter__(self) -> Iterator[int]:
        return iter([0, *range(1, self.n - 1), 0])


class Endless(ByLength):
    def __iter__(self) -> Iterator[int]:
        while True:
            yield from super().__iter__()


class Batches(ByLength):
    """A sampler of batches, of lengths of their own."""

    def __iter__(self) -> Iterator[list[int]]:
        order = list(super().__iter__())
        return iter([order[:5], order[5:7], order[7:]])


def test_samplers_that_take_each_row_once_stand_for_all_rows() -> None:
    x, y = rows()
    data, generator = TensorDataset(x, y), torch.Generator().manual_seed(3)
    own, ours = generator.get_state(), torch.get_rng_state()
    for loader in (
        DataLoader(data, 5, sampler=ByLength(24, generator)),
        DataLoader(data, 5, sampler=ByLength(24)),
        DataLoader(data, batch_sampler=Batches(24)),
    ):
        inputs, targets = Rows(loader).everything()
        assert torch.equal(inputs, x)
        assert torch.equal(targets, y)
    assert torch.equal(generator.get_state(), own), "the sampler's own random numbers are put back"
    assert torch.equal(torch.get_rng_state(), ours)
    for sampler in (Twice(24), Endless(24), ByLength(23), ByLength(25)):
        with pytest.raises(ValueError, match=f"{type(sampler).__name__} weights, repeats or leaves out rows"):
            Rows(DataLoader(data, 5, sampler=sampler))


class Remembering(nn.Module):
    """Keeps activations of its last pass, one by itself and others in containers."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.last: Tensor | None = None
        self.features: dict[str, list[Tensor]] = {}

    def forward(self, x: Tensor) -> Tensor:
        self.last = self.layer(x)
        self.features = {"layer": [self.last * 2]}
        return self.last


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")  # it is in many networks still
def test_modules_that_hold_activations_are_fitted_and_loaded(tmp_path) -> None:
    x, y = rows()
    for number, build in enumerate((Remembering, lambda: torch.nn.utils.weight_norm(nn.Linear(4, 3)))):
        module = build()
        module(x)
        posterior = fitted(module, (x, y), caveat.MAP(training=caveat.Training(epochs=1)))
        posterior.save(tmp_path / str(number))
        other = build()
        other(x).sum()
        loaded = caveat.load(tmp_path / str(number), other)
        assert torch.equal(loaded.predict(x).probs, posterior.predict(x).probs)


class Adapted(nn.Module):
    """A frozen layer in bfloat16 and a low-rank one in float32 beside it, as peft puts them together."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).bfloat16().requires_grad_(False)
        self.down, self.up = nn.Linear(inputs, 2, bias=False), nn.Linear(2, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        base = self.base(x)
        return (base + self.up(self.down(x.float()))).to(base.dtype)


def test_laplace_over_float32_adapters_of_a_bfloat16_base_is_the_dense_one() -> None:
    torch.manual_seed(0)
    x, y = rows()
    module = nn.Sequential(Adapted(4, 8), nn.Tanh(), Adapted(8, 3))
    task = caveat.Task(module, (x.bfloat16(), y), caveat.Categorical())
    assert task.network.dtype == torch.float32
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=100, learning_rate=0.02)), progress=False)
    method = caveat.Laplace(structure="full", precision="given", skip=0)
    posterior = caveat.fit(task, method, start=point, progress=False)
    params = {name: point.state["params"][name] for name in task.network.names}
    jacobians = jacrev(lambda p: functional_call(module.eval(), p, x.bfloat16()).float())(params)
    J = torch.cat([jacobians[name].flatten(2) for name in params], 2).double()  # [N, 3, P]
    p = functional_call(module, params, x.bfloat16()).double().softmax(-1)
    fisher = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    precision = torch.einsum("ncp,ncd,ndq->pq", J, fisher, J) + torch.eye(J.shape[2], dtype=torch.float64)
    wanted = J @ precision.inverse() @ J.mT
    found = posterior.moments(x.bfloat16())[1].double()
    torch.testing.assert_close(found, wanted.detach(), rtol=0, atol=0.02 * float(wanted.detach().abs().max()))


def test_a_coarse_weight_among_those_selected_is_named() -> None:
    x, y = rows()
    module = nn.Sequential(Adapted(4, 8), nn.Tanh(), nn.Linear(8, 3).bfloat16())
    task = caveat.Task(module, (x.bfloat16(), y), caveat.Categorical())
    said = r"of those selected 2\.weight is torch\.bfloat16 \(2 of 4 tensors\): leave these out with parameters="
    for method in (caveat.Laplace(), caveat.SampledLaplace()):
        with pytest.raises(ValueError, match=said):
            caveat.fit(task, method, progress=False)
    point = caveat.MAP(training=caveat.Training(epochs=60, learning_rate=0.05))
    adapters = caveat.Task(module, (x.bfloat16(), y), caveat.Categorical(), parameters=["*.down.*", "*.up.*"])
    for method in (caveat.Laplace(), caveat.SampledLaplace(samples=2)):
        posterior = caveat.fit(adapters, method, start=point, progress=False)
        assert bool(posterior.predict(x.bfloat16()).probs.isfinite().all())


def test_words_as_targets_are_refused_with_what_to_do() -> None:
    x, _ = rows()
    with pytest.raises(ValueError, match=r"are words \('cat', 'dog'\).*Categorical\(names=sorted\(set\(labels\)\)\)"):
        caveat.Task(nn.Linear(4, 3), [(x[i], "dog" if i % 2 else "cat") for i in range(24)], caveat.Categorical())


def test_targets_padded_by_batch_are_refused_with_what_to_do() -> None:
    def padded(batch: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        x, y = (nn.utils.rnn.pad_sequence(list(part), batch_first=True) for part in zip(*batch, strict=True))
        return x, y

    tokens = [torch.arange(2 + row) % 5 for row in range(8)]
    loader = DataLoader([(row, row.flip(0)) for row in tokens], 2, collate_fn=padded)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"different shapes, \(3,\) and \(5,\).*pad all rows to one length"):
        caveat.Task(nn.Embedding(5, 5), loader, caveat.Categorical(class_axis=-1))


@pytest.mark.parametrize("left", [False, True])
def test_labels_of_tokens_padded_by_batch_are_those_of_one_width(left: bool) -> None:
    """As a collator for token classification gives them: padding has the label that counts for nothing."""
    rng = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 9, (2 + row % 5,), generator=rng) for row in range(24)]
    rows = [{"tokens": text.tolist(), "mask": [1] * len(text), "labels": (text > 4).long().tolist()} for text in texts]

    def padded(batch: list[dict[str, list[int]]]) -> dict[str, Tensor]:
        width = max(len(row["tokens"]) for row in batch)
        made = {}
        for name, empty in (("tokens", 0), ("mask", 0), ("labels", -100)):
            padding = [[empty] * (width - len(row[name])) for row in batch]
            pairs = zip(batch, padding, strict=True)
            made[name] = torch.tensor([more + row[name] if left else row[name] + more for row, more in pairs])
        for row in batch:
            row.clear()  # some collators take entries out of what they are given
        return made

    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
            return self.head(self.embed(tokens) * mask[..., None])

    torch.manual_seed(0)
    module = Tagger()

    class Fresh(Dataset):  # rows that a collator may empty
        def __len__(self) -> int:
            return len(rows)

        def __getitem__(self, row: int) -> dict[str, list[int]]:
            return dict(rows[row])

    by_batch = caveat.Task(module, DataLoader(Fresh(), 4, collate_fn=padded), caveat.Categorical(class_axis=-1))
    at_once = padded([dict(row) for row in rows])
    labels = at_once.pop("labels")
    whole = [{name: part[i] for name, part in at_once.items()} | {"labels": labels[i]} for i in range(24)]
    of_one_width = caveat.Task(module, DataLoader(whole, 4), caveat.Categorical(class_axis=-1))  # type: ignore[arg-type]
    assert torch.equal(by_batch.train.targets(), of_one_width.train.targets())
    point = caveat.MAP(training=caveat.Training(epochs=30, learning_rate=0.05))
    found = [caveat.fit(task, caveat.Laplace(), start=point, progress=False) for task in (by_batch, of_one_width)]
    x = {name: part[:3] for name, part in at_once.items()}
    assert torch.equal(found[0].predict(x).probs, found[1].predict(x).probs)
    scores = caveat.evaluate(found[0], {"again": DataLoader(Fresh(), 5, collate_fn=padded)})
    assert scores["again"]["accuracy"].mean > 0.9


def test_loaders_that_pad_by_batch_and_batches_with_labels_are_predicted() -> None:
    """`predict` takes what `Task` and `evaluate` take."""

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head((self.embed(tokens) * (tokens > 0)[..., None]).sum(1))

    def padded(batch: list[Tensor]) -> dict[str, Tensor]:
        tokens = nn.utils.rnn.pad_sequence(batch, batch_first=True)
        return {"tokens": tokens, "labels": (tokens[:, 0] > 4).long()}

    rng = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 9, (2 + row % 4,), generator=rng) for row in range(24)]
    loader = DataLoader(texts, 3, collate_fn=padded)  # type: ignore[arg-type]
    task = caveat.Task(Bag(), loader, caveat.Categorical())
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=30, learning_rate=0.05)), progress=False)
    whole = padded(texts)
    for posterior in (point, caveat.fit(task, caveat.Laplace(), start=point, progress=False)):
        expected = posterior.predict({"tokens": whole["tokens"]}, draws=5).probs
        torch.testing.assert_close(posterior.predict(loader, draws=5).probs, expected)
        torch.testing.assert_close(posterior.predict(whole, draws=5).probs, expected)
    closed = caveat.fit(task, caveat.Laplace(prediction="closed"), start=point, progress=False)
    torch.testing.assert_close(closed.predict(loader).probs, closed.predict({"tokens": whole["tokens"]}).probs)


def test_rows_of_different_lengths_are_refused_with_what_pads_them() -> None:
    ragged = [(torch.arange(2 + row % 3), row % 2) for row in range(8)]
    with pytest.raises(ValueError, match=r"rows 0 to 1 do not go into one batch .*collate_fn that pads them"):
        caveat.Task(nn.Embedding(5, 5), ragged, caveat.Categorical())  # type: ignore[arg-type]

    class Broken(Dataset):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, row: int) -> tuple[Tensor, int]:
            raise RuntimeError("the disk is gone")

    with pytest.raises(RuntimeError, match=r"^the disk is gone"):
        caveat.Task(nn.Linear(4, 3), Broken(), caveat.Categorical())


def test_a_sampler_that_weights_rows_is_refused_with_what_weights_mean_here() -> None:
    x, y = rows()
    sampler = WeightedRandomSampler([1.0] * 24, 24)
    with pytest.raises(ValueError, match=r"would count as two observations.*class_weights"):
        Rows(DataLoader(TensorDataset(x, y), 5, sampler=sampler))


def test_tokens_padded_by_batch_are_fitted_by_methods_of_all_kinds() -> None:
    rng = torch.Generator().manual_seed(0)
    texts = [torch.randint(1, 9, (3 + row % 4,), generator=rng) for row in range(24)]

    def padded(batch: list[tuple[Tensor, int]]) -> dict[str, Tensor]:
        tokens = nn.utils.rnn.pad_sequence([text for text, _ in batch], batch_first=True)
        return {"tokens": tokens, "labels": torch.tensor([label for _, label in batch])}

    class Bag(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 2)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.embed(tokens).sum(1))

    loader = DataLoader([(text, int(text[0] > 4)) for text in texts], 5, collate_fn=padded)  # type: ignore[arg-type]
    point = caveat.MAP(training=caveat.Training(epochs=60, learning_rate=0.03))
    wanted = {"tokens": nn.utils.rnn.pad_sequence(texts[:3], batch_first=True)}
    everything = {"tokens": nn.utils.rnn.pad_sequence(texts, batch_first=True)}
    for method in (caveat.Laplace(), caveat.SampledLaplace(samples=2), caveat.SGMCMC(chains=1, length=2, burn_in=2)):
        task = caveat.Task(Bag(), loader, caveat.Categorical(), validation=0.25)
        start = point if method.starts_from == "trained" else None
        posterior = caveat.fit(task, method, start=start, progress=False)
        assert bool(posterior.predict(wanted).probs.isfinite().all())
        assert torch.equal(posterior.predict(loader).probs, posterior.predict(everything).probs)
