"""What a service answers: rows of numbers in, what the posterior says about them out."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caveat.posterior import Posterior

__all__ = ["InputFault", "Service"]

Prepare = Callable[[np.ndarray], Tensor]


class InputFault(ValueError):  # noqa: N818 - the name says what it is
    """Inputs that the service cannot take, with what was wrong and what it takes."""


@dataclass(frozen=True)
class Service:
    """A posterior that answers requests: checks inputs, predicts, and says what it is.

    Args:
        posterior: what predicts.
        input_shape: of one row.
        dtype: of the inputs that the network takes.
        prepare: makes inputs of the numbers that are sent, such as by the mean and scale of the training data.
        class_names: of a classifier, in order; empty where there are none.
        example: numbers of one row, made up, for the page to begin with.
        draws: posterior draws; the method's own number, or its closed form, unless given.
        seed: of the draws, the same in every answer.
        most_rows: of one request.
    """

    posterior: Posterior
    input_shape: tuple[int, ...]
    dtype: torch.dtype
    prepare: Prepare
    class_names: tuple[str, ...] = ()
    example: Any = None
    draws: int | None = None
    seed: int = 0
    most_rows: int = 256

    @classmethod
    def of(
        cls,
        posterior: Posterior,
        *,
        prepare: Prepare | None = None,
        class_names: tuple[str, ...] = (),
        example: Any = None,
        draws: int | None = None,
        seed: int = 0,
        most_rows: int = 256,
    ) -> "Service":
        """A service whose inputs are like the training rows."""
        rows = posterior.example()
        if not isinstance(rows, Tensor):
            raise TypeError(
                f"a service takes one tensor of inputs, and this network takes a {type(rows).__name__}: write an app "
                "of your own around posterior.predict"
            )
        made_up = np.round(rows[0].double().cpu().numpy(), 3).tolist() if example is None else example
        plain = prepare or (lambda numbers: torch.as_tensor(numbers))
        shape = tuple(rows.shape[1:])
        return cls(posterior, shape, rows.dtype, plain, class_names, made_up, draws, seed, most_rows)

    def rows(self, content: Any) -> Tensor:
        """The inputs [B, ...] of a request's json; raises an InputFault that says what is wrong with it."""
        if not isinstance(content, dict) or content.keys() != {"inputs"}:
            raise InputFault(f'send an object with the one key "inputs": {self.expected}')
        try:
            given = np.array(content["inputs"])
            if given.dtype.kind in "USb":  # numpy would read numbers out of text
                raise ValueError("text, or yes and no")
            numbers = given.astype(np.float64)
        except (ValueError, TypeError, OverflowError) as error:
            raise InputFault(f"inputs are not numbers in rows of one length: {self.expected}") from error
        if numbers.shape[1:] != self.input_shape or numbers.ndim != 1 + len(self.input_shape):
            raise InputFault(f"inputs have the shape {list(numbers.shape)}: {self.expected}")
        if not 1 <= len(numbers) <= self.most_rows:
            raise InputFault(f"{len(numbers)} rows were sent: from 1 to {self.most_rows} are taken at once")
        finite = np.isfinite(numbers).reshape(len(numbers), -1).all(1)
        if not finite.all():
            bad = int(np.argmin(finite))
            raise InputFault(f"row {bad} holds NaN or infinity: clean it first")
        try:
            prepared = self.prepare(numbers)
        except ValueError as error:
            raise InputFault(str(error)) from error
        inputs, kind = prepared.to(self.dtype), str(self.dtype).removeprefix("torch.")
        if not self.dtype.is_floating_point and not torch.equal(inputs.to(prepared.dtype), prepared):
            raise InputFault(f"inputs must be whole numbers that {kind} holds")
        if not bool(inputs.isfinite().all()):
            raise InputFault(f"inputs are too large for {kind}: scale them down")
        return inputs

    @property
    def expected(self) -> str:
        """The shape of inputs in words."""
        return f"a list of rows, each of shape {list(self.input_shape)}"

    def answers(self, inputs: Tensor) -> dict[str, Tensor]:
        """What the posterior says, [B, ...] each."""
        prediction: Any = self.posterior.predict(inputs, draws=self.draws, seed=self.seed)
        parts = {"aleatoric": prediction.aleatoric, "epistemic": prediction.epistemic}
        if prediction.kind == "classification":
            return {"probs": prediction.probs, "label": prediction.label, "entropy": prediction.entropy} | parts
        lower, upper = prediction.interval(0.9)
        return {"mean": prediction.mean, "variance": prediction.variance, "lower_90": lower, "upper_90": upper} | parts

    def card(self) -> dict[str, Any]:
        """What answers, as json: the method, the network and its cost; nothing of the training data."""
        posterior, info = self.posterior, self.posterior.info
        return {
            "method": repr(posterior.method),
            "likelihood": repr(posterior.network.likelihood),
            "weights": posterior.network.n_parameters,
            "draws": self.draws or posterior.method.default_draws,
            "closed_form": self.draws is None and posterior.method.closed_form(posterior.network.likelihood),
            "calibrated": posterior.calibration is not None,
            "fitted_in_seconds": info.seconds,
            "warnings": list(info.warnings),
            "versions": dict(info.versions),
            "input_shape": list(self.input_shape),
            "class_names": list(self.class_names),
            "most_rows": self.most_rows,
            "example": self.example,
        }
