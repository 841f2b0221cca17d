"""How often a prediction waits for its device does not grow with the draws: no draw is copied back.

On the meta device, whose tensors hold no numbers, any copy to the host is an error; methods that find their plan, or
lay out their weights, from numbers read some once, and those reads are counted.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tests.test_contract import METHODS, fitted, make_task, problem

WITHOUT_READS = ("map", "deep_ensemble", "ensemble", "swag", "ivon", "hmc", "sgmcmc", "masked_bnn")
READING = {Tensor.tolist, Tensor.numpy, Tensor.cpu, Tensor.__array__}  # of which torch's dispatcher may not hear
aten = torch.ops.aten
WAITING = {aten._local_scalar_dense, aten.item, aten.equal, aten.is_nonzero, aten.nonzero, aten.masked_select}


class CountedOperations(TorchDispatchMode):
    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.overloadpacket in WAITING:
            self.reads[str(function)] += 1
        return function(*args, **(kwargs or {}))


class CountedCalls(TorchFunctionMode):
    def __init__(self, reads: Counter[str]) -> None:
        super().__init__()
        self.reads = reads

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in READING:
            self.reads[function.__name__] += 1
        return function(*args, **(kwargs or {}))


def reads_of(call: Any) -> Counter[str]:
    reads: Counter[str] = Counter()
    with CountedCalls(reads), CountedOperations(reads):
        call()
    return reads


def test_reads_are_counted() -> None:
    x = torch.ones(3)
    reads = reads_of(lambda: (x.sum().item(), bool(x[0] > 0), x.tolist(), x.cpu(), x.numpy(), torch.equal(x, x)))
    assert sum(reads.values()) >= 6


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", METHODS)
def test_reads_do_not_grow_with_draws(name: str) -> None:
    posterior, x = fitted(name, make_task()), problem("Categorical")[0][:5]
    few, many = 4, 12

    def predict(draws: int) -> Tensor:
        prediction: Any = posterior.predict(x, draws=draws)
        return torch.stack([prediction.entropy, prediction.aleatoric, prediction.epistemic])

    predict(few)  # what is made once
    assert reads_of(lambda: predict(many)) == reads_of(lambda: predict(few)), "new draws, and those that are known"
    reads = reads_of(lambda: predict(many + 1))
    assert reads == reads_of(lambda: predict(few + 1)), "new draws both times"


@pytest.mark.parametrize("name", WITHOUT_READS)
def test_draws_stay_on_the_device(name: str) -> None:
    posterior, x = fitted(name, make_task()).to("meta"), problem("Categorical")[0][:5].to("meta")
    outputs, hyper = posterior.predictor.outputs(x, 6, torch.Generator().manual_seed(0))
    prediction: Any = posterior.network.likelihood.predictive(outputs, hyper)
    for value in (prediction.probs, prediction.entropy, prediction.epistemic, prediction.aleatoric):
        assert value.device.type == "meta"
