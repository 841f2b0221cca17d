"""Watches the torch functions that a module calls, and records where its parameters act.

    tape = Tape({id(params[name]): name for name in names}, rows)
    with tape:
        outputs = network(params, x)        tape.uses, tape.points

Functions that `function_rules` knows leave a record of what the gradient of each row is computed from (`uses`,
`product_uses`). Any other function that takes a watched parameter makes it "unknown", and the Jacobian falls back on
copies of that parameter for each row.
"""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from caveat.batches import tensors
from caveat.engine.row_gradients.function_rules import RULES
from caveat.engine.row_gradients.use_record import NotRowsError, Record
from caveat.engine.row_gradients.uses import Axis

__all__ = ["Tape"]


class Tape(Record, TorchFunctionMode):
    """Records every use of the watched parameters while it is active."""

    def __init__(self, watched: dict[int, str], rows: int, axes: Mapping[str, Sequence[Axis]] | None = None) -> None:
        super().__init__(watched, rows, axes)
        self.unknown: set[str] = set()
        self.last: set[str] = set()  # parameters that the last function to take any took
        self.selects = False  # whether a function picks entries of a tensor that has the rows, and may mix them up
        self.widest = 0  # numbers in the largest result of any function that has the rows, or rows x positions

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Let the function run and record what it does with watched parameters."""
        result = self._called(func, args, kwargs or {})
        self.selects |= func is not F.embedding and self._may_select(tensors((args, kwargs)))
        of_rows = (tensor.numel() for tensor in tensors(result) if self._has_rows(tensor))
        self.widest = max(self.widest, *of_rows, 0)
        return result

    def _may_select(self, given: list[Tensor]) -> bool:
        """Whether one of a function's tensors may be the places or a mask of what it takes from another."""
        return any(t.ndim and not t.is_floating_point() for t in given) and any(
            t.is_floating_point() and self._has_rows(t) for t in given
        )

    def _has_rows(self, tensor: Tensor) -> bool:
        folded = tensor.ndim > 0 and self.rows > 0 and len(tensor) % self.rows == 0
        return folded or self.rows in tensor.shape[:2]

    def _called(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
        owned = {name for tensor in tensors((args, kwargs)) if (name := self.name(tensor)) is not None}
        if not owned:
            return func(*args, **kwargs)
        rule = RULES.get(func)
        if rule is not None:
            with contextlib.suppress(NotRowsError):
                found = rule(self, func, *args, **kwargs)
                if found is not None:
                    self.last = owned
                    return found
        result = func(*args, **kwargs)
        if any(id(tensor) not in self.watched for tensor in tensors(result)):
            self.unknown |= owned
            self.last = owned
        return result
