"""Dense references for the Laplace family: everything from its definition, nothing from the engine."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from caveat import HeteroscedasticGaussian, Network
from caveat.likelihoods import Hyper
from caveat.network import Params


@pytest.fixture(scope="session", autouse=True)
def _state_of_the_tests(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What the command line remembers of a user goes to a folder of the tests."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@dataclass
class Dense:
    """The linearised network at a point, with matrices over all weights in the order of `network.names`."""

    network: Network
    params: Params
    hyper: Hyper

    def jacobian(self, x: Tensor) -> Tensor:
        """The outputs' derivatives, [B, D, P]."""
        own = {name: self.params[name] for name in self.network.names}
        with sdpa_kernel(SDPBackend.MATH):  # the only one that torch.func can differentiate in batches
            found = torch.func.jacrev(lambda p: self.network(self.params | p, x).flatten(1))(own)
        return torch.cat([value.flatten(2) for value in found.values()], 2)

    def fisher(self, x: Tensor, y: Tensor) -> Tensor:
        """Fisher information of each row's outputs, [B, D, D]: the Hessian of -log p(y | outputs), where they agree."""
        likelihood, outputs = self.network.likelihood, self.network(self.params, x)
        if isinstance(likelihood, HeteroscedasticGaussian):
            log_variance = outputs.chunk(2, -1)[1]
            return torch.diag_embed(torch.cat([(-log_variance).exp(), torch.full_like(log_variance, 0.5)], -1))

        def loss(row: Tensor, target: Tensor) -> Tensor:
            return -likelihood.log_prob(row.unsqueeze(0), target.unsqueeze(0), self.hyper).sum()

        d = outputs[0].numel()
        rows = zip(outputs, y, strict=True)
        return torch.stack([torch.func.hessian(loss)(row, target).reshape(d, d) for row, target in rows])

    def ggn(self, x: Tensor, y: Tensor) -> Tensor:
        """sum_n J_n^T F_n J_n, [P, P]."""
        j = self.jacobian(x)
        return torch.einsum("ndp,nde,neq->pq", j, self.fisher(x, y), j)


@pytest.fixture
def dense() -> Callable[[Network, Params, Hyper], Dense]:
    """Makes a dense reference of a network at a point."""
    return Dense
