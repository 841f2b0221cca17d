"""A stored reference: what a checked HMC run predicts for the rows of a data set, small enough to keep and pass on.

A reference is a folder of two files. `reference.json` says what it is: data, preprocessing, network, prior, sampler,
seed, versions, diagnostics. `predictions.safetensors` has one group for each data set ("clean", "rotated 15"):

    inputs      [rows, ...]                      float16: to recognise the rows
    probs       [chains, rows, classes]          float32: classification, each chain's mean over all of its draws
    log_draws   [chains, kept, rows, classes]    float16: some draws, evenly spaced over the chain
    means       [chains, draws, rows, outputs]   float32: regression, every draw
    variances   [chains, draws, rows, outputs]   float32: of the noise of every draw

Both files carry checksums; one that was changed is refused. Fidelity reads `probs`, or `means` and `variances`, so that
neither thinning nor float16 touches it. A probability from `log_draws` is off by at most 2^-11 / e = 0.0002.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.modules import activation

from caveat.batches import tensors
from caveat.files import new_folder
from caveat.network import Network
from caveat.predictive import CategoricalPredictive, GaussianPredictive, Kind, Predictive
from caveat.rows import Rows
from caveat.storage import FORMAT, State, read_json, read_state, settings_digest, write_json, write_state

__all__ = ["ReferenceSet", "activations", "chain_tensors", "identity", "read_reference"]

_FACTS, _TENSORS = "reference.json", "predictions.safetensors"
_ACTIVATIONS = set(activation.__all__) - {"MultiheadAttention"}
_CLOSE = 2e-3  # absolute and relative: four steps of float16


@dataclass(frozen=True, repr=False)
class ReferenceSet:
    """A checked reference posterior's predictions, by data set; `caveat.load_reference` reads one."""

    facts: dict[str, Any]  # plain json: what reference.json says
    parts: State  # data set -> the tensors above

    def __repr__(self) -> str:
        sizes = ", ".join(f"{name} {len(part['inputs'])} rows" for name, part in self.parts.items())
        return f"ReferenceSet({self.name}: {self.chains} chains of {self.draws} draws; {sizes})"

    @property
    def name(self) -> str:
        """The name of this reference, such as that of the recipe that made it."""
        return str(self.facts["name"])

    @property
    def kind(self) -> Kind:
        """Whether it predicts classes or numbers."""
        return "classification" if self.facts["kind"] == "classification" else "regression"

    @property
    def chains(self) -> int:
        """How many chains were run."""
        return int(self.facts["chains"])

    @property
    def draws(self) -> int:
        """How many draws each chain has."""
        return int(self.facts["draws"])

    def summary(self) -> str:
        """Say in one line how much was drawn, how well the chains mixed, and how far one is from the others."""
        floor = ", ".join(f"{name} {score['mean']:.3g}" for name, score in self.facts["floor"]["clean"].items())
        floor = f", floor: {floor}" if floor else ""
        if "published" in self.facts:  # predictions, and nothing of how the chains mixed
            found = ", ".join(f"{name} {score['mean']:.4g}" for name, score in self.facts["scores"].items())
            return f"published predictions for {len(self.parts['clean']['inputs']):,} rows, {found}{floor}"
        rhat = self.facts["diagnostics"]["clean"]["predictions"]["rhat_max"]
        return f"{self.chains} x {self.draws} draws, R-hat of predictions up to {rhat:.4f}{floor}"

    def predictive(self, part: str = "clean") -> Predictive:
        """Return the reference's prediction for one of its data sets, from the draws it has stored, chain by chain."""
        if part not in self.parts:
            raise KeyError(f"the reference {self.name} has no data set {part!r}: there are {', '.join(self.parts)}")
        tensors_of_part = self.parts[part]
        if self.kind == "regression":
            means, variances = (tensors_of_part[name].flatten(0, 1) for name in ("means", "variances"))
            return GaussianPredictive(means, variances, variances.mean(0))
        if "log_draws" not in tensors_of_part:
            raise KeyError(f"the reference {self.name} keeps no draws for {part!r}, only each chain's mean")
        return CategoricalPredictive(tensors_of_part["log_draws"].flatten(0, 1).float().log_softmax(-1))

    def by_chain(self, part: str, rows: slice) -> Sequence[Predictive]:
        """Return what each chain predicts for some rows: its mean over all draws, or for numbers its mixture."""
        tensors_of_part = self.parts[part]
        if self.kind == "classification":
            return [CategoricalPredictive(probs[rows].log().unsqueeze(0)) for probs in tensors_of_part["probs"]]
        moments = (tensors_of_part[name][:, :, rows] for name in ("means", "variances"))
        return [
            GaussianPredictive(means, variances, variances.mean(0)) for means, variances in zip(*moments, strict=True)
        ]

    def find(self, rows: Rows) -> str | None:
        """Return which data set of this reference the rows are; None where they are none of them."""
        given = _inputs(rows)
        for name, stored in self.parts.items():
            inputs = stored["inputs"].float()
            if inputs.shape == given.shape and torch.allclose(inputs, given, rtol=_CLOSE, atol=_CLOSE):
                return name
        return None

    def part_of(self, rows: Rows) -> str:
        """Return which data set of this reference the rows are; an error says why where they are none of them."""
        part = self.find(rows)
        if part is not None:
            return part
        same_size = [name for name, stored in self.parts.items() if len(stored["inputs"]) == len(rows)]
        reason = f"their inputs differ from those of {', '.join(same_size)}" if same_size else f"they are {len(rows)}"
        listed = ", ".join(f"{name} ({len(stored['inputs'])} rows)" for name, stored in self.parts.items())
        raise ValueError(
            f"the reference {self.name} knows other rows than the data given: {reason}. It has {listed}, each "
            f"in its own order: give those, prepared as caveat.data.load({self.facts['data']['name']!r}) does, or "
            "compare with a posterior"
        )

    def save(self, folder: str | Path, *, overwrite: bool = False) -> Path:
        """Write the two files, whole or not at all."""
        if overwrite and Path(folder).exists() and not (Path(folder) / _FACTS).exists():
            raise FileExistsError(
                f"{folder} exists and is not a reference, so it is not replaced: choose another folder"
            )
        with new_folder(folder, overwrite) as place:
            digest = write_state(place / _TENSORS, self.parts)
            write_json(place / _FACTS, self.facts | {"format": FORMAT, "digest": digest})
        return Path(folder)


def read_reference(folder: str | Path) -> ReferenceSet:
    """Read a reference, and refuse one that was changed after it was written."""
    facts = read_json(Path(folder) / _FACTS)
    return ReferenceSet(facts, read_state(Path(folder) / _TENSORS, facts["digest"]))


def chain_tensors(prediction: Predictive, chains: int, draws_kept: int) -> dict[str, Tensor]:
    """Return what is stored of a prediction whose draws come chain by chain: the tensors above but for the inputs.

    Of class probabilities, `draws_kept` draws a chain are stored beside the means.
    """
    if isinstance(prediction, GaussianPredictive):
        pair = {"means": prediction.means, "variances": prediction.variances}
        return {name: values.unflatten(0, (chains, -1)).float() for name, values in pair.items()}
    if not isinstance(prediction, CategoricalPredictive):
        raise TypeError(f"a reference holds classes or Gaussians, not a {type(prediction).__name__}")
    draws = prediction.log_samples.unflatten(0, (chains, -1))  # [chains, draws, B, C]
    stored = {"probs": draws.double().exp().mean(1).float()}
    if draws_kept:
        chosen = torch.linspace(0, draws.shape[1] - 1, min(draws_kept, draws.shape[1])).round().long()
        stored["log_draws"] = draws[:, chosen].half()
    return stored


def identity(network: Network) -> dict[str, str]:
    """Describe what two posteriors must share for the distance between them to be one between methods."""
    shapes = [list(network.params()[name].shape) for name in network.names]
    return {"weights": str(shapes), "likelihood": _text(network.likelihood), "prior": _text(network.prior)}


def in_use(text: str) -> str:
    """The text of a dataclass without the knobs that are None: a stored one may be from before they were there."""
    return re.sub(r"\w+=None(, )?", "", text).replace(", )", ")")


def activations(module: str) -> str:
    """List the kinds of activations in the text of a module; the list is empty where no activation is a module."""
    return ", ".join(dict.fromkeys(kind for kind in re.findall(r"(\w+)\(", module) if kind in _ACTIVATIONS))


def _text(value: Any) -> str:
    text = in_use(repr(value))
    return text if len(text) < 200 else f"{type(value).__name__} {settings_digest(value)[:12]}"


def _inputs(rows: Rows) -> Tensor:
    pieces = [x for x, _ in rows.ordered()]
    if any(len(tensors(x)) != 1 for x in pieces):
        raise ValueError("a stored reference is about inputs of one tensor: compare with a posterior")
    return torch.cat([tensors(x)[0].float().cpu() for x in pieces])
