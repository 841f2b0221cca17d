"""A script that kills fits and benches at chosen steps, calls them again, and looks at what there is then.

    python kill_runs.py FOLDER KILLS SEED WORK...      (WORK is a method, or one of `OTHERS`)

Processes are forked from this one, in which torch is loaded and has computed nothing. A call that was killed once, or
twice, must end with the files of one that was not, bit for bit, and nothing beside them. Prints how many kills of each.
"""

import contextlib
import importlib
import io
import json
import os
import random
import shutil
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
importlib.import_module("torch._dynamo")  # a fit would, after the fork

import caveat  # noqa: E402
from caveat.bench import Place, run_bench  # noqa: E402
from caveat.cli import main as command_line  # noqa: E402
from caveat.engine.run import Run  # noqa: E402
from caveat.storage import read_json  # noqa: E402
from tests.files.kills import killed_at  # noqa: E402
from tests.mutated_folders import inputs, module, on_frozen_layers  # noqa: E402
from tests.test_contract import METHODS, short  # noqa: E402

NEVER = 10**9
EXPERIMENT = """
data = ["table.csv"]
models = ["mlp"]
[map]
epochs = 2
[methods.swag]
rank = 0
training.epochs = 2
[methods.mc_dropout]
rate = 0.1
training.epochs = 2
tune.rate = [0.1, 0.2]
"""


def fit(name: str, folder: Path) -> None:
    """The call that is killed: a checkpoint at every chance."""
    Run.checkpoint_due = lambda self: self.folder is not None  # type: ignore[method-assign]
    x = inputs()
    task = caveat.Task(module(), (x, x[:, :2] * 2 + 1), caveat.Gaussian(), validation=0.2)
    start = caveat.MAP(training=caveat.Training(epochs=20)) if METHODS[name].starts_from == "trained" else None
    try:
        caveat.fit(task, short(METHODS[name]), start=start, folder=folder / "posterior", progress=False)
    except FileExistsError:
        assert (folder / "posterior" / "posterior.json").exists()


def bench(folder: Path) -> None:
    """The bench that is killed."""
    Run.checkpoint_due = lambda self: self.folder is not None  # type: ignore[method-assign]
    place = Place(folder / "out", torch.device("cpu"))
    done = run_bench(folder.parent / "tiny.toml", place, say=lambda text: None)
    assert not done.failed, done.failed


def table(folder: Path) -> None:
    """A table from its text and blanks to a page, each command as a user gives it again."""
    people, posterior, calibrated = folder.parent / "people.csv", folder / "posterior", folder / "calibrated"
    results, page = folder / "results", folder / "page.html"
    commands: list[list[object]] = [
        ["fit", "map", "--data", people, "--out", posterior, "--training.epochs", "2"],
        ["calibrate", "--posterior", posterior, "--out", calibrated],
        ["evaluate", "--posteriors", calibrated, "--out", results],
        ["report", "--results", results, "--out", page],
    ]
    for command in commands:
        said = io.StringIO()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = command_line([*map(str, command), "--quiet"])
        assert code == 0 or "exists: choose another" in said.getvalue(), (command, said.getvalue())


def frozen_base(folder: Path) -> None:
    """Members over a frozen base; the file that goes out has no base, and replaces one that has."""
    folder = folder / "adapters"
    Run.checkpoint_due = lambda self: self.folder is not None  # type: ignore[method-assign]
    x = inputs()
    task = caveat.Task(on_frozen_layers(), (x, x[:, :2] * 2 + 1), caveat.Gaussian(), validation=0.2)
    members = caveat.Ensemble(of=short(METHODS["swag"]), members=2, training=caveat.Training(epochs=5))
    with contextlib.suppress(FileExistsError):
        caveat.fit(task, members, folder=folder / "fitted", progress=False)
    caveat.load(folder / "fitted", on_frozen_layers()).save(folder / "shipped", overwrite=True)
    posterior = caveat.fit(task, short(METHODS["map"]), progress=False)
    posterior.calibrate((x, x[:, :2] * 2 + 1)).save(folder / "shipped", overwrite=True, base="without")


OTHERS = {"bench": bench, "table": table, "frozen_base": frozen_base}


def content(folder: Path) -> dict[str, str]:
    """Every file, with what is to be the same: tensors by their digest, results without what time they took."""
    files: dict[str, str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        files[name] = ""
        if path.name == "posterior.json":
            saved = read_json(path)
            files[name] = json.dumps([saved[key] for key in ("digest", "calibration", "base", "method", "names")])
        if path.name == "metrics.json":
            files[name] = json.dumps(read_json(path)["data"])
        if path.name == "results.csv":
            files[name] = "\n".join(line for line in path.read_text().splitlines() if not line.endswith(",cost"))
    return files


def kills_of(work: Callable[[Path], None], place: Path, kills: int, chance: random.Random) -> int:
    """Kill the work at steps spread over all that it takes, each in a folder of its own; returns how many kills."""
    whole = place / "whole"
    whole.mkdir(parents=True)
    total = steps_of(partial(work, whole), whole)
    expected = content(whole)
    steps = sorted(chance.sample(range(total), min(kills, total)))
    done = 0
    for step in steps:
        folder = place / f"killed-{step}"
        folder.mkdir()
        assert killed_at(step, partial(work, folder), folder), f"step {step} of {total} was not reached"
        done += 1
        if chance.random() < 0.2:  # and the next call too
            done += killed_at(chance.randrange(total), partial(work, folder), folder)
        assert not killed_at(NEVER, partial(work, folder), folder)
        found = content(folder)
        assert found.keys() == expected.keys(), (
            f"{place.name}, killed before step {step}: {found.keys() ^ expected.keys()}"
        )
        different = [name for name in found if found[name] != expected[name]]
        assert not different, f"{place.name}, killed before step {step}: {different} are not as without a kill"
        shutil.rmtree(folder)
    return done


def steps_of(work: Callable[[], None], folder: Path) -> int:
    """How many steps on files the work takes."""
    counted = folder.with_name(f"{folder.name}.steps")
    assert not killed_at(NEVER, work, folder, counted)
    return int(counted.read_text())


def main() -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    place, kills, chance = Path(sys.argv[1]).resolve(), int(sys.argv[2]), random.Random(int(sys.argv[3]))
    os.environ["XDG_STATE_HOME"] = str(place / "state")
    numbers = "a,b,y\n" + "".join(f"{i % 7},{i % 5},{'uv'[i % 2]}\n" for i in range(60))
    people = "age,town,paid\n" + "".join(f"{i % 9 or ''},{['Ulm', 'Bonn'][i % 2]},${i % 11}.50\n" for i in range(200))
    counts: dict[str, int] = {}
    for name in sys.argv[4:]:
        here = place / name
        here.mkdir()
        (here / "table.csv").write_text(numbers)
        (here / "people.csv").write_text(people)
        (here / "tiny.toml").write_text(EXPERIMENT)
        work = OTHERS.get(name, partial(fit, name))
        counts[name] = kills_of(work, here, kills, chance)
        print(name, counts[name], file=sys.stderr, flush=True)
    print(json.dumps(counts))


if __name__ == "__main__":
    main()
