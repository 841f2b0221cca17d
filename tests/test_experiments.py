"""The experiments are whole: files plan, grids build, one cell of a kind runs, and what the READMEs name is there."""

import ast
import csv
import itertools
import logging
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat.bench import Place, cells_of, read_experiment, run_bench, select
from caveat.bench.cells import task_of
from caveat.data import DataSet
from caveat.engine.linear_model import Tuning
from caveat.evaluate import ReferenceSet
from caveat.models import resnet18

ROOT = Path(__file__).parents[1]
EXPERIMENTS = ROOT / "experiments"
FILES = sorted(EXPERIMENTS.rglob("*.toml"))
READMES = sorted(EXPERIMENTS.rglob("README.md"))
NAMED = re.compile(r"[\w./-]+\.(?:py|toml|csv|png|md)\b")
BY_BENCH = {"summary.csv"}  # that `caveat bench` writes into its folder of results


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Imports a script of the experiments by its path; others have modules of the same names."""
    before = set(sys.modules)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    def imported(path: str) -> ModuleType:
        monkeypatch.syspath_prepend((EXPERIMENTS / path).parent)
        return import_module(Path(path).stem)

    yield imported
    for name in set(sys.modules) - before:
        if (file := getattr(sys.modules[name], "__file__", None)) and Path(file).is_relative_to(EXPERIMENTS):
            del sys.modules[name]


@pytest.fixture
def published(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reference of the name that an experiment file compares with, of three rows that are no images."""
    parts = {"clean": {"inputs": torch.zeros(3, 1), "probs": torch.full((1, 3, 10), 0.1)}}
    facts = {"name": "cifar10_resnet20_frn", "kind": "classification", "chains": 1, "draws": 1}
    monkeypatch.setenv("CAVEAT_REFERENCES", str(tmp_path))
    ReferenceSet(facts, parts).save(tmp_path / "cifar10_resnet20_frn")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXPERIMENTS)))
@pytest.mark.usefixtures("published")
def test_every_experiment_file_plans(file: Path) -> None:
    cells = cells_of(read_experiment(file))
    assert len({cell.name for cell in cells}) == len(cells) > 2
    assert file.stem in (EXPERIMENTS / "README.md").read_text(), "experiments/README.md says what it is for"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(EXPERIMENTS)))
@pytest.mark.usefixtures("published")
def test_the_networks_of_an_experiment_file_take_its_data(file: Path) -> None:
    """Where the data are at hand; a few rows of them."""
    experiment = read_experiment(file)
    absent = []
    for cell in cells_of(experiment):
        if cell.label != "map" or cell.seed != experiment.seeds[0]:
            continue
        try:
            found = few(cell.data.load(None))
        except FileNotFoundError:
            absent.append(cell.data.name)
            continue
        _, task = task_of(cell, found, cell.candidates[0])
        x, y = (tensor[:2] for tensor in found.train.tensors)
        assert task.network(task.network.params(), x).shape[0] == len(y)
    if absent:
        pytest.skip(f"not at hand: {', '.join(dict.fromkeys(absent))}")


def few(data: DataSet) -> DataSet:
    """With 100 training rows."""
    return replace(data, train=TensorDataset(*(tensor[:100] for tensor in data.train.tensors)))


@pytest.mark.parametrize("readme", READMES, ids=lambda file: str(file.relative_to(ROOT)))
def test_what_a_readme_of_the_experiments_names_is_there(readme: Path) -> None:
    named = set(NAMED.findall(readme.read_text())) - BY_BENCH
    places = (readme.parent, EXPERIMENTS, ROOT)
    assert not {name for name in named if not any((place / name).exists() for place in places)}


def test_every_script_and_result_of_the_experiments_is_named() -> None:
    """A result that no README speaks of is no result: by its own name, or by the script or file that it is named as."""
    for folder in (path for path in EXPERIMENTS.iterdir() if (path / "README.md").exists()):
        text = (folder / "README.md").read_text() + (EXPERIMENTS / "README.md").read_text()
        for file in (file for kind in ("csv", "png", "toml") for file in folder.glob(f"*.{kind}")):
            names = (file.name, f"{file.stem}.py", f"{file.stem}.toml")
            assert any(name in text for name in names), f"{file.relative_to(ROOT)} is in no README"


def test_every_number_of_the_pages_is_in_a_csv_or_marked(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    sources = script("sources.py")
    assert [found for page in sources.pages() for found in sources.missing(page)] == []
    (tmp_path / "own.csv").write_text("seed,kind,nll\n0,clean,1\n0,noise 1,2.5\n0,noise 2,4.2\n1,clean,1\n")
    values = sources.values_of(tmp_path / "own.csv")
    for text, there in (("2.5", True), ("3.35", True), ("335", True), ("2.7", False), ("3.36", False)):
        assert sources.holds(values, text) is there, text
    assert list(sources.numbers_of("ResNet-18 has `3.2`, .91 ±.02 of 10,000 (2021); -1.5")) == [
        ".91",
        ".02",
        "10,000",
        "-1.5",
    ]


def test_counts_of_weights_are_those_of_the_networks() -> None:
    with (EXPERIMENTS / "network_sizes.csv").open(newline="") as file:
        for row in csv.DictReader(file):
            words = row["network"].removesuffix(", without biases")
            name, _, given = words.partition(", ")
            module = caveat.models.MODELS[name](*ast.literal_eval(f"({given},)" if given else "()"))
            biases = words == row["network"]
            assert sum(p.numel() for p in module.parameters() if biases or p.ndim > 1) == int(row["weights"])


def test_tables_are_made_from_earlier_and_from_new_results(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One quick cell of each kind; its numbers stand where those of results.csv would."""
    tables = script("ssvi/tables.py")
    tables.summarise(tables.Results.of_csv(EXPERIMENTS / "ssvi" / "results.csv"))
    assert "| SSVI 95% | 0.9629 ±0.0025 | 0.149 ±0.007 |" in capsys.readouterr().out
    out = quick("ssvi/digits.toml", tmp_path, "digits/*/ssvi, density 0.05/0", "digits/*/removal, criterion snr/0")
    found = tables.Results.of_bench([out])
    tables.summarise(found)
    printed = capsys.readouterr().out
    (row,) = (row for (what, _, _), row in found.rows.items() if what == ("sweep", "ssvi", "95"))
    assert 0.94 < float(row["sparsity"]) < 0.96
    assert float(row["training_flops"]) > 0
    assert f"| SSVI 95% | {float(row['accuracy']):.4f} | {float(row['nll']):.3f} |" in printed
    assert ("criterion", "ssvi", "snr") in {what for what, _, _ in found.rows}


def test_a_file_in_pieces_goes_on_and_writes_each_row_once(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pieces = script("pieces.py")
    file = tmp_path / "small.toml"
    file.write_text(
        "data = ['digits']\nmodels = ['mlp']\ntest_rows = 50\n[shifts]\nrotation = [30]\n[map]\nepochs = 3\n"
        "[methods.sgmcmc]\nchains = 2\nlength = 4\nburn_in = 2\nlearning_rate = 0.01\n"
    )
    words = [str(file), "--out", str(tmp_path / "out"), "--csv", str(tmp_path / "small.csv")]
    assert pieces.main([*words, "--cells", "*/*/map/0"]) == 0
    assert {row["method"] for row in pieces.read(tmp_path / "small.csv")} == {"map"}
    whole = pieces.bench.run_bench

    def killed(*args: object, say: Callable[[str], None], **kwargs: object) -> None:
        def last(text: str) -> None:
            say(text)
            if text.startswith("[1/"):
                raise SystemExit

        whole(*args, say=last, **kwargs)

    monkeypatch.setattr(pieces.bench, "run_bench", killed)
    with pytest.raises(SystemExit):
        pieces.main(words)
    assert [row["method"] for row in pieces.read(tmp_path / "small.csv")] == ["map"] * 2 + ["map_tempered"] * 2

    def stopped(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(pieces.bench, "run_bench", stopped)
    assert pieces.main(words) == 2, "there is more to do"
    monkeypatch.setattr(pieces.bench, "run_bench", whole)
    assert pieces.main([*words, "--jobs", "2"]) == 0
    assert pieces.main(words) == 0
    rows = pieces.read(tmp_path / "small.csv")
    assert [(row["method"], row["shift"]) for row in rows] == [
        (method, shift) for method in ("map", "map_tempered", "sgmcmc") for shift in ("clean", "rotation")
    ]
    assert all(float(row["nll"]) > 0 and float(row["fit_seconds"]) > 0 for row in rows)
    assert all(row["command"].startswith("pieces.py small.toml") and row["seed"] == "0" for row in rows)
    assert [bool(row["rhat_predictions"]) for row in rows] == [False] * 4 + [True] * 2


def test_a_table_of_pieces_has_seeds_shifts_and_other_sets(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    table, pieces = script("pieces_table.py"), script("pieces.py")
    lines = []
    for seed, nll in (("0", 0.2), ("1", 0.4)):
        who = {"data": "own", "model": "m", "method": "large_ensemble", "seed": seed}
        lines.append(who | {"shift": "clean", "nll": nll, "accuracy": 0.9, "fit_seconds": 7})
        lines += [who | {"shift": "fog", "severity": s, "nll": nll + s, "accuracy": 0.5} for s in (1, 3)]
        lines.append(who | {"shift": "cifar100", "severity": "", "auroc_entropy": 0.75})
    lines = [{name: str(line.get(name, "")) for name in pieces.COLUMNS} for line in lines]
    assert pieces.add(tmp_path / "own.csv", lines) == 8
    assert table.pieces(tmp_path / "own.csv", "own").splitlines() == [
        "|  | accuracy | NLL | accuracy, shifted | NLL, shifted | AUROC, cifar100 | seconds of the fit | seeds |",
        "|---|---|---|---|---|---|---|---|",
        "| large ensemble | 90.00 (90.00 to 90.00) | 0.300 (0.200 to 0.400) | 50.0 (50.0 to 50.0)"
        " | 2.300 (2.200 to 2.400) | 0.750 (0.750 to 0.750) | 7 | 2 |",
    ]
    assert table.pieces(tmp_path / "own.csv", "other") == table.pieces(tmp_path / "none.csv", "own") == table.NOT_YET


@pytest.mark.skipif(not (shutil.which("bash") and shutil.which("timeout")), reason="is a script of a Unix shell")
def test_half_an_hour_of_runs_asks_for_what_there_is(script: Callable[[str], ModuleType], tmp_path: Path) -> None:
    """With a python3 that only tells what it was asked for."""
    told = tmp_path / "bin" / "python3"
    told.parent.mkdir()
    told.write_text('#!/bin/sh\necho "$*"\n')
    told.chmod(0o755)
    (tmp_path / "ready").touch()
    place = {"PATH": f"{told.parent}:{os.environ['PATH']}", "CAVEAT_DATA": str(tmp_path)}
    words = ["bash", str(EXPERIMENTS / "half_hour.sh"), "60", str(tmp_path / "out")]
    subprocess.run(words, env=place, check=True, timeout=60)
    logs = {file.stem: file.read_text().split("\n") for file in (tmp_path / "out").glob("*.log")}
    asked = [line.split() for lines in logs.values() for line in lines if line.startswith("/")]
    assert set(logs) == {"laplace", "small", "ssvi"}
    assert len(asked) == sum(len(lines) - 1 for lines in logs.values()) > 8, "every line is a command"
    for path, *given in asked:
        name = Path(path).relative_to(EXPERIMENTS)
        if name.name == "pieces.py":
            file, patterns = Path(given[0]), itertools.takewhile(lambda w: w[:2] != "--", after(given, "--cells"))
            every = cells_of(read_experiment(file))
            assert all(select(every, [pattern]) for pattern in patterns), given
        elif name.name == "cifar.py":
            assert script(str(name)).arguments().parse_args(given).device == "cuda"
        else:
            assert after(given, "--cells")[0] in script(str(name)).CELLS


def after(words: list[str], word: str) -> list[str]:
    return words[words.index(word) + 1 :]


def test_images_are_written_as_files_that_need_nothing(
    script: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decode = script("decode_images.py")
    for name, label_bytes in (("cifar10", 1), ("cifar100", 2)):
        rng = torch.Generator().manual_seed(label_bytes)
        for part in decode.PARTS:
            for file in decode.files_of(name, part):
                rows = torch.randint(0, 256, (4, label_bytes + 3072), generator=rng, dtype=torch.uint8)
                rows[:, label_bytes - 1] %= 10
                path = tmp_path / "given" / file
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(rows.numpy().tobytes())
    words = ["decode_images.py", "cifar10", "cifar100", "--data-dir", str(tmp_path / "given"), "--out"]
    monkeypatch.setattr(sys, "argv", [*words, str(tmp_path / "plain")])
    decode.main()
    for name in ("cifar10", "cifar100"):
        before, after = (caveat.data.load(name, tmp_path / folder) for folder in ("given", "plain"))
        assert all(torch.equal(*pair) for pair in zip(before.train.tensors, after.train.tensors, strict=True))
        assert all(torch.equal(*pair) for pair in zip(before.test.tensors, after.test.tensors, strict=True))


def test_tables_of_a_posterior_compared_with_hmc(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tables = script("hmc/tables.py")
    tables.summarise(tables.Results.of_csv(EXPERIMENTS / "hmc" / "results.csv"))
    shown = capsys.readouterr().out
    assert "| 0.03 | 0.972 | 0.113 † | -0.019 |" in shown, "its chains have not mixed"
    assert "| 0.3 | 0.972 | 0.122 | -0.010 |" in shown
    out = quick("hmc/posteriors.toml", tmp_path, "digits/*/mc_dropout/0", "digits/*/wide_hmc, temperature 0.1/0")
    found = tables.Results.of_bench(out)
    assert set(found.values("mc_dropout", "digits", "total_variation", "corrupted")) == {0}
    assert found.chosen["mc_dropout", "digits"][0] in ("rate 0.05", "rate 0.1", "rate 0.2", "rate 0.4")
    assert not found.values("hmc", "digits", "total_variation"), "the reference is not compared with itself"
    assert found.at("wide_hmc, temperature 0.1", "digits", "nll", "rotation", 45)


def quick(file: str, folder: Path, *cells: str) -> Path:
    """Some cells of an experiment file, trained for a moment."""
    text = (EXPERIMENTS / file).read_text()
    for pattern, short in QUICK.items():
        text = re.sub(pattern, short, text)
    place = folder / Path(file).parent
    shutil.copytree((EXPERIMENTS / file).parent, place, ignore=shutil.ignore_patterns("*.png", "*.csv"))
    (place / Path(file).name).write_text(text)
    target = Place(folder / "out", torch.device("cpu"))
    done = run_bench(place / Path(file).name, target, only=cells, say=lambda _: None)
    assert not done.failed
    return done.out


QUICK = {
    r"epochs = \d+": "epochs = 2",
    r"epochs = \[.*\]": "epochs = [1, 2]",
    r"length = \d+": "length = 5",
    r"warmup = 80": "warmup = 20",
    r"\nchains = \d+": "\nchains = 2",
}


def test_the_second_table_has_all_eight_methods_and_goes_on_where_it_stopped(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second = script("ssvi/second_table.py")
    for name, scale in second.SCALES.items():
        assert len(second.methods(scale, second.training_of(name, scale, "cpu"))) == 8
    words = ["--quick", "--seeds", "1", "--csv", str(tmp_path / "table.csv")]
    words += ["--methods", "RigL", "StructuredBayesianPruning", "--priors", str(tmp_path / "priors.csv")]
    assert second.main([*words, "--choose"]) == 0
    priors = second.read(tmp_path / "priors.csv")
    assert [float(row["precision"]) for row in priors] == 2 * [*second.PRECISIONS]
    best = min(priors[:3], key=lambda row: float(row["nll"]))
    assert second.chosen_precision("digits", "RigL", priors) == float(best["precision"])
    with pytest.raises(SystemExit, match="--choose first"):
        second.chosen_precision("cifar10", "RigL", priors)
    diverged = [{"problem": "cifar10", "method": "AEB", "precision": "1", "nll": "inf"}]
    with pytest.raises(ValueError, match="diverged with every prior"):
        second.chosen_precision("cifar10", "AEB", diverged)
    assert second.main(words) == 0
    rows = second.read(tmp_path / "table.csv")
    assert [row["method"] for row in rows] == ["RigL", "StructuredBayesianPruning"]
    assert rows[1]["left"].startswith("1: ")
    for column in ("accuracy", "nll", "bytes", "training_flops", "seconds", "predict", "pass"):
        assert all(float(row[column]) > 0 for row in rows)
    assert second.main(words) == 0
    assert len(second.read(tmp_path / "table.csv")) == 2
    assert "| RigL |" in capsys.readouterr().out


def test_supports_are_those_of_the_draws_and_renamed_channels_change_no_more_than_their_order(
    script: Callable[[str], ModuleType], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Overlaps of two small posteriors, against the weights that are not zero in their draws."""
    overlap = script("ssvi/overlap.py")
    active = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        module = resnet18(3, 10, 4)
        rows = TensorDataset(torch.randn(20, 3, 32, 32), torch.arange(20) % 10)
        task = caveat.Task(module, DataLoader(rows, 10), caveat.Categorical(), caveat.GaussianPrior(1.0))
        method = caveat.SSVI(density=0.2, training=caveat.Training(epochs=1))
        posterior = caveat.fit(task, method, seed=seed, folder=tmp_path / f"{seed}", progress=False)
        (draw,) = posterior.sample(1)
        active.append({name.removesuffix(".weight"): weight != 0 for name, weight in draw.items()})
    overlap.main([str(tmp_path / "0"), str(tmp_path / "1"), "--renamings", "50", "--csv", str(tmp_path / "o.csv")])
    with (tmp_path / "o.csv").open(newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 21, "nineteen convolutions that are sparse, the head, and all of them"
    assert "| 0 | 1 | all |" in capsys.readouterr().out
    for line in lines[:-1]:
        first, second = (masks[line["layer"]] for masks in active)
        assert int(line["shared"]) == int((first & second).sum())
        assert float(line["overlap"]) == pytest.approx(int((first & second).sum()) / int(first.sum()), abs=1e-5)
        assert float(line["chance"]) == pytest.approx(float(second.double().mean()), abs=1e-5)
    assert sum(int(line["shared"]) for line in lines[:-1]) == int(lines[-1]["shared"])
    assert float(lines[-1]["renamed_mean"]) == pytest.approx(float(lines[-1]["chance"]), abs=0.02)
    support = overlap.Support.read(tmp_path / "0")
    assert float(overlap.overlaps(support, support, 2)[-1]["overlap"]) == 1
    renamed = support.renamed(torch.Generator().manual_seed(1))
    head, mask = renamed["head"], support.masks["head"]
    assert not torch.equal(head, mask)
    assert torch.equal(head.sum(1), mask.sum(1)), "classes keep their names"
    assert torch.equal(head.sum(0).sort().values, mask.sum(0).sort().values)
    # What is added to one another is renamed alike: outputs of a stage's convolutions, with the inputs of its next one.
    channels = [
        torch.cat([masks["stages.3.0.body.3"].sum(1).flatten(1), masks["stages.3.1.body.0"].sum(0).flatten(1)], 1)
        for masks in (support.masks, renamed)
    ]  # [32, 18]: how many weights write a channel and read it, at each place of their kernels
    assert channels[0].tolist() != channels[1].tolist()
    assert sorted(channels[0].tolist()) == sorted(channels[1].tolist())


def test_the_toy_has_two_evidences_and_each_method_the_one_that_its_page_names(
    script: Callable[[str], ModuleType],
) -> None:
    """`Laplace` that of the trained weights, `SampledLaplace` that of the linear model: maxima found in float64."""
    toy = script("sampled_laplace/toy.py")
    torch.manual_seed(0)
    x, y = toy.rows()
    likelihood, prior = caveat.Gaussian(noise=toy.NOISE), caveat.GaussianPrior(1.0)
    task = caveat.Task(caveat.models.mlp(1, 1, (50, 50)), TensorDataset(x, y), likelihood, prior)
    training = caveat.Training(epochs=500, learning_rate=1e-2)
    start = caveat.fit(task, caveat.MAP(training=training), seed=0, progress=False)
    features = toy.features(start, x).double() / toy.NOISE  # [N, d]
    weights = torch.cat([part.flatten() for part in start.state["params"].values()]).double()
    residuals = (y - start.predict(x).mean.reshape(y.shape)).double().flatten() / toy.NOISE
    targets = residuals + features @ weights  # of the linear model, whose features are the network's derivatives
    values, vectors = torch.linalg.eigh(features @ features.T)
    values = values.clamp_min(0)
    alphas = torch.logspace(-3, 3, 6001, dtype=torch.float64)
    log_det = (1 + values / alphas[:, None]).log().sum(1)  # of the posterior's precision over the prior's
    at_trained = -(alphas * weights.square().sum() + log_det) / 2
    # with the linear model's mean it is the density of that model's targets, N(0, I + features features^T / alpha)
    at_mean = -((vectors.T @ targets).square() / (1 + values / alphas[:, None])).sum(1) / 2 - log_det / 2
    trained, of_mean = (float(alphas[evidence.argmax()]) for evidence in (at_trained, at_mean))
    many = Tuning(samples=64)
    for method, alpha, error in (
        (caveat.Laplace(structure="full", precision="evidence"), trained, 0.01),
        (caveat.SampledLaplace(first_precision=toy.FIRST, tuning=many), of_mean, 0.03),
        (caveat.SampledLaplace(first_precision=toy.FIRST), of_mean, 0.13),  # sqrt(2 / (8 samples x 14 directions))
    ):
        found = caveat.fit(task, method, start=start, seed=0, progress=False).info.diagnostics["prior_precision"]
        assert found == pytest.approx(alpha, rel=error)
    with (EXPERIMENTS / "sampled_laplace" / "toy.csv").open(newline="") as file:
        shown = {row["posterior"]: float(row["precision"]) for row in csv.DictReader(file) if row["precision"]}
    assert shown["exact, by its own evidence"] == pytest.approx(trained, rel=0.03)
    assert shown["samples"] == pytest.approx(of_mean, rel=0.13), "found with eight samples"


def test_docstrings_are_told_apart_by_family_without_a_row_in_two_places(script: Callable[[str], ModuleType]) -> None:
    docstrings = script("adapters/docstrings.py")
    text = docstrings.read(60, seed=0)
    known, tested, other = (
        {tuple(row.tolist()) for row in part[0]["input_ids"]} for part in (text.train, text.test, text.other_modules)
    )
    assert len(known) > 50
    assert len(tested & known) <= 3, "but for docstrings that two functions have in their first words"
    assert len(other & known) <= 3
    assert set(text.train[1].tolist()) == set(range(6))
    ends = text.test[0]["attention_mask"].sum(1) - 1
    assert bool((text.test[0]["input_ids"].gather(1, ends[:, None]) == docstrings.ASK).all())
    again, others = docstrings.read(60, seed=0), docstrings.read(60, seed=1)
    assert torch.equal(text.train[0]["input_ids"], again.train[0]["input_ids"])
    assert not torch.equal(text.train[0]["input_ids"], others.train[0]["input_ids"])
    shorter = text.dropped[0.6][0]["attention_mask"].sum(1) <= text.test[0]["attention_mask"].sum(1)
    assert float(shorter.double().mean()) == 1


def test_docstrings_are_the_same_whatever_else_has_been_imported(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    docstrings = script("adapters/docstrings.py")

    def added() -> None:
        """Eight words and more that another package has put into a class of logging."""

    before = docstrings.texts("logging")
    assert len(before) > 50
    added.__module__ = "transformers.utils.logging"
    monkeypatch.setattr(logging.Logger, "warning_once_more", added, raising=False)
    assert docstrings.texts("logging") == before


def test_adapters_are_tuned_in_as_many_steps_whatever_the_rows(script: Callable[[str], ModuleType]) -> None:
    vit = script("adapters/vit.py")
    for rows, trained, epoch in ((1000, 900, 15), (5000, 4500, 71)):
        offered = vit.methods(False, rows)
        assert offered["map"].training.epochs * epoch == pytest.approx(vit.STEPS, rel=0.06)
        assert offered["swag"].training.epochs >= offered["swag"].rank
        plan = offered["sgmcmc"].plan(trained, vit.BATCH)
        assert (plan.batch, plan.steps) == (vit.BATCH, epoch)
        assert plan.burn_in * epoch >= 1000
        assert set(offered) == set(vit.methods(True, rows))


def test_pages_on_adapters_are_what_their_results_give(script: Callable[[str], ModuleType]) -> None:
    pages = script("adapters/pages.py")
    for page in pages.PAGES:
        text = page.read_text()
        assert text == pages.filled(text), f"{page.name}: run `python experiments/adapters/pages.py`"
    named = {name for page in pages.PAGES for name in pages.PART.findall(page.read_text())}
    assert named == set(pages.PARTS)


def test_a_method_is_called_better_where_its_differences_to_the_tempered_point_are(
    script: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = script("adapters/pages.py")
    values = {
        pages.TEMPERED: (1.0, 2.0, 3.0),
        "lower": (0.9, 1.87, 2.9),
        "higher": (1.1, 2.13, 3.1),
        "now and then": (0.9, 1.8, 2.95),  # below by 3.6 standard errors, which Student's t asks 4.3 of
        "twice": (0.0, 0.0),
    }
    lines = [
        {"on": on, "method": method, "seed": str(seed), "nll": str(value), "joint_nll": str(value), "ece": str(value)}
        | {"rows": "1000"}
        | dict.fromkeys(("accuracy", "fit_seconds", "stored_mb", "auroc_entropy"), "1")
        for on in ("test", "other modules", "words left out 0.6", "reference paragraphs", "fog 5", "mnist")
        for method, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    sides = pages.verdicts(pages.scores(lines, pages.NLL))
    assert sides == {
        "better": ["`lower` (-0.11)"],
        "worse": ["`higher` (+0.11)"],
        "not told apart": ["`now and then` (-0.12)"],
        pages.FEW: ["`twice` (-1.50)"],
    }
    monkeypatch.setattr(pages, "read", lambda name: lines)
    assert "| lower | 3 | 1.000 ± 0.000 | 1.890 ± 0.577 |" in pages.language_table()
    assert "- **NLL of single rows**. better: `lower` (-0.11). worse: `higher`" in pages.language_verdicts()
    assert "nothing is said of them: `twice`." in pages.language_verdicts()
    assert "- ECE of single rows: `lower` (-0.11)." in pages.language_in_short()
    assert pages.vit_state().startswith("1,000 training images:")
    assert "| NLL, fog 5 | AUROC, mnist | fit, s | stored MB |" in pages.vit_state()
    assert "ahead of the tempered point. Differences to it in nats: better: `lower` (-0.11)" in pages.vit_state()
    for left_out, said in ((["lower"], "**no posterior is seen to be ahead"), (["lower", "now and then"], "too few")):
        few = [line for line in lines if line["method"] not in (*left_out, "higher" if "too few" in said else "")]
        monkeypatch.setattr(pages, "read", lambda name, few=few: few)
        assert f"corruptions and severities, {said}" in pages.vit_state()
        assert "- NLL of single rows: **none**; the lowest mean is that of twice." in pages.language_in_short()
