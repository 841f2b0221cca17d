"""The cells of the experiment: each is one posterior (or a small grid of them, tuned), scored on all test rows.

A cell's name is kind/problem/setting/seed. `reference` cells are HMC at temperature 1 with the Gaussian prior; every
other cell changes one thing (the temperature, the prior's scale, its family, the method), or the prior's scale and one
other (`wide`, `ensemble`).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from problems import PROBLEMS, Problem, empcov_prior, family_prior, problem, scaled_prior
from torch import Tensor

import caveat
from caveat import (
    HMC,
    MAP,
    SGMCMC,
    SSVI,
    SWAG,
    DeepEnsemble,
    Laplace,
    LastLayerLaplace,
    MCDropout,
    MeanFieldVI,
    SubnetworkLaplace,
    Training,
)
from caveat.evaluate.diagnosis import gather_evidence
from caveat.evaluate.scoring import score

TEMPERATURES = (0.03, 0.1, 0.3, 3.0, 10.0)  # and 1, the reference
FACTORS = (0.01, 0.1, 0.3, 3.0, 10.0, 100.0)  # of the prior's variance
TRAJECTORIES = {  # by prior family, one over its scale at variance 1: as long as the Gaussian's, in weights
    "Laplace": 2**0.5,
    "Student-t": (5 / 3) ** 0.5,
    "logistic": math.pi / 3**0.5,
    "mixture": 5**0.5,
}
EPOCHS = (30, 100, 300)  # of training; which one is best is seen on the validation rows
CYCLE = {"cycle": 50, "draws_a_cycle": 5}
SAMPLERS = {  # knobs and learning rates
    "SGLD": ({"momentum": 0.0}, (0.01, 0.03, 0.1, 0.3)),
    "SGHMC": ({"momentum": 0.9}, (0.001, 0.003, 0.01, 0.03)),
    "cyclical SGHMC": ({"momentum": 0.9, **CYCLE}, (0.003, 0.01, 0.03, 0.1)),
    "preconditioned cyclical SGHMC": (
        {"momentum": 0.9, "preconditioner": "rmsprop", **CYCLE},
        (1e-5, 3e-5, 1e-4, 3e-4),
    ),
}
METHODS = (
    "HMC again",
    "MAP",
    "MAP tempered",
    "ensemble of 5",
    "ensemble of 50",
    "MC dropout",
    "SWAG",
    "mean-field VI",
    "mean-field VI, KL tuned",
    "SSVI 30%, KL tuned",
    "Laplace full, given",
    "Laplace Kronecker, given",
    "Laplace diagonal, given",
    "Laplace Kronecker",
    "last layer",
    "subnetwork 10%, given",
    "subnetwork 10%",
    *SAMPLERS,
)
SETTINGS = {  # by kind, the most wanted first
    "reference": ("HMC",),
    "methods": METHODS,
    "temperature": TEMPERATURES,
    "empcov": ("EmpCov",),
    "scale": FACTORS,
    "family": tuple(TRAJECTORIES),
    "wide": (0.1, 0.3, 3.0),  # temperatures, with ten times the prior variance
    "ensemble": (0.1, 0.3, 3.0, 10.0),  # of five, by factors of the prior's variance
}


TOO_LONG = ("Laplace full, given", 100.0)  # for the 23,860 weights of mnist


@dataclass(frozen=True)
class Budget:
    """How long everything runs."""

    hmc: HMC
    epochs: tuple[int, ...] = EPOCHS
    members: int = 50
    burn_in: int = 500
    draws: int = 50
    learning_rates: int = 4

    @staticmethod
    def of(name: str, quick: bool) -> "Budget":
        """For a problem."""
        if quick:
            return Budget(HMC(chains=2, length=6, warmup=20, trajectory=0.1), (1, 2), 2, 4, 10, 2)
        return Budget(HMC(chains=4, length=100 if name == "mnist" else 200, warmup=80))

    def of_sweep(self, name: str) -> HMC:
        """HMC where only its scores are wanted."""
        return replace(self.hmc, chains=2 if name == "mnist" else 4, length=min(100, self.hmc.length))


@dataclass(frozen=True)
class Cell:
    """What one cell is about."""

    kind: str
    problem: str
    setting: str
    seed: int

    @property
    def name(self) -> str:
        """As the csv has it."""
        return f"{self.kind}/{self.problem}/{self.setting}/{self.seed}"

    @property
    def needs(self) -> "Cell":
        """The reference that it is compared with: its own problem's and seed's."""
        return replace(self, kind="reference", setting="HMC")


def cells(seeds: int) -> Iterator[Cell]:
    """All of them, the most wanted first."""
    for seed in range(seeds):
        for kind, settings in SETTINGS.items():
            for name in PROBLEMS:
                for setting in settings:
                    if name != "mnist" or setting not in TOO_LONG:
                        yield Cell(kind, name, str(setting), seed)


@dataclass(frozen=True)
class Place:
    """Where things are."""

    references: Path
    data: Path | None
    device: str
    quick: bool


def run_cell(cell: Cell, place: Place) -> list[dict[str, Any]]:
    """Fit and score; one row for each set of test rows, what the fit itself says on the first."""
    found = problem(cell.problem, cell.seed, place.data)
    budget = Budget.of(cell.problem, place.quick)

    def fit(method: caveat.Method, prior: caveat.Prior | None = None, **more: Any) -> caveat.Posterior:
        options = {"seed": cell.seed, "device": place.device, "progress": False} | more
        return caveat.fit(found.task(prior), method, **options)

    folder = reference_folder(cell, place)
    reference, chosen = None, ""
    if cell.kind == "reference":
        posterior = caveat.load(folder, found.model()) if folder.exists() else fit(budget.hmc, folder=folder)
        reference = posterior
    elif cell.kind == "methods":
        posterior, chosen = METHOD_KINDS[cell.setting](Fitter(fit, found, budget))
        reference = caveat.load(folder, found.model())
    elif cell.kind == "ensemble":
        posterior, chosen = _ensemble(5)(Fitter(partial(fit, prior=prior_of(cell, found)), found, budget))
    elif cell.kind in ("temperature", "wide"):
        prior = scaled_prior(cell.problem, 10.0 if cell.kind == "wide" else 1.0)
        posterior = fit(replace(budget.of_sweep(cell.problem), temperature=float(cell.setting)), prior)
    else:
        hmc = budget.of_sweep(cell.problem)
        longer = TRAJECTORIES.get(cell.setting, 1.0)
        posterior = fit(replace(hmc, trajectory=longer * hmc.trajectory), prior_of(cell, found))
    return scored(cell, found, posterior, reference, chosen)


def reference_folder(cell: Cell, place: Place) -> Path:
    return place.references / f"{'quick-' if place.quick else ''}{cell.problem}-{cell.seed}"


def prior_of(cell: Cell, found: Problem) -> caveat.Prior:
    if cell.kind in ("scale", "ensemble"):
        return scaled_prior(cell.problem, float(cell.setting))
    return family_prior(cell.problem, cell.setting) if cell.kind == "family" else empcov_prior(found)


def scored(
    cell: Cell, found: Problem, posterior: caveat.Posterior, reference: caveat.Posterior | None, chosen: str
) -> list[dict[str, Any]]:
    """Scores on clean and corrupted rows; a reference is itself compared chain by chain."""
    rows = []
    for kind, tests in found.tests().items():
        for strength, test in (tests if isinstance(tests, dict) else {"": tests}).items():
            x, y = test.tensors
            prediction = posterior.predict(x, seed=cell.seed)
            columns = {name: column.cpu() for name, column in prediction.columns(y).items()}
            scores = score(prediction.kind, columns)
            row = {"cell": cell.name, "data": kind, "strength": strength}
            row |= {metric: scores[metric].mean for metric in ("accuracy", "nll", "ece")}
            if reference is not None:
                row |= closeness(posterior, prediction.probs.cpu(), reference, x)
            rows.append(
                {name: f"{v:.5g}" if isinstance(v, float) and name != "strength" else v for name, v in row.items()}
            )
    rows[0] |= {"chosen": chosen, "seconds": f"{posterior.info.seconds:.3g}"} | chain_facts(posterior, found)
    return rows


def closeness(posterior: caveat.Posterior, probs: Tensor, reference: caveat.Posterior, x: Tensor) -> dict[str, float]:
    """Agreement and total variation, as `caveat.fidelity` defines them, without predicting a second time.

    A reference is compared with itself, one chain against the mixture of the others.
    """
    chains, draws = reference.state["stats"]["lp"].shape
    each = reference.predict(x).samples.cpu().unflatten(0, (chains, draws)).mean(1)  # [chains, B, C]
    pairs = [(probs, each.mean(0))]
    if posterior is reference:
        pairs = [(each[c], torch.cat([each[:c], each[c + 1 :]]).mean(0)) for c in range(chains)]
    agreement = [float((p.argmax(-1) == q.argmax(-1)).double().mean()) for p, q in pairs]
    variation = [float((p - q).abs().sum(-1).mean()) / 2 for p, q in pairs]
    return {"agreement": mean(agreement), "total_variation": mean(variation)}


def chain_facts(posterior: caveat.Posterior, found: Problem) -> dict[str, Any]:
    """How HMC went, and how well its predictions and its weights have mixed."""
    if not isinstance(posterior.method, HMC):
        return {}
    stats = posterior.info.diagnostics
    facts = {"acceptance": f"{stats['acceptance']:.3f}", "leapfrog_steps": stats["leapfrog_steps"]}
    facts |= {"divergences": stats["divergences"]}
    evidence = gather_evidence(posterior, found.rows["test"], rows=200)
    for name, quantities in (("function", evidence.predictions), ("weights", evidence.weights)):
        mixing = quantities.mixing()
        facts |= {f"rhat_{name}": f"{mixing.rhat_max:.4f}", f"share_{name}": f"{mixing.rhat_share_above:.4f}"}
        facts |= {f"null_{name}": f"{mixing.null.limit:.4f}", f"ess_{name}": f"{mixing.ess_bulk_min:.0f}"}
    return facts


@dataclass(frozen=True)
class Fitter:
    """Fits methods to one problem, and tunes them on its validation rows."""

    fit: Callable[..., caveat.Posterior]
    problem: Problem
    budget: Budget

    def tuned(self, candidates: dict[str, caveat.Method], **more: Any) -> tuple[caveat.Posterior, str]:
        """The candidate with the lowest NLL on the validation rows, and its name; one that diverges is passed over."""
        best: tuple[float, caveat.Posterior, str] | None = None
        for name, method in candidates.items():
            try:
                posterior = self.fit(method, **more)
            except ValueError as error:
                if "ran away" not in str(error):
                    raise
                continue
            scores = caveat.evaluate(posterior, {"test": self.problem.rows["validation"]}, progress=False)["test"]
            if best is None or scores["nll"].mean < best[0]:
                best = (scores["nll"].mean, posterior, name)
        if best is None:
            raise ValueError(f"every candidate diverged: {list(candidates)}")
        return best[1], best[2]

    def trained(self, make: Callable[[Training], caveat.Method]) -> tuple[caveat.Posterior, str]:
        """A method that trains, with the number of epochs tuned."""
        return self.tuned({f"{n} epochs": make(Training(epochs=n, learning_rate=1e-2)) for n in self.budget.epochs})

    def point(self) -> caveat.Posterior:
        """The MAP from which others start."""
        return self.trained(lambda training: MAP(training=training))[0]


def _again(fitter: Fitter) -> tuple[caveat.Posterior, str]:
    return fitter.fit(fitter.budget.hmc, seed=1000 + fitter.problem.seed), ""


def _map(fitter: Fitter) -> tuple[caveat.Posterior, str]:
    return fitter.trained(lambda training: MAP(training=training))


def _tempered(fitter: Fitter) -> tuple[caveat.Posterior, str]:
    posterior = fitter.fit(MAP(temperature=True, training=Training(epochs=0)), start=fitter.point())
    return posterior, f"temperature {float(posterior.state['hyper']['temperature']):.3g}"


def _ensemble(members: int) -> Callable[[Fitter], tuple[caveat.Posterior, str]]:
    def fitted(fitter: Fitter) -> tuple[caveat.Posterior, str]:
        small, chosen = fitter.trained(lambda training: DeepEnsemble(5, training))
        if members == 5:
            return small, chosen
        return fitter.fit(replace(small.method, members=min(members, fitter.budget.members))), chosen

    return fitted


def _dropout(fitter: Fitter) -> tuple[caveat.Posterior, str]:
    training = Training(epochs=max(fitter.budget.epochs) // 3, learning_rate=1e-2)
    candidates = {
        f"rate {rate}": MCDropout(rate, default_draws=100, training=training) for rate in (0.05, 0.1, 0.2, 0.4)
    }
    return fitter.tuned(candidates, start=fitter.point())


def _swag(fitter: Fitter) -> tuple[caveat.Posterior, str]:
    path = SWAG().training if max(fitter.budget.epochs) > 2 else replace(SWAG().training, epochs=3)
    rates = (0.01, 0.03, 0.1, 0.3)
    candidates = {f"learning rate {r}": SWAG(default_draws=100, training=replace(path, learning_rate=r)) for r in rates}
    return fitter.tuned(candidates, start=fitter.point())


def _variational(fitter: Fitter) -> tuple[caveat.Posterior, str]:
    """By the ELBO."""
    return fitter.trained(lambda training: MeanFieldVI(kl_weight=1.0, default_draws=100, training=training))


def _with_kl(make: Callable[..., caveat.Method]) -> Callable[[Fitter], tuple[caveat.Posterior, str]]:
    """With the weight of the KL term tuned."""

    def fitted(fitter: Fitter) -> tuple[caveat.Posterior, str]:
        training = Training(epochs=max(fitter.budget.epochs), learning_rate=1e-2)
        weights = (0.01, 0.03, 0.1, 0.3, 1.0)
        return fitter.tuned(
            {f"KL weight {w}": make(kl_weight=w, default_draws=100, training=training) for w in weights}
        )

    return fitted


def _post_hoc(method: caveat.Method) -> Callable[[Fitter], tuple[caveat.Posterior, str]]:
    def fitted(fitter: Fitter) -> tuple[caveat.Posterior, str]:
        posterior = fitter.fit(method, start=fitter.point())
        return posterior, f"precision {float(posterior.info.diagnostics['prior_precision']):.3g}"

    return fitted


def _sampler(name: str) -> Callable[[Fitter], tuple[caveat.Posterior, str]]:
    knobs, rates = SAMPLERS[name]

    def fitted(fitter: Fitter) -> tuple[caveat.Posterior, str]:
        budget = fitter.budget
        pace = {} if "cycle" in knobs else {"thin": max(1, budget.burn_in // budget.draws)}
        candidates = {
            f"learning rate {rate}": SGMCMC(
                chains=4,
                length=budget.draws,
                burn_in=budget.burn_in,
                learning_rate=rate,
                batch_size=128,
                **knobs,
                **pace,
            )
            for rate in rates[: budget.learning_rates]
        }
        return fitter.tuned(candidates)

    return fitted


METHOD_KINDS: dict[str, Callable[[Fitter], tuple[caveat.Posterior, str]]] = {
    "HMC again": _again,
    "MAP": _map,
    "MAP tempered": _tempered,
    "ensemble of 5": _ensemble(5),
    "ensemble of 50": _ensemble(50),
    "MC dropout": _dropout,
    "SWAG": _swag,
    "mean-field VI": _variational,
    "mean-field VI, KL tuned": _with_kl(MeanFieldVI),
    "SSVI 30%, KL tuned": _with_kl(partial(SSVI, density=0.3, interval=20)),
    "Laplace full, given": _post_hoc(Laplace(structure="full", precision="given")),
    "Laplace Kronecker, given": _post_hoc(Laplace(precision="given")),
    "Laplace diagonal, given": _post_hoc(Laplace(structure="diagonal", precision="given")),
    "Laplace Kronecker": _post_hoc(Laplace()),
    "last layer": _post_hoc(LastLayerLaplace()),
    "subnetwork 10%, given": _post_hoc(SubnetworkLaplace(0.1, precision="given")),
    "subnetwork 10%": _post_hoc(SubnetworkLaplace(0.1)),
    **{name: _sampler(name) for name in SAMPLERS},
}
