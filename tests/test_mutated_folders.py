"""A folder that was changed, its checksums mended, is refused or predicts the same: nothing else ever happens.

Values that are as valid as those that were there (another finite number, another choice of a knob) cannot be known to
be wrong, and are not among the changes: tensors are dropped, renamed, reshaped, exchanged, made NaN or of another type;
json is of another type, missing, added, huge or deeply nested.
"""

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest
import torch

import caveat
from caveat.cli import main
from caveat.recipe import read_posterior
from caveat.storage import read_json, write_json
from tests.mutated_folders import (
    answer,
    module,
    read_groups,
    save_calibrated,
    save_one,
    save_table,
    table_command,
    try_one,
    try_table,
    write_groups,
)
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


def outcomes_of_table(place: Path, seeds: range) -> Counter[str]:
    """The same of a table's posterior, which `caveat predict` reads."""
    saved, counts = save_table(place), Counter[str]()
    command, out = table_command(saved)
    assert main([*command, str(out)]) == 0
    for seed in seeds:
        outcome, change = try_table(saved, place, seed)
        assert outcome in ("refused", "same"), f"{change}: {outcome}"
        counts[outcome] += 1
    return counts


@pytest.mark.parametrize("name", METHODS)
def test_changed_folders_are_refused_or_predict_the_same(name: str, tmp_path: Path) -> None:
    counts = outcomes([save_one(name, "Gaussian", tmp_path)], tmp_path, range(100, 100 + FEW))
    assert counts["refused"] >= FEW // 4  # the others changed what is told of the fit, of which some methods tell much


@pytest.mark.parametrize("likelihood", ["Gaussian", "Categorical"])
def test_a_changed_calibration_or_frozen_base_is_refused_or_predicts_the_same(likelihood: str, tmp_path: Path) -> None:
    saved = save_calibrated(likelihood, tmp_path)
    assert outcomes([saved], tmp_path, range(60, 100))["refused"] > 20
    for change, told in (
        ({"calibration": None}, "described/calibration.scores in state.safetensors belongs to nothing"),
        ({"base": None}, "is missing"),
    ):
        folder = tmp_path / told[-5:]
        shutil.copytree(saved, folder)
        write_json(folder / "posterior.json", read_json(folder / "posterior.json") | change)
        with pytest.raises(caveat.CorruptFile, match=told):
            caveat.load(folder, module())
    groups = read_groups(saved)
    groups["described"]["calibration.scores"] = groups["described"]["calibration.scores"][:-1]
    write_groups(saved, groups)
    with pytest.raises(caveat.CorruptFile, match=r"scores of shape \[39, \d\] are not those of 40 calibration rows"):
        caveat.load(saved, module())


def test_a_changed_recipe_of_a_table_is_refused_or_predicts_the_same(tmp_path: Path) -> None:
    assert outcomes_of_table(tmp_path, range(5, 30))["refused"] > 8


@pytest.mark.parametrize("key", ["mean", "std"])
def test_a_recipe_without_what_inputs_are_scaled_by_is_refused(
    key: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = save_table(tmp_path)
    content = read_json(saved / "posterior.json")
    preprocessing = content["note"]["recipe"]["preprocessing"]
    for value, told in (
        (preprocessing.pop(key)[:-1], f"{key} is missing, by which inputs are scaled"),
        (None, f"{key} has "),
    ):
        write_json(saved / "posterior.json", content)
        command, out = table_command(saved)
        assert main([*command, str(out)]) == 1
        assert told in capsys.readouterr().err
        preprocessing[key] = value


def test_signals_of_the_package_have_one_scale_for_all_their_numbers(tmp_path: Path) -> None:
    saved = save_table(tmp_path)
    content = read_json(saved / "posterior.json")
    recipe = content["note"]["recipe"]
    recipe |= {"data": "mnist1d", "preprocessing": {"mean": [0.0], "std": [1.0]}}
    write_json(saved / "posterior.json", content)
    assert read_posterior(saved, torch.device("cpu"))[1].preprocessing["mean"] == [0.0]
    recipe["preprocessing"]["std"] = [1.0, 1.0]
    write_json(saved / "posterior.json", content)
    with pytest.raises(caveat.CorruptFile, match="std has 2 entries, and inputs have"):
        read_posterior(saved, torch.device("cpu"))


@pytest.mark.slow
def test_five_hundred_changed_tables_and_calibrations(tmp_path: Path) -> None:
    saved = [save_calibrated(kind, tmp_path) for kind in ("Gaussian", "Categorical")]
    counts = outcomes(saved, tmp_path, range(300)) + outcomes_of_table(tmp_path, range(200))
    assert counts["refused"] > 250
    print(dict(counts))


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
