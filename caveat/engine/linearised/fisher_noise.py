"""The noise of a linearised network: the Fisher information of its likelihood at the outputs of all rows."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from caveat.engine.linear_model import RowBlock
from caveat.likelihoods import Hyper, Likelihood
from caveat.likelihoods.protocol import DiagonalFisher, fisher_rank

__all__ = ["LikelihoodNoise"]

PIECE = 8192, 2**24  # rows whose likelihood is looked at together, and numbers of their outputs


class LikelihoodNoise:
    """The Fisher information of a likelihood at given outputs of all rows, as factors."""

    def __init__(self, likelihood: Likelihood, hyper: Hyper, outputs: Tensor, targets: Tensor) -> None:
        self.likelihood, self.hyper = likelihood, hyper
        self.outputs, self.targets = outputs, targets  # [n, ...] each
        self.width = fisher_rank(likelihood, outputs[:1], targets[:1], hyper)  # columns of a row's factor

    @property
    def row_numbers(self) -> int:
        """How many numbers the factor of a row holds while it is made."""
        diagonal = isinstance(self.likelihood, DiagonalFisher)
        return self.width if diagonal else 3 * self.width * self.outputs.shape[self.likelihood.output_axis]

    def factor(self, block: RowBlock) -> Tensor:
        """The factors of the Fisher information of a block's rows."""
        return self._factor(self.outputs[block.index], self.targets[block.index])

    def information(self) -> Tensor:
        """B of all rows where it is diagonal, [n, m]."""
        return torch.cat([self._factor(h, y).square() for h, y in self._pieces(self.outputs)])

    def of(self, rows: Tensor) -> "LikelihoodNoise":
        """The noise of some of the rows."""
        return LikelihoodNoise(self.likelihood, self.hyper, self.outputs[rows], self.targets[rows])

    def informative(self, negligible: float) -> Tensor | None:
        """The rows without those that hold a `negligible` share of the information; None where all should count."""
        every = self._pieces(self.outputs)
        traces = torch.cat([self.likelihood.fisher_trace(h.double(), y, self.hyper) for h, y in every])
        least = traces.argsort()
        dropped = least[: int((traces[least].cumsum(0) <= negligible * traces.sum()).sum())]
        if not 0.05 * len(traces) <= len(dropped) < len(traces):
            return None
        counted = torch.ones_like(traces, dtype=torch.bool)
        counted[dropped] = False
        return counted.nonzero().squeeze(1)

    def at(self, outputs: Tensor) -> "LikelihoodNoise":
        """The noise at other outputs, [n, m]."""
        return LikelihoodNoise(self.likelihood, self.hyper, outputs.view_as(self.outputs), self.targets)

    def _factor(self, outputs: Tensor, targets: Tensor) -> Tensor:
        factor = self.likelihood.fisher_factor(outputs, targets, self.hyper)  # [B, ..., c, q]
        if isinstance(self.likelihood, DiagonalFisher):
            return factor.diagonal(dim1=-2, dim2=-1).flatten(1)
        if factor.ndim == 3:
            return factor
        axis = self.likelihood.output_axis % outputs.ndim
        before, after = math.prod(outputs.shape[1:axis]), math.prod(outputs.shape[axis + 1 :])
        return factor.reshape(len(factor), before, after, *factor.shape[-2:]).permute(0, 1, 3, 4, 2)

    def log_likelihood(self, outputs: Tensor) -> float:
        """The log likelihood of all rows at outputs [n, m], summed in float64."""
        total = 0.0
        with torch.no_grad():
            for h, y in self._pieces(outputs):
                total += float(self.likelihood.log_prob(h, y, self.hyper).sum(dtype=torch.float64))
        return total

    def slope(self, outputs: Tensor) -> Tensor:
        """The derivative of the log likelihood by the outputs, [n, m]."""
        slopes = []
        for h, y in self._pieces(outputs):
            with torch.enable_grad():
                leaf = h.detach().requires_grad_()
                total = self.likelihood.log_prob(leaf, y, self.hyper).sum()
            slopes.append(torch.autograd.grad(total, leaf)[0].flatten(1))
        return torch.cat(slopes)

    def _pieces(self, outputs: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        rows = max(1, min(PIECE[0], PIECE[1] // max(self.outputs[:1].numel(), 1)))
        yield from zip(outputs.view_as(self.outputs).split(rows), self.targets.split(rows), strict=True)
