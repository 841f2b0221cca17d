"""A posterior over adapters: the frozen base is taken once, left untouched, and saved as a digest."""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import caveat

TRAINING = caveat.Training(epochs=3, learning_rate=0.05)


class LoRA(nn.Module):
    """A frozen layer and a low-rank one beside it."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.lora_a = nn.Linear(base.in_features, rank, bias=False)
        self.lora_b = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.lora_b.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.lora_b(self.lora_a(x))


def build(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(LoRA(nn.Linear(6, 300)), nn.Tanh(), LoRA(nn.Linear(300, 3)))


def rows() -> tuple[Tensor, Tensor]:
    x = torch.randn(48, 6, generator=torch.Generator().manual_seed(0))
    return x, (x[:, 0] > 0).long() + (x[:, 1] > 0).long()


def base_of(module: nn.Module) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in module.named_parameters() if "base" in name}


def is_shared(posterior: caveat.Posterior, module: nn.Module) -> bool:
    own = base_of(posterior.network.module)
    return all(own[name].data_ptr() == tensor.data_ptr() for name, tensor in base_of(module).items())


def fitted(module: nn.Module, method: caveat.Method | None = None) -> caveat.Posterior:
    task = caveat.Task(module, rows(), caveat.Categorical())
    point = caveat.fit(task, caveat.MAP(training=TRAINING), progress=False)
    method = method or caveat.Laplace(precision="given")
    start = point if method.starts_from != "fresh" else None
    return caveat.fit(task, method, start=start, progress=False)


@pytest.mark.parametrize(
    "method",
    [
        caveat.Laplace(),
        caveat.SubnetworkLaplace(weights=40),
        caveat.SampledLaplace(samples=2),
        caveat.SWAG(),
        caveat.IVON(training=TRAINING),
        caveat.DeepEnsemble(members=2, training=TRAINING),
        caveat.HMC(chains=1, length=3, warmup=2, step_size=0.02),
    ],
    ids=lambda method: type(method).__name__,
)
def test_the_base_is_shared_by_fits_starts_loads_and_threads_and_never_written(method: caveat.Method, tmp_path) -> None:
    module = build()
    before = {name: (tensor.clone(), tensor._version) for name, tensor in module.state_dict(keep_vars=True).items()}
    posterior = fitted(module, method)
    posterior.save(tmp_path / "with")
    posterior.save(tmp_path / "without", base="without")
    x, _ = rows()
    wanted = posterior.predict(x, seed=3).probs
    fresh = build()
    loaded = caveat.load(tmp_path / "without", fresh)
    assert is_shared(posterior, module)
    assert is_shared(loaded, fresh)
    assert torch.equal(loaded.predict(x, seed=3).probs, wanted)
    assert torch.equal(caveat.load(tmp_path / "with", build(1)).predict(x, seed=3).probs, wanted)
    for name, tensor in module.state_dict(keep_vars=True).items():
        assert torch.equal(tensor, before[name][0])
        assert tensor._version == before[name][1], f"{name} was written"


def test_a_file_without_its_base_is_small_and_says_which_base_it_wants(tmp_path) -> None:
    posterior = fitted(build())
    posterior.save(tmp_path / "posterior", base="without")
    content = json.loads((tmp_path / "posterior" / "posterior.json").read_text())
    assert content["base"]["names"] == [*base_of(build())]
    assert content["base"]["bytes"] == sum(t.nbytes for t in base_of(build()).values())
    state = sum(t.nbytes for group in posterior.state.values() for t in group.values())
    assert (tmp_path / "posterior" / "state.safetensors").stat().st_size < state + 4000
    other = build()
    with torch.no_grad():
        other[0].base.weight[17, 3] += 1e-3
    with pytest.raises(caveat.CorruptFile, match=r"without its frozen base \(4 tensors, 0 MB\), and this model has"):
        caveat.load(tmp_path / "posterior", other)


def test_auto_leaves_out_what_is_large_and_a_round_trip_loses_nothing(tmp_path, monkeypatch) -> None:
    posterior = fitted(build())
    x, _ = rows()

    def has_base(folder: Path) -> bool:
        return json.loads((folder / "posterior.json").read_text())["base"] is None

    posterior.save(tmp_path / "small")
    assert has_base(tmp_path / "small")
    monkeypatch.setattr("caveat.posterior_folder.LEFT_OUT_ABOVE", 100)
    posterior.save(tmp_path / "large")
    assert not has_base(tmp_path / "large")
    loaded = caveat.load(tmp_path / "small", build(1))  # whose own base is another one: the file's is all there is
    loaded.save(tmp_path / "again")
    assert has_base(tmp_path / "again")
    wanted = posterior.predict(x, seed=0).probs
    assert torch.equal(caveat.load(tmp_path / "again", build(2)).predict(x, seed=0).probs, wanted)
    caveat.load(tmp_path / "large", build()).save(tmp_path / "large again")
    assert not has_base(tmp_path / "large again")
    caveat.load(tmp_path / "large", build()).save(tmp_path / "made whole", base="with")
    assert torch.equal(caveat.load(tmp_path / "made whole", build(2)).predict(x, seed=0).probs, wanted)


def test_a_choice_that_is_none_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="must be 'auto', 'with' or 'without'"):
        fitted(build()).save(tmp_path / "posterior", base="never")  # type: ignore[arg-type]
    task = caveat.Task(nn.Linear(6, 3), rows(), caveat.Categorical())
    posterior = caveat.fit(task, caveat.MAP(training=TRAINING), progress=False)
    with pytest.raises(ValueError, match=r"no parameter was frozen.*requires_grad_\(False\)"):
        posterior.save(tmp_path / "posterior", base="without")
    assert not (tmp_path / "posterior").exists()


def test_nothing_is_predicted_fitted_sampled_or_saved_on_a_base_that_has_changed(tmp_path) -> None:
    module = build()
    posterior = fitted(module)
    task = caveat.Task(module, rows(), caveat.Categorical())
    x, _ = rows()
    module[0].base.weight.data += module[0].lora_b.weight @ module[0].lora_a.weight + 1e-3  # merged
    for use in (
        lambda: posterior.predict(x),
        lambda: posterior.moments(x),
        lambda: next(posterior.sample()),
        lambda: posterior.save(tmp_path / "posterior"),
        lambda: posterior.update(rows(), progress=False),
        lambda: caveat.fit(task, caveat.MAP(training=TRAINING), progress=False),
        lambda: caveat.fit(
            caveat.Task(module, rows(), caveat.Categorical()), caveat.Laplace(), start=posterior, progress=False
        ),
    ):
        with pytest.raises(ValueError, match=r"the frozen 0\.base\.weight was changed in place"):
            use()
    assert not (tmp_path / "posterior").exists()


def test_what_a_start_trained_of_the_rest_is_taken_with_it() -> None:
    """A head that was trained first and frozen afterwards comes from the start, not from the module."""
    module = build()
    whole = caveat.Task(module, rows(), caveat.Categorical())
    point = caveat.fit(whole, caveat.MAP(training=TRAINING), progress=False)
    module[2].requires_grad_(False)
    first = caveat.Task(module, rows(), caveat.Categorical())
    posterior = caveat.fit(first, caveat.Laplace(precision="given"), start=point, progress=False)
    trained = point.state["params"]["2.lora_a.weight"]
    assert torch.equal(posterior.network.fixed()["2.lora_a.weight"], trained)
    assert not torch.equal(module[2].lora_a.weight, trained)
