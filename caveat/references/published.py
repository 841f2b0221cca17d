"""Published predictions as a reference: what a sampler of others says about the test rows of a data set.

A run of full-batch HMC on a residual network costs a year of a machine; its predictions are a table that anyone can
compare with. `import_reference` reads such a table, finds which test row each of its rows is about, and refuses it
where that cannot be: an order that is wrong makes every posterior look far away. `fetch_reference` downloads one that
is known by name.
"""

import hashlib
import math
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from caveat import __version__, data
from caveat.data.download import fetch
from caveat.evaluate.fidelity import ReferenceSet, identity, noise_floor, read_reference
from caveat.evaluate.metrics import mean_and_stderr
from caveat.network import Network
from caveat.predictive import CategoricalPredictive
from caveat.priors import GaussianPrior
from caveat.recipe import Recipe
from caveat.references.places import new_place
from caveat.references.predictions_table import in_order, probabilities

__all__ = ["PUBLISHED", "Origin", "Published", "fetch_reference", "import_reference"]

LEAST = 1e-30  # of a probability, where its logarithm is taken
SURELY = 5.0  # standard errors by which a reference must be better than the most frequent class


@dataclass(frozen=True)
class Origin:
    """What published predictions are of, as far as it is known."""

    data: str  # the data set whose test rows they are about
    model: str | None = None  # the network that was sampled: a name, or `file.py:function`
    prior_precision: float | None = None  # of the Gaussian prior on every weight
    draws: int = 1  # of each chain
    source: str = ""  # who made them, and where they were published


@dataclass(frozen=True)
class Published:
    """A table of predictions on the web, and what is known of it."""

    origin: Origin
    base_url: str
    predictions: str  # the file with the probabilities
    inputs: str | None = None  # the file with the test inputs in the order of the probabilities
    inputs_url: str | None = None
    checksums: Mapping[str, str | None] = field(default_factory=dict)  # as pooch writes them; none published: None
    scores: Mapping[str, float] = field(default_factory=dict)  # what its publishers, or others, found for it


PUBLISHED = {
    "cifar10_resnet20_frn": Published(
        Origin(
            "cifar10",
            "resnet20_frn",
            5.0,
            source="full-batch HMC of Izmailov et al. (2021) for ResNet-20 with filter response normalisation, no "
            "augmentation; published for the NeurIPS 2021 competition on approximate inference",
        ),
        "https://raw.githubusercontent.com/izmailovpavel/neurips_bdl_starter_kit/"
        "6743c848e5582f1ea60878bd2d71d6367ef826a3/data/cifar10/",
        "probs.csv",
        inputs="cifar10_test_x.csv",
        inputs_url="https://storage.googleapis.com/neurips2021_bdl_competition/",
        scores={"accuracy": 0.914, "nll": 0.277},
    )
}


def import_reference(
    predictions: str | Path,
    origin: Origin,
    *,
    name: str | None = None,
    inputs: str | Path | None = None,
    labels: str | Path | None = None,
    first: int | None = None,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
) -> Path:
    """Store published class probabilities as a reference; returns its folder.

    Args:
        predictions: csv, npy or npz (`probs`), [rows, classes], or [chains, rows, classes].
        origin: what they are of: data, network, prior, sampler, as far as it is known.
        name: of the reference; the file's name unless given.
        inputs: the test inputs in the order of the predictions (csv, npy or npz with `x`), by which rows are found.
            Without them, the predictions are in the data set's own order.
        labels: the test labels in the order of the predictions (csv, npy, or npz with `y`). They are checked against
            the data set's; where the predictions are about some rows alone, they tell which.
        first: says that the predictions are about the test rows from this number on, in the data set's own order.
        out: the folder to write; `name` in CAVEAT_REFERENCES, else in the user's cache, unless given.
        data_dir: where the data set is.
    """
    file = Path(predictions)
    name = file.stem if name is None else name
    place = new_place(name, out)
    rows = _classes_of(origin.data, data_dir)
    probs = probabilities(file, rows.n_outputs)
    probs, mine = in_order(probs, rows, inputs, labels, first)
    x, y = (tensor[mine] for tensor in rows.test.tensors)
    facts = _facts(name, probs, y, origin, rows) | {
        "network": "unknown" if origin.model is None else str(_network(origin.model, origin, rows).module),
        "identity": _identity(origin, rows),
        "published": {
            "source": origin.source,
            "file": file.name,
            "sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
        },
    }
    ReferenceSet(facts, {"clean": {"inputs": x.half(), "probs": probs.float()}}).save(place)
    return place


def fetch_reference(
    name: str,
    *,
    out: str | Path | None = None,
    data_dir: str | Path | None = None,
    base_url: str | None = None,
) -> Path:
    """Download a published reference that is known by name, and store it; returns its folder.

    `base_url` points at a mirror with the same file names.
    """
    if name not in PUBLISHED:
        raise ValueError(f"there is no published reference {name!r}: there are {', '.join(PUBLISHED)}")
    known = PUBLISHED[name]
    place = new_place(name, out)
    _classes_of(known.origin.data, data_dir)  # before a long download: the data set has to be there
    with tempfile.TemporaryDirectory(prefix="caveat-") as folder:
        files = {known.predictions: known.base_url} | (
            {known.inputs: known.inputs_url or known.base_url} if known.inputs else {}
        )
        for file, url in files.items():
            fetch(base_url or url, {file: known.checksums.get(file)}, Path(folder))
        staged = import_reference(
            Path(folder) / known.predictions,
            known.origin,
            name=name,
            inputs=Path(folder) / known.inputs if known.inputs else None,
            out=Path(folder) / name,
            data_dir=data_dir,
        )
        reference = read_reference(staged)
        _check_scores(name, reference.facts["scores"], known.scores)
        return reference.save(place)


def _classes_of(name: str, data_dir: str | Path | None) -> data.DataSet:
    """The data set; one of classes."""
    rows = data.load(name, data_dir)
    if rows.likelihood != "categorical":
        raise ValueError(
            f"published predictions are probabilities of classes, and {name!r} has none: {rows.likelihood}"
        )
    return rows


def _facts(name: str, probs: Tensor, y: Tensor, origin: Origin, rows: data.DataSet) -> dict[str, Any]:
    """What is known of a reference from its predictions; refused where they are not about these rows."""
    chains = [CategoricalPredictive(chain.log()[None]) for chain in probs]
    mixture = probs.mean(0)
    _check_classes(mixture.argmax(-1), y, rows)
    hits = (mixture.argmax(-1) == y).double()
    losses = -mixture.gather(-1, y[:, None])[:, 0].clamp_min(LEAST).log()
    number = torch.arange(len(y))
    scores = {"accuracy": mean_and_stderr(hits, number), "nll": mean_and_stderr(losses, number)}
    most = float(y.bincount().max()) / len(y)
    if scores["accuracy"][0] < most + SURELY * math.sqrt(most * (1 - most) / len(y)):
        raise ValueError(
            f"the predictions are right for {scores['accuracy'][0]:.1%} of the rows, a guess for {most:.1%}: they are "
            "in another order than the data set, or of another one; give the inputs in their order (inputs=, --inputs)"
        )
    as_score = {metric: {"mean": mean, "stderr": error} for metric, (mean, error) in scores.items()}
    floor = {metric: {"mean": score.mean, "stderr": score.stderr} for metric, score in noise_floor(chains).items()}
    return {
        "name": name,
        "kind": "classification",
        "chains": len(probs),
        "draws": origin.draws,
        "data": {"name": origin.data, "preprocessing": rows.preprocessing},
        "versions": {"caveat": __version__},
        "floor": {"clean": floor},
        "scores": as_score,
    }


def _check_classes(labels: Tensor, y: Tensor, rows: data.DataSet) -> None:
    """Refuse predictions that become right by an exchange of two columns: their classes are in another order."""
    classes = rows.n_outputs
    counts = (classes * y + labels).bincount(minlength=classes**2).view(classes, classes).double()  # [true, predicted]
    right = counts.diagonal()
    gained = counts + counts.T - right - right[:, None]  # rows that an exchange would make right, less those made wrong
    clear = gained > SURELY * (counts + counts.T + right + right[:, None]).sqrt()
    if bool(clear.any()):
        one, other = divmod(int(gained.argmax()), classes)
        names = rows.class_names
        raise ValueError(
            f"the columns are in another order than the classes: with {names[one]!r} and {names[other]!r} exchanged, "
            f"{int(gained.max()):,} more of {len(y):,} rows would be right; give them in the order {', '.join(names)}"
        )


def _network(model: str, origin: Origin, rows: data.DataSet) -> Network:
    recipe = Recipe.of(rows, origin.data, model, "auto")
    prior = GaussianPrior(origin.prior_precision or 1.0)
    return recipe.task(rows, seed=0, prior=prior, parameters="*", validation=0.0).network


def _identity(origin: Origin, rows: data.DataSet) -> dict[str, str]:
    """What is known of the network, its likelihood and its prior, as two posteriors are compared by."""
    if origin.model is None:
        return {}
    told = identity(_network(origin.model, origin, rows))
    return {what: text for what, text in told.items() if what != "prior" or origin.prior_precision is not None}


def _check_scores(name: str, found: Mapping[str, Any], known: Mapping[str, float]) -> None:
    """Refuse a download whose scores are not those that were published."""
    for metric, value in known.items():
        if abs(found[metric]["mean"] - value) > 6e-4:  # they were published with three digits
            raise ValueError(
                f"{name}: the downloaded predictions have {metric} {found[metric]['mean']:.4f} on the test rows, where "
                f"{value} is known: the files, or the data set here, are not those that were published"
            )
