"""Reference sets: built from a recipe, checked, stored small, refused when changed, compared against."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import caveat
from caveat import Categorical, CorruptFile, GaussianPrior, HeteroscedasticGaussian, data
from caveat.cli import main
from caveat.evaluate.fidelity import fidelity
from caveat.methods.hmc import HMC
from caveat.references import (
    RECIPES,
    ReferenceRecipe,
    build_reference,
    find_references,
    finding,
    load_reference,
    reference_task,
)
from caveat.references import hmc_references as reference
from caveat.rows import Rows

SHORT = HMC(chains=2, length=30, warmup=20)


@pytest.fixture
def recipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two recipes that take a second, and an empty place for references."""
    rng = np.random.default_rng(0)
    x, noise = rng.normal(size=(80, 3)), 0.1 * rng.normal(size=(80, 1))
    for name, y in (("classes", (x[:, 0] > 0).astype(np.int64)), ("numbers", 50 + 10 * (x[:, :1] + noise))):
        np.savez(tmp_path / f"{name}.npz", x_train=x[:60], y_train=y[:60], x_test=x[60:], y_test=y[60:])
    prior, numbers = GaussianPrior(10.0), HeteroscedasticGaussian(standardise=True)
    known = {
        "classes": ReferenceRecipe(str(tmp_path / "classes.npz"), Categorical(), 4, 2, prior, SHORT, kept=7),
        "numbers": ReferenceRecipe(str(tmp_path / "numbers.npz"), numbers, 4, 2, prior, SHORT),
    }
    for place in (reference, caveat.references, finding):
        monkeypatch.setattr(place, "RECIPES", known)
    monkeypatch.setenv("CAVEAT_REFERENCES", str(tmp_path / "references"))
    return tmp_path / "references"


@pytest.fixture
def lenient(monkeypatch: pytest.MonkeyPatch) -> None:
    """So few draws cannot pass the real limit."""
    monkeypatch.setattr(reference, "RHAT_LIMIT", 100.0)


@pytest.mark.usefixtures("lenient")
def test_a_reference_is_what_its_chains_predict(recipes: Path) -> None:
    place = build_reference("classes", progress=False)
    assert place == recipes / "classes"
    assert {p.name for p in place.iterdir()} == {"reference.json", "predictions.safetensors"}
    assert [p.name for p in recipes.iterdir()] == ["classes"], "the chains are not kept"
    found = load_reference("classes")
    chains = caveat.fit(reference_task("classes"), SHORT, progress=False)
    x, y = data.load(reference.RECIPES["classes"].source).test.tensors
    samples = chains.predict(x).samples.unflatten(0, (2, 30))
    torch.testing.assert_close(found.parts["clean"]["probs"], samples.mean(1))
    kept = found.predictive().samples.unflatten(0, (2, 7))
    every = torch.linspace(0, 29, 7).round().long()
    assert float((kept - samples[:, every]).abs().max()) < 0.0002, "the rounding that the docs promise"
    direct, stored = fidelity(chains, chains, (x, y)), fidelity(chains, found, (x, y))
    assert stored["total_variation"].mean < 1e-6
    for name in ("agreement", "total_variation"):
        assert stored.floor[name].mean == pytest.approx(direct.floor[name].mean, abs=1e-6)
        assert found.facts["floor"]["clean"][name]["mean"] == pytest.approx(direct.floor[name].mean, abs=1e-6)
    assert (stored.chains, stored.draws, stored.rows) == (2, 30, 20)
    assert stored.notes == ()


@pytest.mark.usefixtures("lenient", "recipes")
def test_numbers_are_kept_draw_by_draw() -> None:
    build_reference("numbers", progress=False)
    found = load_reference("numbers")
    chains = caveat.fit(reference_task("numbers"), SHORT, progress=False)
    x, y = data.load(reference.RECIPES["numbers"].source).test.tensors
    assert found.kind == "regression"
    assert found.parts["clean"]["means"].shape == (2, 30, 20, 1)
    torch.testing.assert_close(found.predictive().variance, chains.predict(x).variance, rtol=1e-4, atol=1e-6)
    direct, stored = fidelity(chains, chains, (x, y)), fidelity(chains, found, (x, y))
    assert stored["w2"].mean < 1e-4 < direct.floor["w2"].mean
    assert stored.floor["w2"].mean == pytest.approx(direct.floor["w2"].mean, rel=1e-4)


@pytest.mark.usefixtures("lenient", "recipes")
def test_built_again_it_is_the_same_and_with_another_seed_it_is_not(tmp_path: Path) -> None:
    digests = []
    for folder, seed in (("a", 0), ("b", 0), ("c", 1)):
        place = build_reference("classes", out=tmp_path / folder, seed=seed, progress=False)
        digests.append(json.loads((place / "reference.json").read_text())["digest"])
    assert digests[0] == digests[1] != digests[2]
    with pytest.raises(FileExistsError, match="remove it first"):
        build_reference("classes", out=tmp_path / "a", progress=False)


def test_chains_that_have_not_mixed_are_not_stored(recipes: Path) -> None:
    with pytest.raises(ValueError, match=r"largest R-hat of a prediction is 1\.\d+, it must be below 1\.015") as error:
        build_reference("classes", progress=False)
    assert "draws=60" in str(error.value)
    assert not (recipes / "classes").exists()
    assert (recipes / "classes.chains" / "posterior.json").exists(), "they can be looked at"
    with pytest.raises(FileNotFoundError, match="caveat reference build classes"):
        load_reference("classes")
    with pytest.raises(FileExistsError, match="the chains of another run"):
        build_reference("classes", draws=60, progress=False)


@pytest.mark.usefixtures("lenient")
def test_chains_that_are_there_are_not_sampled_again(recipes: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = reference_task("classes")
    caveat.fit(task, SHORT, folder=recipes / "classes.chains", progress=False)
    monkeypatch.setattr(reference, "fit", lambda *_, **__: pytest.fail("sampled again"))
    build_reference("classes", progress=False)
    assert load_reference("classes").draws == 30


@pytest.mark.usefixtures("lenient")
def test_what_was_changed_is_refused(recipes: Path) -> None:
    place = build_reference("classes", progress=False)
    described = place / "reference.json"
    text = described.read_text()
    described.write_text(text.replace('"seed": 0', '"seed": 1'))
    with pytest.raises(CorruptFile, match="checksum does not match"):
        load_reference("classes")
    described.write_text(text)
    tensors = place / "predictions.safetensors"
    content = bytearray(tensors.read_bytes())
    content[-1] ^= 1
    tensors.write_bytes(content)
    with pytest.raises(CorruptFile, match="digest does not match"):
        load_reference(place)


@pytest.mark.usefixtures("lenient", "recipes")
def test_other_rows_are_refused_with_those_it_has() -> None:
    build_reference("classes", progress=False)
    found = load_reference("classes")
    chains = caveat.fit(reference_task("classes"), SHORT, progress=False)
    x, y = data.load(reference.RECIPES["classes"].source).test.tensors
    assert found.find(Rows((x + 1e-6, y))) == "clean", "rounding is no difference"
    with pytest.raises(ValueError, match=r"their inputs differ from those of clean. It has clean \(20 rows\)"):
        fidelity(chains, found, (x.flip(0), y))
    with pytest.raises(ValueError, match=r"they are 5\. It has clean \(20 rows\)"):
        fidelity(chains, found, (x[:5], y[:5]))
    with pytest.raises(KeyError, match="there are clean"):
        found.predictive("turned")
    scores = caveat.evaluate(chains, {"own": (x, y), "shifted": (x + 1, y)}, reference=found, progress=False)
    assert scores["own"]["total_variation"].mean < 1e-6
    assert "agreement" not in scores["shifted"].metrics
    with pytest.raises(ValueError, match="knows other rows"):
        caveat.evaluate(chains, {"shifted": (x + 1, y)}, reference=found, progress=False)


def test_unknown_names_say_what_there_is() -> None:
    with pytest.raises(ValueError, match="there are digits, grainy_digits, diabetes, mnist1d"):
        load_reference("imagenet")
    with pytest.raises(ValueError, match="there are digits, grainy_digits, diabetes, mnist1d"):
        reference_task("imagenet")


@pytest.mark.usefixtures("lenient")
def test_the_command_line(recipes: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["reference", "list"]) == 0
    assert capsys.readouterr().out.count("not here: caveat reference build") == 2
    assert main(["reference", "build", "classes", "--quiet", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(recipes / "classes")
    assert main(["reference", "build", "classes", "--quiet"]) == 1
    assert "remove it first" in capsys.readouterr().err
    assert main(["reference", "list"]) == 0
    assert "2 x 30 draws" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["reference", "build", "imagenet"])


@pytest.mark.parametrize(("name", "draws", "rows"), [("digits", 400, 359), ("grainy_digits", 1000, 797)])
def test_a_packaged_reference_is_whole_and_small(
    name: str, draws: int, rows: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # nothing is built there
    monkeypatch.delenv("CAVEAT_REFERENCES", raising=False)
    place = find_references()[name]
    assert place == caveat.references.PACKAGED / name
    assert sum(file.stat().st_size for file in place.iterdir()) < 2_000_000
    found, recipe = load_reference(name), RECIPES[name]
    task = reference_task(name)
    assert found.facts["data"]["fingerprint"] == task.fingerprint()
    for knob, value in found.facts["method"]["fields"].items():
        assert getattr(recipe.sampler, knob) == value, "the recipe was changed since: build it again"
    assert (found.chains, found.draws) == (4, draws)
    for part, inputs in recipe.parts(data.load(name)).items():
        assert found.find(Rows(inputs)) == part
        assert found.parts[part]["probs"].shape == (4, rows, 10)
    diagnosis = found.facts["diagnostics"]["clean"]
    assert diagnosis["predictions"]["rhat_max"] < 1.015
    assert diagnosis["divergences"] == [0, 0, 0, 0]
    assert found.facts["floor"]["clean"]["total_variation"]["mean"] < 0.02
    y = data.load(name).test.tensors[1]
    assert float((found.predictive().probs.argmax(-1) == y).double().mean()) == pytest.approx(
        found.facts["scores"]["accuracy"]["mean"], abs=0.01
    )


@pytest.mark.parametrize("name", list(RECIPES))
def test_recipes_are_frozen_facts(name: str) -> None:
    recipe = RECIPES[name]
    assert recipe.sampler.chains == 4
    assert recipe.sampler.length >= 400
    assert recipe.prior == GaussianPrior(3.0 if name == "grainy_digits" else 10.0)
    with pytest.raises(dataclasses.FrozenInstanceError):
        recipe.hidden = 1  # type: ignore[misc]
