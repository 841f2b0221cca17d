"""Frozen parameters are shared with the module that was given, and changes to them are noticed."""

import pytest
import torch
from torch import nn

from caveat.copies import FrozenBase, sharing_copy
from caveat.likelihoods import Categorical
from caveat.network import Network


def adapted() -> nn.Sequential:
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(30, 40), nn.BatchNorm1d(40), nn.ReLU(), nn.Linear(40, 3))
    module[0].requires_grad_(False)
    return module


def pointers(module: nn.Module) -> dict[str, int]:
    return {name: tensor.data_ptr() for name, tensor in module.state_dict().items()}


def test_frozen_parameters_have_the_storage_of_the_module_and_nothing_else_has() -> None:
    module = adapted()
    network = Network(module, Categorical())
    given = pointers(module)
    for other in (network, network.replica(), network.with_fixed({"3.bias": torch.ones(3)}), network.with_fixed({})):
        found = pointers(other.module)
        assert {name for name in found if found[name] == given[name]} == {"0.weight", "0.bias"}
    taken = network.with_fixed({"0.weight": (new := torch.ones(40, 30))})
    assert taken.module[0].weight.data_ptr() == new.data_ptr(), "a given base is shared, not copied"
    assert taken.module[0].bias.data_ptr() == given["0.bias"]
    assert float(module[0].weight.mean()) != 1


def test_a_module_that_is_moved_or_cast_leaves_the_copy_as_it_is() -> None:
    module = adapted()
    network = Network(module, Categorical())
    before = network.module[0].weight.clone()
    module.double()
    module.train().requires_grad_(True)
    assert torch.equal(network.module[0].weight, before)
    assert not network.module[0].weight.requires_grad
    network.base.check()


@torch.no_grad()
def _in_place(module: nn.Sequential) -> None:
    module[0].weight.mul_(1.5)


def _loaded(module: nn.Sequential) -> None:
    module.load_state_dict({name: value + 1 for name, value in module.state_dict().items()})


def _merged(module: nn.Sequential) -> None:
    module[0].weight.data += 0.1  # as adapters are merged: no version counter tells


@pytest.mark.parametrize("change", [_in_place, _loaded, _merged])
def test_a_change_in_place_is_refused(change) -> None:
    module = adapted()
    network = Network(module, Categorical())
    network.base.check()
    change(module)
    with pytest.raises(ValueError, match=r"the frozen 0\.weight was changed in place after the task"):
        network.base.check()


def test_the_digest_is_of_names_types_shapes_and_values_whatever_the_layout() -> None:
    values = torch.arange(12.0)
    shapes = {"a": values.view(3, 4), "b": values.view(4, 3)}

    def digest(**tensors: torch.Tensor) -> str:
        module = nn.ParameterDict({name: nn.Parameter(t, requires_grad=False) for name, t in tensors.items()})
        return FrozenBase.of(module, tensors).digest

    whole = digest(a=shapes["a"])
    assert digest(a=shapes["a"].t().contiguous().t()) == whole
    others = [digest(a=shapes["b"]), digest(b=shapes["a"]), digest(a=shapes["a"].double()), digest(a=shapes["a"] + 1)]
    assert len({whole, *others}) == 5


def test_many_pieces_are_digested_as_one_tensor(monkeypatch) -> None:
    module = adapted()
    monkeypatch.setattr("caveat.copies.frozen_base._PIECE", 256)
    first = FrozenBase.of(module, ["0.weight", "0.bias"]).digest
    with torch.no_grad():
        module[0].weight[-1, -1] += 1  # in the last piece
    assert FrozenBase.of(module, ["0.weight", "0.bias"]).digest != first


def test_tied_frozen_weights_stay_tied() -> None:
    module = nn.ModuleDict(
        {"tokens": nn.Embedding(5, 4), "head": nn.Linear(4, 5, bias=False), "adapter": nn.Linear(4, 4)}
    )
    module["head"].weight = module["tokens"].weight
    module["tokens"].weight.requires_grad_(False)
    private, names = sharing_copy(module)
    assert private["head"].weight is private["tokens"].weight  # type: ignore[index]
    assert names == ("tokens.weight",)
