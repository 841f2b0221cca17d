"""Chains of Langevin and Hamiltonian steps against the stationary variance of a Gaussian target, exactly."""

import pytest
import torch
from torch import Tensor, nn

import caveat
from caveat.engine.chains.langevin_chain import LangevinChain
from caveat.engine.run import Run
from caveat.engine.training import BatchPart
from caveat.methods.masked_bnn import MaskedBNN
from caveat.storage import State


class Gaussian:
    """Independent N(0, 1 / curvature)."""

    def __init__(self, curvature: Tensor) -> None:
        self.curvature, self.moved = curvature, {"z": torch.zeros_like(curvature).requires_grad_()}
        self.squares: list[Tensor] = []

    def log_joint(self, x: object, y: Tensor, part: BatchPart) -> Tensor:
        return -0.5 * (self.curvature * self.moved["z"].square()).sum()

    log_smooth = log_joint

    arrangement = None

    def written(self) -> list[Tensor]:
        return []

    def numbers(self, chain: LangevinChain, step: int) -> list[float]:
        return []

    def follow(self, numbers: object) -> None:
        self.squares.append(self.moved["z"].detach().square())

    def decides_after(self, step: int) -> bool:
        return False

    def decide(self, chain: LangevinChain, batch: object, part: BatchPart) -> None:
        raise AssertionError("there is nothing to decide")

    def after_epoch(self, chain: LangevinChain) -> None:
        pass

    def flops(self) -> float:
        return 0.0

    def draw(self) -> State:
        return {"active": {"mean": self.moved["z"].detach().clone()}}

    def carry(self) -> State:
        return {}

    def restore(self, carry: State) -> None:
        pass


@pytest.mark.parametrize("momentum", [0.0, 0.7])
@pytest.mark.parametrize("temperature", [1.0, 0.1])
def test_variances_are_those_of_the_temperature_and_of_the_step(momentum: float, temperature: float) -> None:
    x = torch.zeros(10, 1, dtype=torch.float64)
    task = caveat.Task(nn.Linear(1, 1).double(), (x, x), caveat.Gaussian(noise=1.0))
    curvature = torch.logspace(0, 1, 2, dtype=torch.float64).repeat(400)
    target = Gaussian(curvature)
    method = MaskedBNN(
        burn_in=0, length=3, thin=50, batch_size=5, learning_rate=0.5, momentum=momentum, temperature=temperature
    )
    kept = LangevinChain(task, Run(), method, target).run_all()
    assert [*kept["active"]] == ["0/mean", "1/mean", "2/mean"]
    eta = 0.5 / 10  # two batches an epoch, of a target that looks at neither
    # The linear recursion of (velocity, position) keeps one covariance: solved for each curvature.
    for place, value in enumerate(curvature[:2].tolist()):
        step = torch.tensor([[momentum, -(eta**0.5) * value], [momentum * eta**0.5, 1 - eta * value]]).double()
        push = torch.tensor([1.0, eta**0.5]).double() * (2 * (1 - momentum) * temperature) ** 0.5
        system = torch.eye(4, dtype=torch.float64) - torch.kron(step, step)
        exact = torch.linalg.solve(system, torch.outer(push, push).flatten()).view(2, 2)[1, 1]
        found = torch.stack(target.squares[150:]).mean(0)[place::2].mean()
        assert float(found / exact) == pytest.approx(1.0, abs=0.06)
