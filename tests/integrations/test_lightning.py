"""Lightning's trainer trains, and a posterior is what it leaves."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import caveat

pytest.importorskip("lightning", reason="needs lightning")

from lightning.pytorch import Callback, LightningModule, Trainer, seed_everything

from caveat.integrations.lightning import PosteriorCallback

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning advises on loaders, machines and its own dependencies


class Regression(LightningModule):
    """A network for a line with noise, trained by plain SGD."""

    def __init__(self, batchnorm: bool = False) -> None:
        super().__init__()
        norm = [nn.BatchNorm1d(8)] if batchnorm else []
        self.model = nn.Sequential(nn.Linear(3, 8), *norm, nn.Tanh(), nn.Linear(8, 1))

    def training_step(self, batch, _):
        x, y = batch
        return nn.functional.mse_loss(self.model(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Watch(Callback):
    """Keeps a copy of the weights after each epoch."""

    def __init__(self) -> None:
        self.epochs = []

    def on_train_epoch_end(self, trainer, pl_module) -> None:
        self.epochs.append({n: p.detach().clone() for n, p in pl_module.model.named_parameters()})


def rows(n: int = 120) -> TensorDataset:
    x = torch.randn(n, 3, generator=torch.Generator().manual_seed(0))
    y = x.sum(1, keepdim=True) + 0.1 * torch.randn(n, 1, generator=torch.Generator().manual_seed(1))
    return TensorDataset(x, y)


def train(callback: PosteriorCallback, module: LightningModule, epochs: int = 6, *more: Callback) -> None:
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    trainer = Trainer(
        max_epochs=epochs, accelerator="cpu", enable_model_summary=False, callbacks=[callback, *more], **quiet
    )
    trainer.fit(module, DataLoader(rows(), 20, shuffle=True))


def module(seed: int = 0, **options) -> Regression:
    seed_everything(seed)
    return Regression(**options)


def test_a_trained_network_becomes_the_posterior_that_fit_would_make(tmp_path) -> None:
    network, folder = module(), tmp_path / "posterior"
    callback = PosteriorCallback(caveat.LastLayerLaplace(), caveat.Gaussian(), folder)
    assert callback.posterior is None
    train(callback, network)
    x = rows().tensors[0]
    task = caveat.Task(network.model, DataLoader(rows(), 20), caveat.Gaussian())
    expected = caveat.fit(task, caveat.LastLayerLaplace(), progress=False).predict(x)
    for posterior in (callback.posterior, caveat.load(folder, Regression().model)):
        torch.testing.assert_close(posterior.predict(x).variance, expected.variance)
    assert torch.equal(callback.posterior.predict(x).mean, network.model(x).detach())


def test_a_map_is_the_network_with_its_noise() -> None:
    network = module()
    callback = PosteriorCallback(caveat.MAP(), caveat.Gaussian())
    train(callback, network)
    x, y = rows().tensors
    prediction = callback.posterior.predict(x)
    residual = (y - network.model(x).detach()).square().mean()
    torch.testing.assert_close(prediction.mean, network.model(x).detach())
    torch.testing.assert_close(prediction.variance[0, 0], residual, rtol=1e-4, atol=0)


@pytest.mark.parametrize("batchnorm", [False, True])
def test_swag_has_the_moments_of_the_weights_after_each_epoch(batchnorm, tmp_path) -> None:
    watch, network = Watch(), module(batchnorm=batchnorm)
    method = caveat.SWAG(rank=3, scale=1.0, default_draws=5)
    callback = PosteriorCallback(method, caveat.Gaussian(), tmp_path / "swag", from_epoch=2)
    train(callback, network, 8, watch)
    state, name = callback.posterior.state, "0.weight"
    stack = torch.stack([epoch[name] for epoch in watch.epochs[2:]])
    torch.testing.assert_close(state["mean"][name], stack.mean(0))
    torch.testing.assert_close(state["variance"][name], stack.var(0, correction=0))
    last = stack[-1] - stack.mean(0)
    assert any(torch.allclose(deviation, last, atol=1e-6) for deviation in state["deviations"][name])
    loaded = caveat.load(tmp_path / "swag", Regression(batchnorm).model)
    assert loaded.method.training.epochs == 6
    x = rows().tensors[0]
    assert torch.equal(loaded.predict(x).samples, callback.posterior.predict(x).samples)
    assert float(loaded.predict(x).epistemic.mean()) > 0


def test_an_ensemble_is_complete_after_its_last_member(tmp_path) -> None:
    callback = PosteriorCallback(caveat.DeepEnsemble(members=2), caveat.Gaussian(), tmp_path / "ensemble")
    networks = [module(seed, batchnorm=True) for seed in (0, 1)]
    train(callback, networks[0])
    assert callback.posterior is None
    train(callback, networks[1])
    x = rows().tensors[0]
    expected = torch.stack([copy.deepcopy(network.model).eval()(x).detach() for network in networks])
    torch.testing.assert_close(callback.posterior.predict(x).samples, expected)
    loaded = caveat.load(tmp_path / "ensemble", Regression(True).model)
    torch.testing.assert_close(loaded.predict(x).samples, expected)


def test_what_cannot_be_made_is_refused_before_training() -> None:
    with pytest.raises(ValueError, match="SSVI trains in a way of its own"):
        PosteriorCallback(caveat.SSVI(), caveat.Gaussian())
    callback = PosteriorCallback(caveat.MAP(), caveat.Gaussian(), network="net")
    with pytest.raises(ValueError, match=r"network='net' is no module of Regression: .* one of model"):
        train(callback, module())
    short = PosteriorCallback(caveat.SWAG(), caveat.Gaussian())
    with pytest.raises(ValueError, match=r"needs the weights after 3 epochs or more .* there were 2"):
        train(short, module(), 2)
