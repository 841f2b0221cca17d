"""Methods of other packages: the package of docs/add_a_method.md, installed by pip, and packages that are broken."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import caveat
from caveat import methods
from caveat.bench.plan import cells_of, read_experiment
from caveat.cli import main

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "add_a_method.md").read_text()


def blocks(language: str) -> list[str]:
    """The page's blocks in a language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)


PYPROJECT, EXPERIMENT = blocks("toml")
METHOD = blocks("python")[0]
COMMANDS = [line for line in blocks("sh")[0].splitlines() if line.startswith("caveat ")]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder to import from, in which pip has installed the page's package."""
    source, target = tmp_path_factory.mktemp("fixed-gaussian"), tmp_path_factory.mktemp("site")
    (source / "pyproject.toml").write_text(PYPROJECT)
    (source / "fixed_gaussian.py").write_text(METHOD)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-index", "--no-deps"]
    command = [*pip, "--no-build-isolation", "--target", str(target), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return target


def python(place: Path, folder: Path, *arguments: str) -> str:
    """What a new Python prints that finds the package there and has nothing to say against it."""
    paths = os.pathsep.join([str(place), str(ROOT)])
    environment = os.environ | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "is left out" not in done.stderr
    return done.stdout


FIT_SAVE_LOAD = """
import sys, torch, caveat
from torch import nn

model = nn.Linear(3, 2)
x = torch.randn(80, 3, generator=torch.Generator().manual_seed(0))
task = caveat.Task(model, (x, (x[:, 0] > 0).long()), caveat.Categorical())
point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=5)), progress=False)
point.save("point")
caveat.load("point", model)
assert "fixed_gaussian" not in sys.modules, "only a method of that package needs it"

if sys.argv[1] == "fit":
    from fixed_gaussian import FixedGaussian

    posterior = caveat.fit(task, FixedGaussian(std=0.2), start=point, progress=False)
    posterior.save("posterior")
    torch.save(posterior.predict(x).samples, "samples.pt")
else:
    loaded = caveat.load("posterior", model)
    assert repr(loaded.method) == "FixedGaussian(std=0.2, default_draws=30)"
    assert torch.equal(loaded.predict(x).samples, torch.load("samples.pt"))
    assert list(caveat.methods.discover())[-1] == caveat.methods.method_name(loaded.method) == "fixed_gaussian"
    assert not hasattr(caveat, "FixedGaussian")
"""


def test_an_installed_package_fits_saves_and_loads(place: Path, tmp_path: Path) -> None:
    for step in ("fit", "load"):
        (tmp_path / step).mkdir()
        script = FIT_SAVE_LOAD.replace('"point"', f'"{step}/point"')
        python(place, tmp_path, "-c", script, step)


RUN_COMMANDS = """
import sys
from caveat.cli import main

for line in sys.argv[1:]:
    assert main([*line.split()[1:], "--quiet"]) == 0, line
"""


def test_the_commands_and_the_experiment_of_the_page_run(place: Path, tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    printed = python(place, tmp_path, "-c", RUN_COMMANDS, *COMMANDS, "caveat bench experiment.toml --out bench")
    assert "Gaussian noise of one fixed scale around the trained weights. (of the package fixed_gaussian)" in printed
    assert json.loads((tmp_path / "posteriors/noisy/posterior.json").read_text())["method"]["fields"]["std"] == 0.1
    [metrics] = (tmp_path / "results").glob("*/metrics.json")
    assert json.loads(metrics.read_text())["method"]["name"] == "fixed_gaussian"
    results = [*(tmp_path / "bench").glob("cells/digits-mlp-fixed_gaussian-seed0-*/result.json")]
    assert len(results) == 1


Installer = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Installer]:
    """Makes a package with a module and entry points importable, as if it were installed."""
    modules = []

    def write(package: str, entries: dict[str, str], code: str = "") -> None:
        module = package.replace("-", "_")
        (tmp_path / f"{module}.py").write_text(HEADER + code)
        described = tmp_path / f"{module}-0.1.dist-info"
        described.mkdir()
        (described / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 0.1\n")
        lines = [f"{name} = {module}:{cls}" for name, cls in entries.items()]
        (described / "entry_points.txt").write_text("\n".join([f"[{methods.ENTRY_POINTS}]", *lines, ""]))
        modules.append(module)
        forget()

    def forget() -> None:
        methods.discover.cache_clear()
        methods._plugins.cache_clear()

    monkeypatch.syspath_prepend(tmp_path)
    yield write
    forget()
    for module in modules:
        sys.modules.pop(module, None)


HEADER = """
from dataclasses import dataclass, field, replace
import caveat
from caveat import MAP, Method, Training
"""
GOOD = """
@dataclass(frozen=True)
class {name}(MAP):
    "A point."
{name}.quick = {name}(training=Training(epochs=1))
"""
# A method that has everything, for the cases below to take something from.
WHOLE = """
@dataclass(frozen=True)
class Broken(Method):
    "A method."
    rate: float = 0.1
    starts_from = "scratch"
    default_draws = 1
    def memory(self, network): return 0
    def fit(self, task, start, run): return start, run.info(task.network, "point")
    def draws(self, state, network, n, rng): yield from [state["params"]] * n
Broken.quick = Broken()
"""


def test_a_class_needs_no_more_than_the_table_says(install: Installer) -> None:
    install("whole", {"whole": "Broken"}, WHOLE)
    assert methods.discover()["whole"].__module__ == "whole"


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ('"A method."', "import no_such_module", "cannot be imported (ModuleNotFoundError: No module named"),
        ("class Broken(Method)", "class Other(Method)", "cannot be imported (NameError"),
        ("Broken.quick = Broken()", "del Broken", "cannot be imported (AttributeError"),
        ("Broken.quick = Broken()", "Broken = 3", "3 is not a class that inherits from caveat.Method: let it"),
        ("class Broken(Method)", "class Broken", "is not a class that inherits from caveat.Method"),
        ("@dataclass(frozen=True)", "", "Broken is not a frozen dataclass: put @dataclass(frozen=True) on it"),
        ("(frozen=True)", "", "Broken is not a frozen dataclass"),
        ('"scratch"', '"nothing"', "Broken.starts_from is not one of trained, scratch, fresh"),
        ("default_draws", "n_draws", "Broken has no default_draws: add it"),
        ("def memory", "def memories", "Broken has no memory: add it"),
        ("def fit", "def fits", "Broken has no fit: add it"),
        ("def draws", "def samples", "Broken has no draws: add it"),
        ("rate: float = 0.1", "rate: float", "Broken() cannot be made"),
        ("rate: float", 'rate: "Rate"', "Broken() cannot be made (NameError: name 'Rate' is not defined)"),
        ("Broken.quick = Broken()", "", "Broken.quick is not a Broken: set it"),
    ],
)
def test_what_is_not_a_method_is_left_out_and_said(install: Installer, old: str, new: str, complaint: str) -> None:
    assert old in WHOLE
    code = WHOLE.replace(old, new)
    if "float\n" in code:  # with no default, no instance can be made here either
        code = code.replace("Broken.quick = Broken()", "")
    install("broken-one", {"broken": "Broken"}, code)
    install("good-one", {"good": "Good"}, GOOD.format(name="Good"))
    with pytest.warns(UserWarning, match="broken-one") as warned:
        found = methods.discover()
    assert found.keys() - methods.built_in().keys() == {"good"}
    [message] = [str(warning.message) for warning in warned]
    assert message.startswith("broken-one: its method 'broken' is left out. ")
    assert complaint in message
    assert message.endswith(", or run: pip uninstall broken-one")
    assert methods.discover() is found, "said once"


@pytest.mark.parametrize(
    ("entry", "cls", "complaint"),
    [
        ("map", "Good", "caveat has a method of that name, which is used: rename the entry point"),
        ("good", "SWAG", "caveat has a class called SWAG, which is used: rename the class"),
        ("a good one", "Good", "a method's name is letters, digits and underscores: rename the entry point"),
    ],
)
def test_what_caveat_has_keeps_its_name(install: Installer, entry: str, cls: str, complaint: str) -> None:
    install("good-one", {entry: cls}, GOOD.format(name=cls))
    with pytest.warns(UserWarning, match=re.escape(f"good-one: its method {entry!r} is left out. {complaint}")):
        assert methods.discover() == methods.built_in()


def test_a_name_that_two_packages_claim_belongs_to_neither(install: Installer) -> None:
    install("one", {"same": "One", "apart": "Apart"}, GOOD.format(name="One") + GOOD.format(name="Apart"))
    install("other", {"same": "Other"}, GOOD.format(name="Other"))
    with pytest.warns(UserWarning, match="left out") as warned:
        found = methods.discover()
    assert found.keys() - methods.built_in().keys() == {"apart"}
    first, second = (str(warning.message) for warning in warned)
    assert first.startswith("one: its method 'same' is left out. other has a method of that name as well, and neither")
    assert second.startswith("other: its method 'same' is left out. one has a method of that name as well, and neither")


def test_so_does_the_name_of_a_class_but_one_class_may_have_two_names(install: Installer) -> None:
    install("one", {"first": "Same", "apart": "Apart", "alias": "Apart"}, GOOD.format(name="Same"))
    install("other", {"second": "Same"}, GOOD.format(name="Same"))
    module = Path(sys.path[0]) / "one.py"
    module.write_text(module.read_text() + GOOD.format(name="Apart"))
    with pytest.warns(UserWarning, match="left out") as warned:
        found = methods.discover()
    assert found.keys() - methods.built_in().keys() == {"apart", "alias"}
    first, second = (str(warning.message) for warning in warned)
    assert first.startswith("one: its method 'first' is left out. the method 'second' has a class called Same too")
    assert second.startswith("other: its method 'second' is left out. the method 'first' has a class called Same too")


KNOBS = """
@dataclass(frozen=True)
class Depth:
    metres: float = 1.0

@dataclass(frozen=True)
class Gaussian:  # as a likelihood is called
    depths: tuple[Depth | float, ...] = (Depth(),)

@dataclass(frozen=True)
class Training(Training):  # as caveat's own is called
    humour: float = 0.0

@dataclass(frozen=True)
class {name}(MAP):
    "A point."
    training: Training = Training(epochs=1)
    shape: Gaussian | None = None
{name}.quick = {name}()
"""


def test_knobs_are_decoded_as_those_of_the_method_itself(install: Installer, tmp_path: Path) -> None:
    install("deep", {"deep": "Deep"}, KNOBS.format(name="Deep"))
    install("other", {"other": "Other"}, KNOBS.format(name="Other"))
    deep = methods.discover()["deep"]
    module = sys.modules["deep"]
    shape = module.Gaussian((module.Depth(3.0), 2.0))
    method = deep(training=module.Training(epochs=2, humour=1.0), shape=shape)
    model = nn.Linear(3, 1)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    task = caveat.Task(model, (x, x[:, :1]), caveat.Gaussian())
    posterior = caveat.fit(task, method, progress=False)
    posterior.save(tmp_path / "posterior")
    loaded = caveat.load(tmp_path / "posterior", model)
    assert loaded.method == method
    assert loaded.network.likelihood == caveat.Gaussian()
    assert type(loaded.method.shape.depths[0]) is module.Depth


def test_the_command_line_and_experiments_go_on_beside_a_broken_package(
    install: Installer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = GOOD.format(name="Good").replace('"A point."', '"A point."\n    seed: int = 3')
    install("good-one", {"good": "Good"}, code)
    install("broken-one", {"broken": "Broken"}, "import no_such_module")
    with pytest.warns(UserWarning, match="broken-one"):
        assert main(["methods", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert listed["good"]["package"] == "good_one"
    assert listed["map"]["package"] == "caveat"
    assert "broken" not in listed
    with pytest.raises(SystemExit) as stop:
        main(["fit", "good", "--help"])
    assert stop.value.code == 0
    shown = capsys.readouterr().out
    assert "--method.seed INT" in shown, "--seed is an option of all verbs"
    assert "--seed INT" in shown.replace("--method.seed", "")
    text = 'data = ["digits"]\nmodels = ["mlp"]\nseeds = [0]\n[methods.{}]\ntraining.epochs = 2\n'
    (tmp_path / "good.toml").write_text(text.format("good"))
    assert any("-good-seed0-" in cell.name for cell in cells_of(read_experiment(tmp_path / "good.toml")))
    (tmp_path / "broken.toml").write_text(text.format("broken"))
    with pytest.raises(ValueError, match=r"methods\.broken: there is no 'broken'.*good"):
        read_experiment(tmp_path / "broken.toml")


def test_a_posterior_whose_package_is_gone_says_what_to_do(install: Installer, tmp_path: Path) -> None:
    install("gone", {"gone": "Gone"}, GOOD.format(name="Gone"))
    model = nn.Linear(3, 1)
    x = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    posterior = caveat.fit(
        caveat.Task(model, (x, x[:, :1]), caveat.Gaussian()), methods.discover()["gone"].quick, progress=False
    )
    posterior.save(tmp_path / "posterior")
    (tmp_path / "gone-0.1.dist-info" / "entry_points.txt").unlink()
    methods.discover.cache_clear()
    methods._plugins.cache_clear()
    with pytest.raises(caveat.CorruptFile, match=r"install the package with the method.*classes=\[Gone\]"):
        caveat.load(tmp_path / "posterior", model)
    assert caveat.load(tmp_path / "posterior", model, classes=[type(posterior.method)]).method == posterior.method
