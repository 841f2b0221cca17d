"""The main job: every method on scikit-learn's digits, clean, rotated and out of distribution, in a table and a page.

A small network (64-32-10, SiLU) keeps it short; each method runs its `quick` instance. The point is not the best score
but to see, side by side, what each posterior says when the input is one the network was never trained on, and how far
it is from the posterior that HMC found for the same network, prior and rows, which comes with the package.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from caveat import data, report
from caveat.engine.training import Training
from caveat.evaluate import ReferenceSet, evaluate
from caveat.files import new_folder
from caveat.fitting import fit
from caveat.methods import discover
from caveat.posterior import Posterior
from caveat.references import PACKAGED, RECIPES, load_reference
from caveat.task import Task

__all__ = ["run_demo"]

ANGLES = range(15, 91, 15)
OOD = ("photographs", "permuted")


def run_demo(folder: Path, *, seed: int = 0, device: torch.device | str = "cpu", progress: bool = True) -> str:
    """Fit and score every discovered method; write the results and the page; returns the table."""
    if folder.exists() and not _is_of_demo(folder):
        raise FileExistsError(f"{folder} exists, and the demo did not make it: choose another --out, or delete it")
    with _one_thread():
        return _results(folder, seed, device, progress)


def _results(folder: Path, seed: int, device: torch.device | str, progress: bool) -> str:
    digits = data.load("digits")
    task = RECIPES["digits"].task(digits, seed)  # the network, prior and rows that the reference is about
    tests = data.conditions(digits, angles=ANGLES, ood=OOD)
    reference = load_reference(PACKAGED / "digits")  # the same for everyone, whatever was built on this machine
    with new_folder(folder, overwrite=_is_of_demo(folder)) as place:
        for name, label, posterior in _posteriors(task, seed, device, progress):
            posterior.save(place / name / "posterior")
            evaluate(
                posterior,
                tests.inside,
                ood=tests.ood,
                reference=reference,
                folder=place / name,
                label=label,
                class_names=digits.class_names,
                progress=progress,
            )
        runs = report.read(place)
        report.write_csv(runs, place / "results.csv")
        report.write(place, title="Caveat: every method on digits")
        return f"{report.format_text(report.table(runs))}\n\n{_about(reference)}"


def _is_of_demo(folder: Path) -> bool:
    """Whether a folder is one of the demo, which may be replaced; a page alone may be that of other results."""
    return (folder / "report.html").exists() and (folder / "map_tempered" / "posterior").exists()


@contextmanager
def _one_thread() -> Iterator[None]:
    """The networks are too small for more: threads would wait for one another longer than they work."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _about(reference: ReferenceSet) -> str:
    """What agreement and TV are measured from, and the least that they can be expected to be."""
    floors = reference.facts["floor"]
    rotated = [floor for name, floor in floors.items() if name != "clean"]
    sentences = []
    for group, chosen in (("clean", [floors["clean"]]), ("rotated", rotated)):
        agreement, variation = (
            sum(floor[name]["mean"] for floor in chosen) / len(chosen) for name in ("agreement", "total_variation")
        )
        sentences.append(f"{agreement:.3f} and {variation:.3f} on {group} digits")
    size = f"{reference.chains} chains of {reference.draws} draws"
    return (
        f"Agreement and TV (total variation) are with HMC, a stored run of {size}.\n"
        f"One of its chains against the others has {', '.join(sentences)}."
    )


def _posteriors(task: Task, seed: int, device: torch.device | str, progress: bool) -> Any:
    """Every method's quick instance as (folder name, label, posterior), MAP first since others start from it."""
    methods = discover()
    point: Posterior = fit(task, methods["map"].quick, seed=seed, device=device, progress=progress)
    yield "map", "MAP", point
    tempered = methods["map"](temperature=True, training=Training(epochs=0))
    yield "map_tempered", "MAP tempered", fit(task, tempered, start=point, seed=seed, device=device, progress=progress)
    for name, method in methods.items():
        if name != "map":
            start = point if method.starts_from == "trained" else None
            yield (
                name,
                method.__name__,
                fit(task, method.quick, start=start, seed=seed, device=device, progress=progress),
            )
