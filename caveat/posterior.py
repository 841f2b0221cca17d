"""A posterior: what a fit found, and what it is for. Predict from it, sample it, save it, load it."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from caveat.batches import Inputs, as_inputs, concatenate, count_rows, first_not_finite, move, slices
from caveat.batches import tensors as tensors_in
from caveat.engine.cost import refuse_if_too_large
from caveat.engine.distributed import current_ranks
from caveat.engine.forward_probe import likeness_of, made_up
from caveat.engine.method import Method
from caveat.engine.predictors import Fixing, Predictor, Replicas
from caveat.engine.run import Info, Run
from caveat.engine.served import served_module
from caveat.files import new_folder
from caveat.network import Network, Params, without_autocast
from caveat.notebooks import facts_html
from caveat.posterior_folder import Parts, read_parts, write_parts
from caveat.predictive import Calibration, ConformalScore, Conformity, Predictive
from caveat.rows import Data, Rows, without_targets
from caveat.storage import State, moved_state

__all__ = ["Posterior", "load"]

WORTH_A_PASS = 2**20  # draws times rows, or rows squared, below which room for the outputs is not looked for

BATCH_AXIS = "a single row needs a batch axis, x[None]"


@dataclass(frozen=True, repr=False)
class Posterior:
    """A fitted posterior: what it is (`state`), how to use it (`method`, `network`), and what it cost (`info`)."""

    method: Method
    state: State
    network: Network
    info: Info
    calibration: Calibration | None = None  # by which intervals and sets hold targets as often as they say

    def __repr__(self) -> str:
        weights, seconds = self.network.n_parameters, self.info.seconds
        return f"Posterior({self.method!r}, {weights:,} weights, fitted in {seconds:.1f} s)"

    def _repr_html_(self) -> str:
        facts = {
            "method": repr(self.method),
            "likelihood": repr(self.network.likelihood),
            "prior": repr(self.network.prior),
            "weights": self.network.n_parameters,
        }
        return facts_html(f"Posterior by {type(self.method).__name__}", facts, self.info._repr_html_())

    def sample(self, n: int = 1, *, seed: int = 0) -> Iterator[Params]:
        """Draws of the weights, n of them."""
        if n < 1:
            raise ValueError(f"sample(n={n}): must be at least 1")
        self.network.base.check()
        draws = self.predictor.draws(n, torch.Generator().manual_seed(seed))
        return _in_own_arithmetic(draws, self.network.device)

    @functools.cached_property
    def predictor(self) -> Predictor:
        """What predictions are made with: caches and modules of this posterior's own, made when first needed."""
        return self.method.predictor(self.state, self.network)

    def predict(self, x: Inputs, *, draws: int | None = None, seed: int = 0) -> Predictive:
        """What the posterior says about inputs: a tensor, or a dict or tuple of tensors as the module takes them.

        Of a `DataLoader` or a data set it is the inputs of all rows, in the data set's order; targets are not read, nor
        is the entry of a dict that the training data have as targets.
        Inputs of any number of rows go through in pieces. The same seed gives the same draws, so the same answer.
        Several threads may predict at once.
        """
        if draws is not None and (not isinstance(draws, int) or draws < 1):
            raise ValueError(f"predict(draws={draws!r}): must be a whole number, at least 1")
        n = self.method.default_draws if draws is None else draws
        x = self._checked(x)
        if draws is None and self.method.closed_form(self.network.likelihood):
            mean, covariance = self.moments(x)
            variance = covariance.diagonal(dim1=-2, dim2=-1).reshape(mean.shape).clamp_min(0)
            return self._calibrated(self.network.likelihood.closed_predictive(mean, variance, self.state["hyper"]))
        rng = torch.Generator().manual_seed(seed)
        with self._shapes_in_errors(x), without_autocast(self.network.device):
            what = f"{n:,} draws for {count_rows(x):,} rows"
            self._refuse_if_too_large(what, x, n, 1, "take fewer draws, or a part of the rows at a time")
            outputs, hyper = self.predictor.outputs(x, n, rng)
            _check_rows(outputs[0], x)
        if outputs.dtype in (torch.bfloat16, torch.float16):  # too coarse for probabilities that sum to one
            outputs = outputs.float()
        with self._shapes_in_errors(x):
            return self._calibrated(self.network.likelihood.predictive(outputs, hyper))

    def _calibrated(self, prediction: Any) -> Predictive:
        return prediction if self.calibration is None else dataclasses.replace(prediction, calibration=self.calibration)

    def module(self, *, draws: int | None = None, seed: int = 0, example: Inputs | None = None) -> nn.Module:
        """The prediction as an ordinary module in evaluation mode: no caveat is needed once it is exported.

        It is called as the network's own module is, and returns a dict of tensors [B, ...]: `mean` (of classes the
        probabilities), `aleatoric` and `epistemic`, equal to those of `predict` with these draws and this seed. The
        draws are inside, so that memory and time of a pass grow with them.

        Args:
            draws: posterior draws; the method's own number, or its closed form, unless given.
            seed: of the draws.
            example: a few rows of inputs, of which only shapes and types are used; known from the fit unless given.
        """
        if draws is not None and (not isinstance(draws, int) or draws < 1):
            raise ValueError(f"module(draws={draws!r}): must be a whole number, at least 1")
        self.network.base.check()
        predictor, closed = self.predictor, draws is None and self.method.closed_form(self.network.likelihood)
        if not isinstance(predictor, Fixing):
            raise TypeError(
                f"{type(self.method).__name__} predicts in a way of its own that has no module: give its predictor a "
                "`fixed_form`, or serve it with predict"
            )
        n = None if closed else draws or self.method.default_draws
        with torch.inference_mode(False), torch.no_grad(), without_autocast(self.network.device):
            rows = self.example(example)
            form = predictor.fixed_form(n, torch.Generator().manual_seed(seed), rows)
            return served_module(form, self.network.likelihood, rows)

    def example(self, like: Inputs | None = None) -> Inputs:
        """Three rows of made-up inputs, in the likeness of the training rows or of given ones: nothing of the data.

        Normal numbers, and whole ones up to the largest that was there.
        """
        likeness = self.info.forward.get("inputs") if like is None else likeness_of(self._checked(like))
        if likeness is None:
            raise ValueError(
                "inputs like these cannot be made up: give tensors, or a dict or tuple of them"
                if like is not None
                else "what inputs look like is not known of this posterior: give a few rows, such as example=x[:3]"
            )
        return made_up(likeness, torch.Generator().manual_seed(0), self.network.device)

    def moments(self, x: Inputs, *, joint: bool = False) -> tuple[Tensor, Tensor]:
        """Mean of the outputs, [B, ...], and their covariance, where the method has them in closed form.

        The covariance is that of each row's D outputs, [B, D, D], or, with `joint`, of all rows together, [B D, B D].
        """
        x = self._checked(x)
        with self._shapes_in_errors(x), without_autocast(self.network.device):
            if joint:
                advice = "take fewer rows, or joint=False for the covariance of each row's outputs alone"
                self._refuse_if_too_large(f"a joint covariance of {count_rows(x):,} rows", x, 1, 2, advice)
            moments = self.predictor.moments(x, joint)
            if moments is None:
                raise TypeError(f"{type(self.method).__name__} has no closed form: use predict(x).samples")
            _check_rows(moments[0], x)
        return moments

    def update(self, data: Data, *, seed: int = 0, progress: bool = True) -> "Posterior":
        """This posterior with more data taken in, where the method can do that without a new fit."""
        self.network.base.check()
        rows = Rows(data, names=self.network.class_names)
        ranks = current_ranks(self.network.device)
        run = Run(seed, self.network.device, ranks, progress=progress, label=f"{type(self.method).__name__} update")
        x, _ = next(iter(rows.batches([torch.arange(min(2, len(rows)))], self.network.device)))
        self.network.check_inputs(x)
        with torch.no_grad(), self._shapes_in_errors(x):
            output = self.network(self.network.params(), x)[:1]
        targets = rows.targets()
        self.network.likelihood.check(output.expand(len(targets), *output.shape[1:]), targets)
        with without_autocast(self.network.device):
            state = self.method.update(self.state, self.network, rows, run)
        rows_before = self.info.diagnostics.get("updated_with_rows", 0)
        of_the_fit = ("log_marginal_likelihood", "validation_nll")  # of fewer rows than there are now
        diagnostics = {key: value for key, value in self.info.diagnostics.items() if key not in of_the_fit}
        info = dataclasses.replace(
            self.info,
            seconds=self.info.seconds + run.seconds(),
            flops=self.info.flops + run.flops,
            gradient_evaluations=self.info.gradient_evaluations + round(run.gradient_evaluations),
            warnings=list(dict.fromkeys([*self.info.warnings, *run.warnings])),
            diagnostics=diagnostics | {"updated_with_rows": rows_before + len(rows)},
        )
        return dataclasses.replace(self, state=state, info=info, calibration=None)

    def calibrate(
        self, data: Data, *, score: ConformalScore | None = None, randomised: bool | None = None, seed: int = 0
    ) -> "Posterior":
        """This posterior with intervals and sets of labels that hold the target as often as they say.

        By split conformal prediction: `interval(level)` and `label_set(level)` of its predictions then hold the targets
        of rows like these with probability `level`, on average over rows, whatever the fit was; all else that is
        predicted stays. See docs/coverage.md. Predict with the same number of draws as here, the method's own.

        Args:
            data: rows with targets that neither the weights nor a tuning has seen.
            score: what targets are scored by: for numbers `"deviation"` (unless given) or `"quantile"`, for classes
                `"aps"` (unless given), `"raps"` or `"probability"`.
            randomised: whether the sets of `"aps"` and `"raps"` are drawn, which makes them hold as often as they say
                and no more often (unless given they are); else the most probable label is always in them.
            seed: of the draws of the posterior, and of sets.
        """
        plain = dataclasses.replace(self, calibration=None)
        conformity = Conformity.chosen(self.network.likelihood.kind, score, randomised)
        rows = Rows(data, names=self.network.class_names)
        return dataclasses.replace(self, calibration=Calibration.of(conformity, plain._scores(rows, conformity, seed)))

    def _scores(self, rows: Rows, conformity: Conformity, seed: int) -> Iterator[Tensor]:
        """How badly the targets of rows fit, [N, D], a piece of the rows at a time."""
        rng = torch.Generator().manual_seed(seed + 2**32)  # other numbers than those that sets are drawn with
        for x, y in rows.ordered(max(rows.batch_size, 1024)):
            self.network.likelihood.check_targets(y)
            yield self.predict(x, seed=seed).calibration_scores(y.to(self.network.device), conformity, rng)

    @functools.cached_property
    def _input_dtype(self) -> torch.dtype:
        return self.network.input_dtype

    @functools.cached_property
    def _networks(self) -> Replicas[Network]:
        return Replicas(self.network.replica)

    @contextlib.contextmanager
    def _shapes_in_errors(self, x: Inputs) -> Iterator[None]:
        """What the network says about inputs that it cannot take, with their shapes and those of the training rows."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except (RuntimeError, IndexError) as error:
            shapes = [tuple(tensor.shape) for tensor in tensors_in(x)]
            if "allocate memory" in str(error):  # on a CPU torch has no error of its own for it
                raise MemoryError(
                    f"too little memory for inputs of shapes {shapes}: take fewer rows or draws"
                ) from error
            known: dict[str, Any] = self.info.forward.get("inputs") or {}
            rows = known.get("shape")
            axis = "" if rows is not None and shapes and len(shapes[0]) > len(rows) else f"; {BATCH_AXIS}"
            trained = "" if rows is None else f", and was fitted to rows of shape {tuple(rows)} and {known['type']}"
            raise ValueError(
                f"the network could not take these inputs (shapes {shapes}){trained}: {error}{axis}"
            ) from error

    def _refuse_if_too_large(self, what: str, x: Inputs, draws: int, power: int, advice: str) -> None:
        """Draws times the outputs of all rows to a power, as they come, as they are put together, and as they are used.

        Where that may be many numbers: how many outputs a row has takes a pass to find out.
        """
        rows = count_rows(x)
        if draws * rows**power < WORTH_A_PASS:
            return
        first = move(next(iter(slices(x, 1))), self.network.device)
        with torch.no_grad(), self._networks.lent() as network:
            outputs = network(network.params(), first)
        numbers = draws * (rows * outputs.numel()) ** power
        refuse_if_too_large(what, 3 * numbers * outputs.element_size(), self.network.device, advice)

    def _checked(self, x: Inputs) -> Inputs:
        """The inputs, once it is known that the network can take them."""
        # Torch and the data sets of Hugging Face read several rows of a data set by this name.
        x = _inputs_of(x) if isinstance(x, DataLoader | Dataset) or hasattr(x, "__getitems__") else x
        given, x = x, as_inputs(without_targets(x, self.info.forward.get("inputs")), self._input_dtype)
        if not tensors_in(x):
            advice = (
                "call the tokenizer with return_tensors='pt' and padding=True"
                if isinstance(given, Mapping)
                else "give what the tokenizer makes of them, tokenizer(texts, return_tensors='pt', padding=True)"
                if isinstance(given, str) or (isinstance(given, list) and any(isinstance(one, str) for one in given))
                else "make a tensor of it, or a DataLoader"
            )
            raise TypeError(
                f"predict takes inputs as the module does, a tensor or array or a dict or tuple of them, not a "
                f"{type(given).__name__}{' of other things' * isinstance(given, Mapping)}: {advice}"
            )
        if not any(tensor.ndim for tensor in tensors_in(x)):
            raise ValueError(f"the inputs have no axes: {BATCH_AXIS}")
        if any(tensor.is_floating_point() and tensor.dtype != self._input_dtype for tensor in tensors_in(x)):
            self.network.check_inputs(x)
        self.network.base.check()
        bad = first_not_finite(x)
        if bad is not None:
            raise ValueError(
                f"the inputs hold NaN or infinity, first in row {bad} of {count_rows(x)}: clean or impute them first"
            )
        return x

    def save(
        self,
        folder: str | Path,
        *,
        overwrite: bool = False,
        note: dict[str, Any] | None = None,
        base: Literal["auto", "with", "without"] = "auto",
    ) -> Path:
        """Write the posterior to a folder, whole or not at all; no data are needed to predict from it.

        Args:
            folder: where to; an existing one is refused.
            overwrite: replace an existing folder where it is a posterior.
            note: json of your own that `posterior.json` keeps.
            base: whether parameters that you froze are written `"with"` the posterior. `"without"` writes a digest of
                them, and `load` then wants a model that has them, such as the pretrained one; `"auto"` leaves out more
                than 64 MiB of them.
        """
        if overwrite and Path(folder).exists() and not (Path(folder) / "posterior.json").exists():
            raise FileExistsError(
                f"{folder} exists and is not a posterior, so it is not replaced: choose another folder"
            )
        with new_folder(folder, overwrite) as place:
            self.write(place, note, base)
        return Path(folder)

    def write(
        self, place: Path, note: dict[str, Any] | None = None, base: Literal["auto", "with", "without"] = "auto"
    ) -> str:
        """Write the posterior into a folder that is empty; returns the digest of its tensors."""
        self.network.base.check()
        parts = Parts(self.method, self.state, self.network, self.info, self.calibration)
        return write_parts(place, parts, note or {}, base)

    @torch.inference_mode(False)  # tensors made in it could not be differentiated later
    def to(self, device: torch.device | str) -> "Posterior":
        """This posterior on a device; samples that are read a few at a time stay where they are."""
        return dataclasses.replace(self, state=moved_state(self.state, device), network=self.network.to(device))


def _inputs_of(data: DataLoader | Dataset) -> Inputs:
    """The inputs of all rows of a loader or a data set, in the order of the data set."""
    rows = Rows(data, needs_targets=False)
    batches = [x for x, _ in rows.ordered()]
    if len({tuple(tuple(t.shape[1:]) for t in tensors_in(x)) for x in batches}) > 1:
        return next(rows.ordered(len(rows)))[0]  # padded by batch: as one batch all have one length
    return concatenate(batches)


@torch.inference_mode(False)
def load(
    folder: str | Path, model: nn.Module, *, device: torch.device | str | None = None, classes: Iterable[type] = ()
) -> Posterior:
    """Read a posterior for a model of the same architecture.

    The model's weights do not matter, but for those of a frozen base that was not saved with the posterior: these are
    compared with those that it was fitted to, and shared with the model, not copied.

    Args:
        folder: what `save` wrote.
        model: a module with the parameters that the posterior was fitted to.
        device: where to predict; the model's own device unless given.
        classes: likelihoods, priors or methods of your own that the posterior uses; not needed for a method of an
            installed package that has an entry point for it.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder: give the folder that posterior.save(...) wrote")
    parts = read_parts(folder, model, list(classes))
    posterior = Posterior(parts.method, parts.state, parts.network, parts.info, parts.calibration)
    return posterior.to(parts.network.device if device is None else device)


def _check_rows(outputs: Tensor, x: Inputs) -> None:
    """Raise a ValueError unless there is one output, [B, ...], for each of the B rows that the inputs have."""
    rows, shapes = count_rows(x), [tuple(tensor.shape) for tensor in tensors_in(x)]
    if len(outputs) != rows:
        shape = tuple(outputs.shape)
        raise ValueError(f"outputs of shape {shape} are not one for each of the {rows} rows of {shapes}: {BATCH_AXIS}")


def _in_own_arithmetic(draws: Iterator[Params], device: torch.device) -> Iterator[Params]:
    """The draws, each made in the arithmetic of the weights; what is done between them is the caller's own."""
    while True:
        with without_autocast(device):
            draw = next(draws, None)
        if draw is None:
            return
        yield draw
