"""Sums over the data that a curvature is made of: one pass each, over ranks, kept and resumed.

With F_n = R_n^T J_n, where R_n R_n^T is the Fisher information of row n's outputs, the GGN is sum_n F_n^T F_n. A row of
F_n is one cotangent (a column of R_n) sent back through the network.

    full       H = sum F^T F over chosen weights, in blocks         rows       F itself, where it has fewer rows than H
    diagonal   sum F^2, exact, for every weight                      kronecker  A = sum a a^T, G = sum g g^T by layer
    energy     sum J^2, what the outputs feel of each weight         low_rank   the GGN's dominant directions

`fisher="mc"` replaces the columns of R_n by one random combination of them, R_n e: right on average, and one cotangent
instead of many.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import Tensor

from caveat.batches import Inputs, map_tensors
from caveat.engine.cost import forward_flops, working_numbers
from caveat.engine.flat_weights import flat_places
from caveat.engine.laplace.factor_sides import FactorDirections, FactorSum, directions_of
from caveat.engine.laplace.gaussians import DOUBLE_UP_TO, Curvature, FullCurvature, StackedCurvature
from caveat.engine.laplace.gram_matrix import GramMatrix
from caveat.engine.laplace.layer_gaussians import DiagonalPart, KroneckerPart, LayerCurvature, factors
from caveat.engine.laplace.memory import Structure, uses_rows
from caveat.engine.row_gradients import (
    ElementwiseUse,
    Jacobian,
    NotFactoredError,
    Plans,
    ProductUse,
    RowPass,
    evenly,
    one_hot,
)
from caveat.engine.run import Run
from caveat.likelihoods import Hyper
from caveat.likelihoods.protocol import FisherByColumns, fisher_columns, fisher_rank
from caveat.network import Network, Params
from caveat.randomness import normals
from caveat.rows import Rows

__all__ = ["Fisher", "Sweep"]

Fisher = Literal["exact", "mc"]
MANY = 500  # passes back for every row, of which a person is told


@dataclass(frozen=True)
class Sweep:
    """Passes over data for the curvature at one point."""

    network: Network
    params: Params  # with buffers, as a draw has them
    hyper: Hyper
    rows: Rows
    run: Run
    fisher: Fisher = "exact"
    bfloat16: bool = False
    plans: Plans = field(default_factory=Plans)  # ways to the gradients of rows, found once

    def jacobian(self, index: Tensor | None = None) -> Jacobian:
        """The Jacobian of all weights, or of those at the positions `index` [n], at this point."""
        first = torch.arange(min(3, len(self.rows)))
        x, _ = next(iter(self.rows.batches([first], self.network.device)))
        return Jacobian(self.network, self.params, x, index, bfloat16=self.bfloat16, plans=self.plans)

    def cotangents(self, row_pass: RowPass, y: Tensor, rng: torch.Generator) -> Iterator[Tensor]:
        """The columns of R of all rows at once, each in the outputs' shape [B, ...]."""
        likelihood, outputs = self.network.likelihood, row_pass.outputs
        if self.fisher == "mc":
            yield likelihood.sample_noise(outputs, y, self.hyper, rng)
            return
        yield from fisher_columns(likelihood, outputs, y, self.hyper)

    def _without_cotangents(self) -> FisherByColumns | None:
        """The likelihood, where of a last layer it gives the exact information of all classes in one go."""
        likelihood = self.network.likelihood
        return likelihood if self.fisher == "exact" and isinstance(likelihood, FisherByColumns) else None

    def _is_last_layer(self, jacobian: Jacobian) -> bool:
        return jacobian.order is not None and self._without_cotangents() is not None

    def rank(self) -> int:
        """How many cotangents a row takes."""
        if self.fisher == "mc":
            return 1
        x, y = next(iter(self.rows.batches([torch.arange(1)], self.network.device)))
        with torch.no_grad():
            return fisher_rank(self.network.likelihood, self.network(self.params, x), y, self.hyper)

    def over(self, network: Network) -> "Sweep":
        """The same passes for another selection of the network's parameters."""
        return replace(self, network=network)

    def informative(self, skip: float) -> tuple["Sweep", dict[str, float]]:
        """This sweep over fewer rows, without those whose Fisher information is negligible, and how much they had.

        Rows are left out, least information first, as long as their share of the whole stays below `skip`.
        """
        if not skip:
            return self, {"rows": 0, "share_of_information": 0.0}
        traces = self.traces().double().cpu()
        order = traces.argsort()
        below = (traces[order].cumsum(0) <= skip * traces.sum()) & (traces[order] < 0.01 * traces.mean())
        count = int(below.sum())
        share = float(traces[order[:count]].sum() / traces.sum().clamp_min(1e-300))
        rows = self.rows.part(order[count:].sort().values)
        return replace(self, rows=rows), {"rows": count, "share_of_information": share}

    def curvature(
        self,
        structure: Structure,
        index: Tensor | None = None,
        rank: int = 0,
        factors: FactorDirections = "whole",
    ) -> tuple[Curvature, float]:
        """The curvature in a structure, over chosen weights, and the log likelihood of all rows at the point.

        A full curvature keeps the rows of F as they are where they are fewer than the weights.
        """
        if structure == "diagonal":
            return self.diagonal()
        if structure == "kronecker":
            return self.kronecker(factors)
        if structure == "low_rank":
            return self.low_rank(rank)
        n, m = self.network.n_parameters if index is None else len(index), len(self.rows) * self.rank()
        return self.stacked(index) if uses_rows(n, m, self.network.dtype.itemsize) else self.full(index)

    def full(self, index: Tensor | None) -> tuple[FullCurvature, float]:
        """The GGN matrix over the chosen weights, [n, n], and the log likelihood."""
        jacobian = self.jacobian(index)
        n, rank = jacobian.size, self.rank()
        gram = GramMatrix(self._zeros(n, n, dtype=torch.float64 if n <= DOUBLE_UP_TO else None), jacobian.order)
        # Of a last layer's rows not only gradients are held, but [D, D] too, which may be more than [n].
        columns = rank if jacobian.order is None else max(rank, -(-(jacobian.plan.outputs**2) // n))

        def add(row_pass: RowPass, y: Tensor, rng: torch.Generator) -> None:
            phi = row_pass.features()
            if phi is not None:
                r = torch.stack(list(self.cotangents(row_pass, y, rng)), 1).to(gram.total.dtype)  # [B, rank, D]
                gram.add_outer(r.mT @ r, phi)
                return
            for v in self.cotangents(row_pass, y, rng):
                gram.add(row_pass.columns(v))

        totals, size = {"ggn": gram.total}, jacobian.rows_at_once(columns)
        log_likelihood = self._sweep("curvature", jacobian, totals, add, rank, size, gram.flush)
        return FullCurvature(gram.symmetric()), log_likelihood

    def stacked(self, index: Tensor | None) -> tuple[StackedCurvature, float]:
        """All rows of F over the chosen weights, [m, n], for the dual form, and the log likelihood."""
        jacobian, rank = self.jacobian(index), self.rank()
        total = self._zeros(len(self.rows) * rank, jacobian.size)
        offset = int(self.run.ranks.part(torch.arange(len(self.rows)))[:1].sum()) * rank
        filled = self._zeros(1, dtype=torch.long)

        def add(row_pass: RowPass, y: Tensor, rng: torch.Generator) -> None:
            for v in self.cotangents(row_pass, y, rng):
                start = offset + int(filled)
                total[start : start + len(y)] = row_pass.columns(v).to(total.dtype)
                filled.add_(len(y))

        totals, size = {"rows": total, "filled": filled}, jacobian.rows_at_once(rank)
        log_likelihood = self._sweep("curvature", jacobian, totals, add, rank, size)
        return StackedCurvature(total), log_likelihood

    def diagonal(self) -> tuple[LayerCurvature, float]:
        """The exact diagonal of the GGN, parameter by parameter, and the log likelihood."""
        jacobian = self.jacobian()
        totals = {name: torch.zeros_like(self.params[name]) for name in self.network.names}

        def add(row_pass: RowPass, y: Tensor, rng: torch.Generator) -> None:
            phi, likelihood = row_pass.features(), self._without_cotangents()
            if likelihood is not None and phi is not None:
                phi = phi.to(next(iter(totals.values())).dtype)
                information = likelihood.fisher_diagonal(row_pass.outputs.to(phi.dtype), y, self.hyper)
                _add_to(totals, _by_last_layer(information.T @ phi.square(), jacobian, totals))
                return
            for v in self.cotangents(row_pass, y, rng):
                _add_to(totals, row_pass.squares(v))

        cotangents = 1 if self._is_last_layer(jacobian) else self.rank()
        log_likelihood = self._sweep("curvature", jacobian, totals, add, cotangents, jacobian.rows_at_once())
        return self._by_layer(totals, {}), log_likelihood

    def scores(self, exact: bool) -> tuple[Params, Params]:
        """The diagonals of the GGN and of sum J^T J, in one pass; from one random cotangent each unless exact."""
        jacobian = self.jacobian()
        kinds = ("ggn", "energy")
        totals = {f"{k}/{n}": torch.zeros_like(self.params[n]) for k in kinds for n in self.network.names}

        def add(row_pass: RowPass, y: Tensor, rng: torch.Generator) -> None:
            if exact:
                noise, plain = self.cotangents(row_pass, y, rng), one_hot(row_pass.outputs)
            else:
                outputs = row_pass.outputs
                signs = torch.randint(0, 2, outputs.shape, generator=rng).to(outputs) * 2 - 1
                noise = iter([self.network.likelihood.sample_noise(outputs, y, self.hyper, rng)])
                plain = iter([signs])
            for kind, cotangents in (("ggn", noise), ("energy", plain)):
                for v in cotangents:
                    _add_to(totals, {f"{kind}/{name}": value for name, value in row_pass.squares(v).items()})

        cost = self.rank() + jacobian.plan.outputs if exact else 2
        self._sweep("selection", jacobian, totals, add, cost, jacobian.rows_at_once())
        ggn, energy = ({n: totals[f"{kind}/{n}"] for n in self.network.names} for kind in kinds)
        return ggn, energy

    def kronecker(self, factors: FactorDirections = "whole") -> tuple[LayerCurvature, float]:
        """A Kronecker product for every linear layer and convolution, a diagonal for all else; the log likelihood.

        A layer that some rows reach otherwise than the first ones (an expert) has a diagonal too, once that is seen.
        """
        jacobian, label = self.jacobian(), "curvature"
        while True:
            try:
                return self._kronecker(jacobian, factors, label)
            except NotFactoredError:  # the Jacobian knows by now, and the sums begin again
                if self.run.ranks.size > 1:  # the others have not seen it
                    raise
                label += "-again"

    def _kronecker(self, jacobian: Jacobian, factors: FactorDirections, label: str) -> tuple[LayerCurvature, float]:
        """The sums of `kronecker`, as far as this Jacobian knows the layers."""
        x, _ = next(iter(self.rows.batches([torch.arange(min(2, len(self.rows)))], self.network.device)))
        layers = _kronecker_layers(jacobian.at(x))
        covered = {name for layer in layers for name in layer}
        rest = [name for name in self.network.names if name not in covered]
        totals: Params = {name: torch.zeros_like(self.params[name]) for name in rest}
        sums: dict[tuple[str, ...], tuple[FactorSum, FactorSum]] = {}
        for names in layers:
            o, i = len(self.params[names[0]]), self.params[names[0]][0].numel() + len(names) - 1
            like = self._zeros()
            a, g = (
                FactorSum.empty(i, directions_of(i, o, factors), like),
                FactorSum.empty(o, directions_of(o, i, factors), like),
            )
            sums[names] = (a, g)
            totals |= a.tensors(f"{names[0]}|A") | g.tensors(f"{names[0]}|G") | {f"{names[0]}|count": self._zeros()}

        def add(row_pass: RowPass, y: Tensor, rng: torch.Generator) -> None:
            phi, likelihood = row_pass.features(), self._without_cotangents()
            if likelihood is not None and phi is not None and len(layers) == 1 and not rest:
                weight, (a, g) = layers[0][0], sums[layers[0]]
                wide = phi.to(totals[f"{weight}|count"].dtype)
                g.add_matrix(likelihood.fisher_sum(row_pass.outputs.to(wide.dtype), y, self.hyper))
                a.add(wide.T)
                totals[f"{weight}|count"] += len(phi)
                return
            for number, v in enumerate(self.cotangents(row_pass, y, rng)):
                if rest:
                    _add_to(totals, row_pass.squares(v, rest))
                _add_factors(row_pass, row_pass.gradients(v), sums, totals, with_inputs=number == 0)

        cotangents = 1 if self._is_last_layer(jacobian) else self.rank()
        log_likelihood = self._sweep(label, jacobian, totals, add, cotangents, jacobian.rows_at_once())
        products: dict[tuple[str, ...], KroneckerPart] = {}
        for names, (a, g) in sums.items():
            products[names] = KroneckerPart(a.total(), g.total(), totals[f"{names[0]}|count"], len(names) > 1)
        return self._by_layer({name: totals[name] for name in rest}, products), log_likelihood

    def _by_layer(self, diagonals: Params, products: dict[tuple[str, ...], KroneckerPart]) -> LayerCurvature:
        """A curvature of diagonals for some parameters and Kronecker products for others."""
        parts: dict[tuple[str, ...], DiagonalPart | KroneckerPart] = {}
        parts.update({(name,): DiagonalPart(value.flatten()) for name, value in diagonals.items()})
        parts.update(products)
        return LayerCurvature(parts, flat_places(self.network))

    def _products(self, vectors: Tensor, label: str) -> tuple[Tensor, float]:
        """The GGN of all weights times vectors [K, n], and the log likelihood."""
        jacobian, rank = self.jacobian(), self.rank()
        total = torch.zeros_like(vectors)

        def add(row_pass: RowPass, y: Tensor, rng: torch.Generator) -> None:
            for v in self.cotangents(row_pass, y, rng):
                f = row_pass.columns(v).to(vectors.dtype)  # [B, n]
                total.addmm_((f @ vectors.T).T, f)

        log_likelihood = self._sweep(label, jacobian, {"products": total}, add, rank, jacobian.rows_at_once(rank))
        return total, log_likelihood

    def low_rank(self, rank: int, passes: int = 3) -> tuple[StackedCurvature, float]:
        """The GGN's `rank` largest eigenvalues with their vectors, [rank, n], and the log likelihood.

        They come from subspace iteration on ten vectors more than are wanted.

        With Y = GGN Q for orthonormal Q, the last pass is a Nystrom approximation Y (Q^T Y)^-1 Y^T, which is at most
        the GGN and never loses what the iteration has found.
        """
        n = self.network.n_parameters
        count = min(n, rank + 10)
        rng = torch.Generator().manual_seed(self.run.seed)
        like = next(iter(self.params.values()))
        q = normals((count, n), rng, like)
        for number in range(passes):
            q = torch.linalg.qr(q.T).Q.T  # [count, n], orthonormal rows
            y, log_likelihood = self._products(q, f"curvature-{number}")
            previous, q = q, y
        inner = (previous @ y.T).double()
        values, vectors = torch.linalg.eigh((inner + inner.T) / 2)
        # Below what rounding leaves in y, an eigenvalue is noise, and dividing by its root would make it large.
        significant = values > values[-1].clamp_min(1e-300) * 10 * torch.finfo(y.dtype).eps
        scaled = vectors[:, significant] / values[significant].sqrt()
        half = scaled.T.to(y.dtype) @ y  # half^T half = the approximation
        _, singular, basis = torch.linalg.svd(half, full_matrices=False)
        # Draws depend on the rows' signs, which a decomposition leaves open: the largest entry of each is positive.
        basis = basis * basis.gather(1, basis.abs().argmax(1, keepdim=True)).sign()
        return StackedCurvature((singular.unsqueeze(1) * basis)[:rank].contiguous()), log_likelihood

    def traces(self) -> Tensor:
        """The trace of every row's Fisher information, [N]: how much it can add to any curvature."""
        likelihood = self.network.likelihood
        traces = []
        with torch.no_grad(), self.run.bar(len(self.rows), "row") as bar:
            for x, y in self.rows.ordered(4 * self.rows.batch_size, self.network.device):
                traces.append(likelihood.fisher_trace(self.network(self.params, x), y, self.hyper))
                bar.update(len(y))
        self.run.flops += self._forward_flops(x) * len(self.rows)
        return torch.cat(traces)

    def _zeros(self, *shape: int, dtype: torch.dtype | None = None) -> Tensor:
        like = next(iter(self.params.values()))
        return torch.zeros(shape, dtype=dtype or like.dtype, device=self.network.device)

    def _forward_flops(self, x: Inputs) -> float:
        """Of one row."""
        return forward_flops(self.network, self.params, map_tensors(lambda t: t[:1] if t.ndim else t, x))

    def _sweep(
        self,
        label: str,
        jacobian: Jacobian,
        totals: Params,
        add: Callable[[RowPass, Tensor, torch.Generator], None],
        cotangents: int,
        size: int,
        flush: Callable[[], None] = lambda: None,
    ) -> float:
        """One pass over this rank's rows; `add` writes into `totals`, which are then summed over ranks.

        Returns the log likelihood of all rows at the point.
        """
        part = self.run.child(label)
        ranks = self.run.ranks
        if cotangents > MANY:
            part.warnings.append(
                f"the exact Fisher information takes {cotangents:,} passes back for every row: fisher='mc' takes one, "
                "and is right on average; so is LastLayerLaplace with structure='kronecker' or 'diagonal', exactly"
            )
        mine = ranks.part(torch.arange(len(self.rows)))
        totals = totals | {"log_likelihood": self._zeros(dtype=torch.float64)}
        done = 0
        resumed = part.resume() if ranks.size == 1 else None
        if resumed is not None:
            done = resumed[1]["rows"]
            for name, value in resumed[0]["totals"].items():
                totals[name].copy_(value)
        flops = 0.0
        left = mine[done:]  # how many rows a pass takes may be another number than before
        order = list(torch.split(left, evenly(len(mine), size))) if len(left) else []
        with part.bar(len(mine), "row") as bar:
            bar.update(done)
            for piece, (x, y) in zip(order, self.rows.on(self.run.device).batches(order, self.run.device), strict=True):
                if not flops:
                    flops = self._forward_flops(x)
                rng = torch.Generator().manual_seed(part.seed + int(piece[0]))
                row_pass = jacobian.at(x)
                totals["log_likelihood"] += self.network.likelihood.log_prob(row_pass.outputs, y, self.hyper).sum()
                add(row_pass, y, rng)
                del row_pass  # before the next pass is made: two would be held at once
                done += len(y)
                bar.update(len(y))
                if ranks.size == 1 and part.checkpoint_due():
                    flush()
                    part.checkpoint({"totals": totals}, {"rows": done})
        flush()
        ranks.add(totals.values())
        part.gradient_evaluations += cotangents
        part.flops += flops * len(self.rows) * (1 + 2 * cotangents)
        self.run.absorb(part)
        return float(totals["log_likelihood"])


def _kronecker_layers(row_pass: RowPass) -> list[tuple[str, ...]]:
    """Weights, each with the bias of the same layer, that a Kronecker product can stand for."""
    layers = []
    by_name = row_pass.by_name()
    for name, uses in row_pass.products().items():
        if any(use.groups > 1 or use.outputs != len(use.weight) for use, _ in uses):
            continue
        points = {point for _, point in uses}
        biases = [
            other
            for other, places in by_name.items()
            if {point for _, point in places} == points and all(isinstance(use, ElementwiseUse) for use, _ in places)
        ]
        layers.append((name, *biases))
    return layers


def _add_factors(
    row_pass: RowPass,
    gradients: list[Tensor],
    sums: dict[tuple[str, ...], tuple[FactorSum, FactorSum]],
    totals: Params,
    with_inputs: bool,
) -> None:
    for (name, *bias), (inputs, outputs) in sums.items():
        count = totals[f"{name}|count"]
        for use, point in row_pass.factored(name):
            step = max(1, working_numbers(row_pass.outputs) // _numbers(use, gradients[point]))
            for start in range(0, use.rows, step):
                rows = slice(start, min(start + step, use.rows))
                a, g = factors(use, gradients[point], rows, bool(bias), inputs=with_inputs)  # [n, I, T], [n, O, T]
                outputs.add(g.transpose(0, 1).flatten(1).to(count.dtype))
                if with_inputs:
                    flat = a.transpose(0, 1).flatten(1).to(count.dtype)
                    inputs.add(flat)
                    count += flat.shape[1]


def _numbers(use: ProductUse, g: Tensor) -> int:
    """Numbers in one row's patches."""
    return max(1, use.weight[0].numel() * g.numel() // max(use.outputs * use.rows, 1))


def _by_last_layer(whole: Tensor, jacobian: Jacobian, totals: Params) -> Params:
    """Numbers [D, I] of a last layer as those of its weight and, from the last of I, its bias."""
    weight, *bias = jacobian.plan.last
    parts = {weight: whole[:, : totals[weight][0].numel()]} | dict.fromkeys(bias, whole[:, -1])
    return {name: value.reshape(totals[name].shape).to(totals[name].dtype) for name, value in parts.items()}


def _add_to(totals: Params, more: Params) -> None:
    for name, value in more.items():
        totals[name] += value
