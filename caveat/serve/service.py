"""What a service answers: rows in, what the posterior says about them out."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from caveat.posterior import Posterior
from caveat.serve.inputs import InputFault, NumberRows, Prepare, RowReader, RowsRead, TableRows

__all__ = ["Service"]


@dataclass(frozen=True)
class Service:
    """A posterior that answers requests: checks inputs, predicts, and says what it is.

    Args:
        posterior: what predicts.
        rows_of: how rows are read.
        dtype: of the inputs that the network takes.
        class_names: of a classifier, in order; empty where there are none.
        draws: posterior draws; the method's own number, or its closed form, unless given.
        seed: of the draws, the same in every answer.
        most_rows: of one request.
    """

    posterior: Posterior
    rows_of: RowReader
    dtype: torch.dtype
    class_names: tuple[str, ...] = ()
    draws: int | None = None
    seed: int = 0
    most_rows: int = 256

    @classmethod
    def of(
        cls,
        posterior: Posterior,
        *,
        table: dict[str, Any] | None = None,
        prepare: Prepare | None = None,
        class_names: tuple[str, ...] = (),
        example: Any = None,
        draws: int | None = None,
        seed: int = 0,
        most_rows: int = 256,
    ) -> "Service":
        """A service whose rows are like the training rows.

        Args:
            posterior: what predicts.
            table: the `preprocessing` of the data set of a table: rows are then cells by the names of columns.
            prepare: makes inputs of numbers that are sent, such as by the mean and scale of the training data.
            class_names: of a classifier, in order.
            example: numbers of one row, made up, for the page to begin with.
            draws: posterior draws; the method's own number, or its closed form, unless given.
            seed: of the draws, the same in every answer.
            most_rows: of one request.
        """
        inputs = posterior.example()
        if not isinstance(inputs, Tensor):
            raise TypeError(
                f"a service takes one tensor of inputs, and this network takes a {type(inputs).__name__}: write an app "
                "of your own around posterior.predict"
            )
        reader: RowReader | None = None if table is None else TableRows.of(table)
        if table is not None and reader is None:
            raise ValueError("table= without columns is not of a table: give the preprocessing of its data set")
        made_up = np.round(inputs[0].double().cpu().numpy(), 3).tolist() if example is None else example
        plain = prepare or (lambda numbers: torch.as_tensor(numbers))
        reader = reader or NumberRows(tuple(inputs.shape[1:]), plain, made_up)
        return cls(posterior, reader, inputs.dtype, class_names, draws, seed, most_rows)

    def rows(self, content: Any) -> RowsRead:
        """The inputs [B, ...] of a request's json; raises an InputFault that says what is wrong with it."""
        expected = self.rows_of.expected
        if not isinstance(content, dict) or content.keys() != {"inputs"}:
            raise InputFault(f'send an object with the one key "inputs": {expected}')
        sent = content["inputs"]
        count = len(sent) if isinstance(sent, list) else 1
        if not 1 <= count <= self.most_rows:
            raise InputFault(f"{count} rows were sent, from 1 to {self.most_rows} are taken at once: {expected}")
        try:
            prepared, notes = self.rows_of.read(sent)
        except InputFault:
            raise
        except ValueError as error:
            raise InputFault(str(error)) from error
        inputs, kind = prepared.to(self.dtype), str(self.dtype).removeprefix("torch.")
        if not self.dtype.is_floating_point and not torch.equal(inputs.to(prepared.dtype), prepared):
            raise InputFault(f"inputs must be whole numbers that {kind} holds")
        if not bool(inputs.isfinite().all()):
            raise InputFault(f"inputs are too large for {kind}: scale them down")
        return RowsRead(inputs, notes)

    def answers(self, inputs: Tensor) -> dict[str, Tensor]:
        """What the posterior says, [B, ...] each."""
        prediction: Any = self.posterior.predict(inputs, draws=self.draws, seed=self.seed)
        parts = {"aleatoric": prediction.aleatoric, "epistemic": prediction.epistemic}
        if prediction.kind == "classification":
            sets = {} if self.posterior.calibration is None else {"set_90": prediction.label_set(0.9)}
            whole = {"probs": prediction.probs, "label": prediction.label, "entropy": prediction.entropy}
            return whole | parts | sets
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
            "class_names": list(self.class_names),
            "most_rows": self.most_rows,
        } | self.rows_of.described()
