"""A folder that was changed, its checksums mended, is refused or predicts the same: nothing else ever happens.

Values that are as valid as those that were there (another finite number, another choice of a knob) cannot be known to
be wrong, and are not among the changes: tensors are dropped, renamed, reshaped, exchanged, made NaN or of another type;
json is of another type, missing, added, huge or deeply nested.
"""

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

import caveat
from caveat.storage import read_json, write_json
from tests.mutated_folders import answer, module, read_groups, save_one, try_one, write_groups
from tests.test_contract import METHODS

FEW = 8  # changes of each method's folder; the slow version makes a thousand and more of all together


def outcomes(saved: list[Path], place: Path, seeds: range) -> Counter[str]:
    """How changes by these seeds were answered; the first that was answered wrongly fails."""
    expected, counts = [answer(folder) for folder in saved], Counter[str]()
    for seed in seeds:
        number = seed % len(saved)
        outcome, change = try_one(saved[number], expected[number], place, seed)
        assert outcome in ("refused", "same"), f"{change}: {outcome}"
        counts[outcome] += 1
    return counts


@pytest.mark.parametrize("name", METHODS)
def test_changed_folders_are_refused_or_predict_the_same(name: str, tmp_path: Path) -> None:
    counts = outcomes([save_one(name, "Gaussian", tmp_path)], tmp_path, range(100, 100 + FEW))
    assert counts["refused"] >= FEW // 4  # the others changed what is told of the fit, of which some methods tell much


@pytest.mark.slow
def test_a_thousand_changed_folders(tmp_path: Path) -> None:
    saved = [save_one(name, kind, tmp_path) for name in METHODS for kind in ("Gaussian", "Categorical")]
    counts = outcomes(saved, tmp_path, range(1500))
    assert counts["refused"] > 1000
    print(dict(counts))


@pytest.fixture(scope="module")
def ensemble(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_one("deep_ensemble", "Gaussian", tmp_path_factory.mktemp("ensemble"))


@pytest.mark.parametrize(
    ("group", "name", "value", "told"),
    [
        ("state.params", "0.weight", None, "params/0.weight is missing"),
        ("state.params", "added", torch.zeros(1), "params/added does not belong there"),
        ("state.params", "0.weight", torch.zeros(3, 6, 4), r"params/0.weight has shape \[3, 6, 4\], not \[4, 6, 4\]"),
        ("state.params", "0.bias", torch.zeros(4, 6).double(), "params/0.bias is of type float64, not float32"),
        ("state.params", "0.bias", torch.full((4, 6), torch.nan), "params/0.bias holds NaN or infinity"),
        ("state.params", "hyper/log_noise", None, "params/hyper/log_noise is missing"),
        ("state.hyper", "target_scale", -torch.ones(2).double(), "hyper/target_scale is not positive"),
        ("fixed", "1.running_var", None, "fixed/1.running_var is missing"),
    ],
)
def test_what_is_wrong_is_named(
    ensemble: Path, tmp_path: Path, group: str, name: str, value: torch.Tensor | None, told: str
) -> None:
    posterior = caveat.load(ensemble, module())
    folder = posterior.save(tmp_path / "changed")
    groups = read_groups(folder)
    if value is None:
        del groups[group][name]
    else:
        groups[group][name] = value
    write_groups(folder, groups)
    with pytest.raises(caveat.CorruptFile, match=rf"state\.safetensors is not the state of this network: {told}"):
        caveat.load(folder, module())


def test_knobs_of_another_number_of_members_are_refused(ensemble: Path, tmp_path: Path) -> None:
    folder = caveat.load(ensemble, module()).save(tmp_path / "changed")
    content = read_json(folder / "posterior.json")
    content["method"]["fields"]["members"] = 5
    write_json(folder / "posterior.json", content)
    with pytest.raises(caveat.CorruptFile, match=r"has shape \[4, 6, 4\], not \[5, 6, 4\]"):
        caveat.load(folder, module())


def test_a_file_of_this_version_has_every_knob_and_one_of_another_may_lack_some(ensemble: Path, tmp_path: Path) -> None:
    folder = caveat.load(ensemble, module()).save(tmp_path / "changed")
    content = read_json(folder / "posterior.json")
    del content["method"]["fields"]["training"]["fields"]["patience"]
    write_json(folder / "posterior.json", content)
    with pytest.raises(caveat.CorruptFile, match="Training cannot be made from what was saved: it lacks 'patience'"):
        caveat.load(folder, module())
    content["info"]["versions"]["caveat"] = "0.0.1"
    write_json(folder / "posterior.json", content)
    assert torch.equal(answer(folder), answer(ensemble))


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"names": "all"}, "posterior.json: names is 'all', which is not list"),
        ({"names": [1]}, r"names\[0\] is 1, which is not str"),
        ({"info": []}, "info is not an object but a list of 0 entries"),
        ({"more": 1}, "has 'more', which is not known"),
        ({"digest": None}, "digest is None, which is not str"),
        ({"method": {"type": "Gaussian", "fields": {}}}, "Gaussian"),
    ],
)
def test_json_of_another_type_is_named(ensemble: Path, tmp_path: Path, change: dict, told: str) -> None:
    folder = caveat.load(ensemble, module()).save(tmp_path / "changed")
    write_json(folder / "posterior.json", read_json(folder / "posterior.json") | change)
    with pytest.raises(caveat.CorruptFile, match=told):
        caveat.load(folder, module())


def test_json_nested_deeper_than_python_goes_is_refused(ensemble: Path, tmp_path: Path) -> None:
    folder = caveat.load(ensemble, module()).save(tmp_path / "changed")
    content = json.dumps(read_json(folder / "posterior.json"))
    (folder / "posterior.json").write_text(content.replace('"note": {}', f'"note": {"[" * 100_000}{"]" * 100_000}'))
    with pytest.raises(caveat.CorruptFile, match=r"posterior\.json is not a whole file"):
        caveat.load(folder, module())
