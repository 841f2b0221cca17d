"""Tables of methods: sweeps, candidates, priors, and tables that are like others."""

from pathlib import Path

import pytest

from caveat import HMC, SSVI, SWAG, DeepEnsemble, Ensemble, GaussianPrior, LaplacePrior, bench
from caveat.bench.plan import Cell, prior_of
from caveat.data import load
from caveat.engine.linear_model import ConjugateGradients, Exact
from tests.bench.small import GOOD, complaint_of


def cells(folder: Path, text: str) -> dict[str, Cell]:
    (folder / "x.toml").write_text(text)
    return {cell.label: cell for cell in bench.cells_of(bench.read_experiment(folder / "x.toml"))}


def test_a_sweep_is_a_label_for_each_combination(tmp_path: Path) -> None:
    grid = cells(
        tmp_path,
        GOOD + "[methods.cold]\nmethod = 'hmc'\nchains = 2\n"
        "sweep.temperature = [0.1, 3.0]\nsweep.prior_factor = [10.0, 1.0]\n",
    )
    labels = [label for label in grid if label.startswith("cold")]
    assert labels == [f"cold, temperature {t}, prior_factor {f}" for t in ("0.1", "3") for f in ("10", "1")]
    cell = grid["cold, temperature 0.1, prior_factor 10"]
    assert isinstance(cell.method, HMC)
    assert (cell.method.chains, cell.method.temperature) == (2, 0.1)
    assert cell.candidates[0].prior_precision == pytest.approx(0.1)
    assert len({grid[label].name for label in labels}) == 4


def test_tuned_knobs_are_candidates_of_one_cell(tmp_path: Path) -> None:
    text = "[methods.ensemble]\nmethod = 'deep_ensemble'\ntune.training.epochs = [1, 2]\ntune.members = [2, 3]\n"
    cell = cells(tmp_path, GOOD + text)["ensemble"]
    methods = [choice.method for choice in cell.candidates if isinstance(choice.method, DeepEnsemble)]
    assert [(m.training.epochs, m.members) for m in methods] == [(1, 2), (1, 3), (2, 2), (2, 3)]
    assert cell.candidates[1].knobs == "epochs 1, members 3"
    point = cells(tmp_path, GOOD + "[map]\ntune.epochs = [1, 2]\n")["map"]
    assert [choice.knobs for choice in point.candidates] == ["epochs 1", "epochs 2"]


def test_a_table_like_another_has_its_keys_but_not_its_sweep(tmp_path: Path) -> None:
    cold = "[methods.cold]\nmethod = 'hmc'\nchains = 3\nsweep.temperature = [0.1]\n"
    method = cells(tmp_path, GOOD + cold + "[methods.wide]\nlike = 'cold'\nlength = 7\n")["wide"].method
    assert isinstance(method, HMC)
    assert (method.chains, method.length, method.temperature) == (3, 7, 1.0)


def test_a_method_that_trains_may_begin_at_the_map(tmp_path: Path) -> None:
    text = "[methods.vi]\nmethod = 'mean_field_vi'\n[methods.from_point]\nmethod = 'mean_field_vi'\nfrom_map = true\n"
    grid = cells(tmp_path, GOOD + text)
    assert grid["vi"].start is None
    assert grid["from_point"].start == grid["map"].name
    assert grid["from_point"].name != grid["vi"].name


def test_priors_of_other_families_have_the_same_variance(tmp_path: Path) -> None:
    text = "prior_precision = 8.0\n" + GOOD + "[methods.other]\nmethod = 'hmc'\nprior = 'laplace'\n"
    choice = cells(tmp_path, text)["other"].candidates[0]
    digits = load("digits")
    assert prior_of(choice.prior, choice.prior_precision, digits) == LaplacePrior(0.25)  # 2 scale^2 = 1 / 8
    assert prior_of("gaussian", 8.0, digits) == GaussianPrior(8.0)
    (tmp_path / "own.py").write_text(
        "import caveat\ndef prior(data, precision):\n    return caveat.GaussianPrior(precision * data.n_outputs)\n"
    )
    choice = cells(tmp_path, GOOD + "[methods.other]\nmethod = 'hmc'\nprior = 'own.py:prior'\n")["other"].candidates[0]
    assert prior_of(choice.prior, 2.0, digits) == GaussianPrior(20.0)


def test_a_prior_of_its_own_makes_another_cell(tmp_path: Path) -> None:
    plain = cells(tmp_path, GOOD + "[methods.hmc]\n")["hmc"]
    names = {plain.name}
    for more in ("prior = 'laplace'", "prior_precision = 3.0", "prior_factor = 2.0", "tune.prior_factor = [1.0, 2.0]"):
        names.add(cells(tmp_path, GOOD + f"[methods.hmc]\n{more}\n")["hmc"].name)
    assert len(names) == 5
    assert cells(tmp_path, GOOD + "[methods.hmc]\nprior = 'gaussian'\nprior_factor = 1.0\n")["hmc"].name == plain.name


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[methods.hmc]\nprior = 'laplas'", "methods.hmc.prior: there is no 'laplas' (did you mean 'laplace'"),
        ("[methods.hmc]\nprior = 'no.py:prior'", "methods.hmc.prior: no.py of 'no.py:prior' is not a file"),
        ("[methods.hmc]\nprior_factor = -1", "methods.hmc.prior_factor: must be a number above 0, got -1"),
        ("[methods.laplace]\nprior_factor = 2", "methods.laplace.prior_factor: Laplace starts from the MAP"),
        (
            "[methods.hmc]\nfrom_map = true",
            "methods.hmc.from_map: must be true or false, and is for methods that train",
        ),
        ("[methods.ssvi]\nfrom_map = true\nprior_factor = 2", "methods.ssvi.prior_factor: SSVI starts from the MAP"),
        ("[methods.hmc]\nsweep.temperatur = [1]", "methods.hmc.temperatur: HMC has no knob 'temperatur'"),
        ("[methods.hmc]\nsweep.temperature = []", "methods.hmc.sweep.temperature: must be a list of different values"),
        ("[methods.hmc]\ntune.chains = [2, 2]", "methods.hmc.tune.chains: must be a list of different values"),
        ("[methods.hmc]\ndata = ['digitz']", "methods.hmc.data: there is no 'digitz' (did you mean 'digits'"),
        ("[methods.a]\nlike = 'hmc'", "methods.a.like: there is no 'hmc'"),
        ("[map]\ntune.epoch = [1, 2]", "map.epoch: Training has no knob 'epoch'"),
    ],
)
def test_complaints_name_the_key(text: str, complaint: str, tmp_path: Path) -> None:
    assert complaint in complaint_of(tmp_path, GOOD + text)


def test_an_ensemble_is_of_a_method_by_name_or_with_its_knobs(tmp_path: Path) -> None:
    text = "[methods.multi]\nmethod = 'ensemble'\nof = 'swag'\n[methods.few]\nmethod = 'ensemble'\nmembers = 2\n"
    text += "of.method = 'ssvi'\nof.density = 0.2\n"
    grid = cells(tmp_path, GOOD + text)
    assert grid["multi"].method == Ensemble(of=SWAG())
    assert grid["few"].method == Ensemble(of=SSVI(density=0.2), members=2)
    complaint = complaint_of(tmp_path, GOOD + "[methods.multi]\nmethod = 'ensemble'\nof = 'swog'\n")
    assert "methods.multi.of.method: there is no 'swog' (did you mean 'swag'?)" in complaint


def test_a_knob_of_several_kinds_is_a_word_or_a_table(tmp_path: Path) -> None:
    def solver(given: str) -> object:
        method = cells(tmp_path, f"{GOOD}[methods.sampled_laplace]\nsolver = {given}\n")["sampled_laplace"].method
        return method.solver

    assert solver("'auto'") == "auto"
    assert solver("'exact'") == Exact()
    assert solver("{ kind = 'conjugate_gradients', rank = 8 }") == ConjugateGradients(rank=8)
    with pytest.raises(
        ValueError, match=r"methods.sampled_laplace.solver.kind: there is no 'newton'; there are auto, exact"
    ):
        solver("'newton'")
    with pytest.raises(ValueError, match=r"methods.sampled_laplace.solver.rank: Exact has no knob"):
        solver("{ kind = 'exact', rank = 8 }")
    with pytest.raises(ValueError, match=r"methods.sampled_laplace.solver.rank: 'auto' has no knob"):
        solver("{ kind = 'auto', rank = 8 }")
