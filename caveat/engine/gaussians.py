"""Gaussians over weights, N(0, P^-1) with P = curvature + diag(prior), in the forms that a posterior can afford.

    Dense     P itself, as its Cholesky factor                       n^2 numbers
    LowRank   P = diag(prior) + rows^T rows, by Woodbury's identity   m n numbers, m rows
    Layers    no covariance between parts: within one, P is diagonal, or diagonal in the basis of a Kronecker product

Each says the covariance of J delta for the Jacobian of a forward pass (`Here`), draws delta, shifts outputs by J delta,
and gives its log determinant and the marginal variances. A curvature makes the Gaussian of any prior; its `path` serves
every multiple of one prior with the work of a single decomposition.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from caveat.engine.jacobian import Here, Jacobian
from caveat.engine.layers import Product, working_numbers
from caveat.network import Params

__all__ = [
    "Curvature",
    "Dense",
    "Diagonal",
    "Full",
    "Gaussian",
    "Kronecker",
    "Layered",
    "Layers",
    "LowRank",
    "Path",
    "Rows",
    "restored",
]

DOUBLE_UP_TO = 4096  # matrices up to this size are summed and factored in float64


class Gaussian(Protocol):
    """A zero-mean Gaussian over n weights."""

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """How many rows a pass for a covariance or for shifts should take."""

    @property
    def prior(self) -> Tensor:
        """Prior precisions, [n]."""

    def covariance(self, here: Here, joint: bool = False) -> Tensor:
        """Covariance of J delta: of each row's D outputs [B, D, D], or of all rows together [B D, B D]."""

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """Draws, [count, n], in coordinates of the Gaussian's own."""

    def shifts(self, here: Here, deltas: Tensor) -> Tensor:
        """J delta for each draw, [count, B, D]."""

    def weights(self, deltas: Tensor) -> Tensor:
        """The draws as weights, [count, n]."""

    def log_det(self) -> float:
        """Log determinant of the precision P."""

    def variances(self) -> Tensor:
        """The diagonal of P^-1, [n]."""

    def tensors(self) -> Params:
        """What is stored."""

    def curvature(self) -> "Curvature":
        """What the data gave."""


class Path(Protocol):
    """The Gaussians of curvature + scale diag(prior) for any scale."""

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """How many rows a pass for covariances should take."""

    @property
    def lowest(self) -> float:
        """The least scale at which the precision is positive definite beyond rounding."""

    def covariances(self, here: Here, scales: Sequence[float]) -> Tensor:
        """Covariance of each row's outputs for each scale, [K, B, D, D]."""

    def log_det(self, scale: float) -> float:
        """Log determinant of the precision at one scale."""


class Curvature(Protocol):
    """The data's part of a precision."""

    def gaussian(self, prior: Tensor) -> Gaussian:
        """The Gaussian with these prior precisions, [n]."""

    def path(self, prior: Tensor) -> Path:
        """All multiples of these prior precisions at once."""

    def times(self, factor: float) -> "Curvature":
        """The curvature times a number: of rows that say more or less than was thought."""

    def tensors(self) -> Params:
        """The sums that a pass over the data makes, which add up over data."""


# Over columns of the Jacobian


@dataclass(frozen=True)
class Dense:
    """A full precision matrix, factored once."""

    cholesky: Tensor  # lower triangular, cholesky @ cholesky.T = P
    prior: Tensor

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """As the columns of all outputs fit."""
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def _whitened(self, j: Tensor) -> Tensor:
        """Times L^-T: what j delta is made of in independent standard normals."""
        flat = j.flatten(0, -2)
        solved = torch.linalg.solve_triangular(self.cholesky.to(flat.dtype), flat.T, upper=False).T
        return solved.reshape(j.shape)

    def covariance(self, here: Here, joint: bool = False) -> Tensor:
        """J P^-1 J^T from half of it."""
        half = self._whitened(here.rows())
        half = half.flatten(0, 1) if joint else half
        return half @ half.mT

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """L^-T z with z standard normal."""
        z = _normal((len(self.prior), count), rng, self.cholesky)
        return torch.linalg.solve_triangular(self.cholesky.mT, z, upper=True).T

    def shifts(self, here: Here, deltas: Tensor) -> Tensor:
        """J delta."""
        return _shifted(here.rows(), deltas)

    def weights(self, deltas: Tensor) -> Tensor:
        """They are weights."""
        return deltas

    def log_det(self) -> float:
        """Twice the sum of the logs of the factor's diagonal."""
        return 2 * float(self.cholesky.diagonal().double().log().sum())

    def variances(self) -> Tensor:
        """The diagonal of the inverse."""
        return torch.cholesky_inverse(self.cholesky).diagonal()

    def tensors(self) -> Params:
        """The factor and the prior."""
        return {"cholesky": self.cholesky, "prior": self.prior}

    def curvature(self) -> "Full":
        """What the data gave: P less the prior."""
        factor = _wide(self.cholesky)
        return Full(factor @ factor.mT - torch.diag(self.prior.to(factor)))


@dataclass(frozen=True)
class Full:
    """A GGN matrix, [n, n]."""

    ggn: Tensor

    def gaussian(self, prior: Tensor) -> Dense:
        """Factor GGN + diag(prior)."""
        return Dense(_factored(self.ggn, prior).to(prior.dtype), prior)

    def path(self, prior: Tensor) -> "_Spectrum":
        """One eigendecomposition of the GGN in units of the prior: its eigenvalues plus the scale are all there is."""
        wide = _wide(self.ggn)
        root = prior.to(wide).sqrt()
        values, vectors = torch.linalg.eigh(wide / root / root.unsqueeze(1))
        scaled = (vectors / root.unsqueeze(1)).to(prior.dtype)
        lowest = max(-2 * float(values[0]), torch.finfo(values.dtype).eps * float(values[-1]))
        return _Spectrum(values.clamp_min(0), scaled, 2 * float(root.log().sum()), lowest)

    def times(self, factor: float) -> "Full":
        """The curvature times a number."""
        return Full(self.ggn * factor)

    def tensors(self) -> Params:
        """The matrix."""
        return {"ggn": self.ggn}


@dataclass(frozen=True)
class _Spectrum:
    values: Tensor  # [n]
    vectors: Tensor  # [n, n], scaled by the root of the prior
    log_det_prior: float
    lowest: float  # what rounding made of the smallest eigenvalues, and a little more

    def rows_at_once(self, jacobian: Jacobian) -> int:
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def covariances(self, here: Here, scales: Sequence[float]) -> Tensor:
        rotated = here.rows().to(self.vectors.dtype) @ self.vectors
        values = self.values.to(rotated.dtype)
        return torch.stack([(rotated / (values + scale)) @ rotated.mT for scale in scales])

    def log_det(self, scale: float) -> float:
        return float((self.values.double() + scale).log().sum()) + self.log_det_prior


@dataclass(frozen=True)
class LowRank:
    """A diagonal precision and m rows, P = diag(prior) + rows^T rows: the dual form, or an approximation of rank m.

    P^-1 = D^-1 - D^-1 rows^T K^-1 rows D^-1  with  D = diag(prior), K = I + rows D^-1 rows^T = cholesky cholesky^T
    """

    rows: Tensor  # [m, n]
    cholesky: Tensor  # [m, m], lower triangular; float64 where it is small, see `Rows`
    prior: Tensor

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """As the columns of all outputs fit."""
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def covariance(self, here: Here, joint: bool = False) -> Tensor:
        """J D^-1 J^T - (J D^-1 rows^T) K^-1 (rows D^-1 J^T)."""
        j = here.rows()
        if self.rows.numel() + j.numel() < 2**26:
            j = j.double()  # two large terms nearly cancel where the data say much
        j = j.flatten(0, 1) if joint else j
        scaled = j / self.prior.to(j.dtype)
        part = (scaled @ self.rows.to(j.dtype).T).flatten(0, -2)  # [..., m]
        solved = torch.linalg.solve_triangular(self.cholesky.to(j.dtype), part.T, upper=False).T
        half = solved.reshape(*j.shape[:-1], -1)
        return (scaled @ j.mT - half @ half.mT).to(here.outputs.dtype)

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """As u - D^-1 rows^T K^-1 (rows u + e) with u ~ N(0, D^-1), e standard normal: conditioning a prior draw."""
        u = _normal((count, len(self.prior)), rng, self.rows) / self.prior.to(self.rows.dtype).sqrt()
        e = _normal((count, len(self.rows)), rng, self.rows)
        target = (u @ self.rows.T + e).T.to(self.cholesky.dtype)
        solved = torch.cholesky_solve(target, self.cholesky).T.to(self.rows.dtype)
        return u - (solved @ self.rows) / self.prior.to(self.rows.dtype)

    def shifts(self, here: Here, deltas: Tensor) -> Tensor:
        """J delta."""
        return _shifted(here.rows(), deltas)

    def weights(self, deltas: Tensor) -> Tensor:
        """They are weights."""
        return deltas

    def log_det(self) -> float:
        """log|D| + log|K|."""
        return float(self.prior.double().log().sum()) + 2 * float(self.cholesky.diagonal().double().log().sum())

    def variances(self) -> Tensor:
        """The diagonal of Woodbury's identity."""
        solved = torch.linalg.solve_triangular(self.cholesky, self.rows.to(self.cholesky.dtype), upper=False)
        half = solved / self.prior.to(solved)
        return (1 / self.prior.to(half) - half.square().sum(0)).to(self.rows.dtype)

    def tensors(self) -> Params:
        """Rows, factor, prior."""
        return {"rows": self.rows, "cholesky": self.cholesky, "prior": self.prior}

    def curvature(self) -> "Rows":
        """What the data gave."""
        return Rows(self.rows)


@dataclass(frozen=True)
class Rows:
    """A GGN as rows^T rows, with fewer rows than weights."""

    rows: Tensor

    def gaussian(self, prior: Tensor) -> LowRank:
        """Factor K, which is small."""
        return self._with(self._inner(prior), prior)

    def path(self, prior: Tensor) -> "_DualSpectrum":
        """One eigendecomposition of the rows' inner products in units of the prior."""
        values, vectors = torch.linalg.eigh(self._inner(prior))
        return _DualSpectrum(self.rows, prior, values.clamp_min(0), vectors)

    def times(self, factor: float) -> "Rows":
        """The curvature times a number."""
        return Rows(self.rows * factor**0.5)

    def _inner(self, prior: Tensor) -> Tensor:
        """Rows D^-1 rows^T; nearly singular where rows say the same, so in float64 where it is small."""
        m = len(self.rows)
        total = self.rows.new_zeros(m, m, dtype=torch.float64 if m <= DOUBLE_UP_TO else None)
        for rows, own in zip(self.rows.split(2**16, 1), prior.split(2**16), strict=True):
            scaled = rows.to(total.dtype) / own.to(total).sqrt()
            total.addmm_(scaled, scaled.T)
        return total

    def _with(self, inner: Tensor, prior: Tensor) -> LowRank:
        return LowRank(self.rows, _factored(inner, torch.ones_like(inner[0])), prior)

    def tensors(self) -> Params:
        """The rows."""
        return {"rows": self.rows}


@dataclass(frozen=True)
class _DualSpectrum:
    """J P^-1 J^T = (J D^-1 J^T - sum_i b_i b_i^T / (values_i + scale)) / scale  with  b = J D^-1 rows^T vectors."""

    rows: Tensor  # [m, n]
    prior: Tensor
    values: Tensor  # [m], of rows D^-1 rows^T
    vectors: Tensor  # [m, m]

    @property
    def lowest(self) -> float:
        return 10 * torch.finfo(self.values.dtype).eps * float(self.values[-1])

    def rows_at_once(self, jacobian: Jacobian) -> int:
        return jacobian.rows_at_once(jacobian.plan.outputs)

    def covariances(self, here: Here, scales: Sequence[float]) -> Tensor:
        j = here.rows().to(self.values.dtype)  # two large terms nearly cancel where the data say much
        scaled = j / self.prior.to(j)
        rotated = scaled @ self.rows.to(j.dtype).T @ self.vectors
        before = scaled @ j.mT
        found = [(before - (rotated / (self.values + scale)) @ rotated.mT) / scale for scale in scales]
        return torch.stack(found).to(here.outputs.dtype)

    def log_det(self, scale: float) -> float:
        prior = float((scale * self.prior.double()).log().sum())
        return prior + float((1 + self.values.double() / scale).log().sum())


# Layer by layer


@dataclass(frozen=True)
class Diagonal:
    """The GGN's diagonal for one parameter, [p]."""

    ggn: Tensor

    def spectrum(self) -> Tensor:
        """Curvature of each coordinate."""
        return self.ggn

    def pieces(self, here: Here, names: Sequence[str]) -> Iterator[tuple[slice, Tensor]]:
        """J of this parameter, [b, D, p]."""
        yield from here.jacobian_blocks(names)

    def weights(self, deltas: Tensor) -> Tensor:
        """Coordinates are weights."""
        return deltas

    def variances(self, precision: Tensor) -> Tensor:
        """One over the precision."""
        return 1 / precision

    def times(self, factor: float) -> "Diagonal":
        """The curvature times a number."""
        return Diagonal(self.ggn * factor)

    def tensors(self) -> Params:
        """The diagonal."""
        return {"ggn": self.ggn}


@dataclass(frozen=True)
class Kronecker:
    """G (x) A / count over a layer's weight [O, I] and, as a last input that is always 1, its bias.

    A = sum a a^T over inputs (patches), G = sum g g^T over gradients at the outputs, count = positions summed over.
    """

    inputs: Tensor  # A, [I, I]
    outputs: Tensor  # G, [O, O]
    count: Tensor
    has_bias: bool

    def rotated(self) -> "Rotated":
        """In the basis where it is diagonal."""
        a_values, a_vectors = torch.linalg.eigh(_wide(self.inputs / self.count))
        g_values, g_vectors = torch.linalg.eigh(_wide(self.outputs))
        dtype = self.inputs.dtype
        values = a_values.clamp_min(0).to(dtype), g_values.clamp_min(0).to(dtype)
        bases = a_vectors.to(dtype).contiguous(), g_vectors.to(dtype).contiguous()  # as they will be when loaded
        return Rotated(*values, *bases, self.count, self.has_bias)

    def times(self, factor: float) -> "Kronecker":
        """The curvature times a number."""
        return Kronecker(self.inputs, self.outputs * factor, self.count, self.has_bias)

    def tensors(self) -> Params:
        """The sums."""
        return {"inputs": self.inputs, "outputs": self.outputs, "count": self.count}


@dataclass(frozen=True)
class Rotated:
    """A Kronecker factorisation in its eigenbasis: coordinate (o, i) has curvature out_values[o] in_values[i]."""

    in_values: Tensor
    out_values: Tensor
    in_vectors: Tensor
    out_vectors: Tensor
    count: Tensor
    has_bias: bool

    def kronecker(self) -> Kronecker:
        """The sums that it came from."""
        a = (self.in_vectors * self.in_values) @ self.in_vectors.T * self.count
        return Kronecker(a, (self.out_vectors * self.out_values) @ self.out_vectors.T, self.count, self.has_bias)

    def spectrum(self) -> Tensor:
        """Curvature of each coordinate, flat."""
        return torch.outer(self.out_values, self.in_values).flatten()

    def pieces(self, here: Here, names: Sequence[str]) -> Iterator[tuple[slice, Tensor]]:
        """J in the eigenbasis: (Q_G^T g) (Q_A^T a)^T, so that inputs are rotated once and not for every output."""
        places = [(use, point) for use, point in here.by_name()[names[0]] if isinstance(use, Product)]
        gradients = here.output_gradients()
        size = len(self.in_values) * len(self.out_values) * max(len(gradients), 1)
        step = max(1, working_numbers(here.outputs) // size)
        for start in range(0, len(here.outputs), step):
            rows = slice(start, min(start + step, len(here.outputs)))
            found: list[Tensor] = []
            for use, point in places:
                a, _ = factors(use, gradients[0][point], rows, self.has_bias)  # [n, I, T]
                a = self.in_vectors.T @ a
                per_output = []
                for g in gradients:
                    _, o = factors(use, g[point], rows, self.has_bias, inputs=False)
                    block = (self.out_vectors.T @ o) @ a.mT  # [n, O, I]
                    m = len(block) // (rows.stop - rows.start)
                    per_output.append(block.unflatten(0, (-1, m)).sum(1).flatten(1))
                found.append(torch.stack(per_output, 1))
            yield rows, torch.stack(found).sum(0)

    def weights(self, deltas: Tensor) -> Tensor:
        """Coordinates [count, O I] back to the weight, then the bias."""
        blocks = deltas.unflatten(1, (len(self.out_values), len(self.in_values)))
        whole = self.out_vectors @ blocks @ self.in_vectors.T
        return _split_bias(whole, self.has_bias)

    def variances(self, precision: Tensor) -> Tensor:
        """Squares of the rotation times one over the precision."""
        inverse = (1 / precision).reshape(len(self.out_values), len(self.in_values))
        whole = self.out_vectors.square() @ inverse @ self.in_vectors.square().T
        return _split_bias(whole.unsqueeze(0), self.has_bias)[0]

    def tensors(self) -> Params:
        """Bases and eigenvalues."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "has_bias"}


def factors(use: Product, g: Tensor, rows: slice, has_bias: bool, inputs: bool = True) -> tuple[Tensor, Tensor]:
    """What a layer's weight multiplies [n, I, T] and the gradient at its outputs [n, O, T], for some rows."""
    arranged = use.arranged(g)
    m = len(arranged) // use.rows
    part = slice(rows.start * m, rows.stop * m)
    o = use.positions(arranged[part])
    if not inputs:
        return o, o
    a = use.patches(part, o.dtype)
    return (torch.cat([a, torch.ones_like(a[:, :1])], 1) if has_bias else a), o


def _split_bias(whole: Tensor, has_bias: bool) -> Tensor:
    """[count, O, I + 1] as the weight, then the bias, flat."""
    if not has_bias:
        return whole.flatten(1)
    return torch.cat([whole[..., :-1].flatten(1), whole[..., -1]], 1)


Part = Diagonal | Rotated


@dataclass(frozen=True)
class Layers:
    """Independent parts, each diagonal in its own coordinates; weights in the network's order."""

    parts: dict[tuple[str, ...], Part]
    places: dict[str, slice]  # of each parameter among the weights
    prior: Tensor  # [n]
    lowest: ClassVar[float] = 0.0

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """As the gradients of all outputs at all layers fit."""
        return jacobian.rows_at_once(layers=jacobian.plan.outputs)

    def precisions(self, scale: float = 1.0) -> Iterator[tuple[tuple[str, ...], Part, Tensor]]:
        """Each part with the precision of its coordinates."""
        for names, part in self.parts.items():
            values = part.spectrum()
            prior = torch.cat([self.prior[self.places[name]] for name in names]).to(values)
            if isinstance(part, Rotated):
                prior = prior[:1]  # one for all: a rotation mixes its weights
            yield names, part, values + scale * prior

    def covariance(self, here: Here, joint: bool = False) -> Tensor:
        """Summed over parts."""
        if not joint:
            d = here.outputs[0].numel() if len(here.outputs) else 0
            found = here.outputs.new_zeros(len(here.outputs), d, d)
            for names, part, precision in self.precisions():
                root = precision.rsqrt().to(found.dtype)
                for rows, block in part.pieces(here, names):
                    half = block.to(found.dtype) * root
                    found[rows] += half @ half.mT
            return found
        total = here.outputs.new_zeros(here.outputs.numel(), here.outputs.numel())
        for names, part, precision in self.precisions():
            blocks = [block for _, block in part.pieces(here, names)]
            if blocks:  # none where a weight does not act
                whole = torch.cat(blocks).flatten(0, 1).to(total.dtype)
                total += (whole / precision) @ whole.T
        return total

    def covariances(self, here: Here, scales: Sequence[float]) -> Tensor:
        """For several multiples of the prior from one pass."""
        d = here.outputs[0].numel() if len(here.outputs) else 0
        i, j = torch.triu_indices(d, d, device=here.outputs.device)
        found = here.outputs.new_zeros(len(here.outputs), len(i), len(scales))
        for names, part, _ in self.precisions():
            values = part.spectrum()
            prior = torch.cat([self.prior[self.places[name]] for name in names]).to(values)
            prior = prior[:1] if isinstance(part, Rotated) else prior
            inverse = torch.stack([1 / (values + scale * prior) for scale in scales], 1).to(found.dtype)  # [p, K]
            for rows, block in part.pieces(here, names):
                # Products of two outputs' gradients once, a piece of the weights at a time; then all scales at once.
                step = max(1, working_numbers(found) // max(len(block) * len(i), 1))
                for start in range(0, len(values), step):
                    piece = block[..., start : start + step].to(found.dtype)
                    found[rows] += (piece[:, i] * piece[:, j]) @ inverse[start : start + step]
        total = found.new_zeros(len(scales), len(found), d, d)
        total[..., i, j] = found.movedim(2, 0)
        total[..., j, i] = found.movedim(2, 0)
        return total

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """Independent in the coordinates of each part."""
        return torch.cat(
            [_normal((count, len(p)), rng, p) / p.sqrt() for _, _, p in self.precisions()], 1
        )  # in the order of the parts

    def shifts(self, here: Here, deltas: Tensor) -> Tensor:
        """J delta, part by part."""
        d = here.outputs[0].numel() if len(here.outputs) else 0
        total = deltas.new_zeros(len(here.outputs), d, len(deltas))
        before = 0
        for names, part in self.parts.items():
            size = sum(self.places[name].stop - self.places[name].start for name in names)
            own = deltas[:, before : before + size].T
            before += size
            for rows, block in part.pieces(here, names):
                total[rows] += block.to(own.dtype) @ own
        return total.movedim(2, 0)

    def weights(self, deltas: Tensor) -> Tensor:
        """Each part's coordinates back to its weights, in the network's order."""
        found = torch.empty_like(deltas)
        before = 0
        for names, part in self.parts.items():
            sizes = [self.places[name].stop - self.places[name].start for name in names]
            own = part.weights(deltas[:, before : before + sum(sizes)])
            before += sum(sizes)
            for name, piece in zip(names, own.split(sizes, 1), strict=True):
                found[:, self.places[name]] = piece
        return found

    def log_det(self, scale: float = 1.0) -> float:
        """Summed over coordinates."""
        return sum(float(p.double().log().sum()) for _, _, p in self.precisions(scale))

    def variances(self) -> Tensor:
        """Each part's."""
        found = torch.empty_like(self.prior)
        for names, part, precision in self.precisions():
            sizes = [self.places[name].stop - self.places[name].start for name in names]
            for name, piece in zip(names, part.variances(precision).split(sizes), strict=True):
                found[self.places[name]] = piece.to(found)
        return found

    def tensors(self) -> Params:
        """Each part's curvature, and the prior."""
        found = {"prior": self.prior}
        for names, part in self.parts.items():
            found |= {f"{'+'.join(names)}|{key}": value for key, value in part.tensors().items()}
        return found

    def curvature(self) -> "Layered":
        """What the data gave."""
        return Layered({n: p.kronecker() if isinstance(p, Rotated) else p for n, p in self.parts.items()}, self.places)


@dataclass(frozen=True)
class Layered:
    """Curvature without covariance between parts: a parameter's diagonal, or a layer's Kronecker product."""

    parts: dict[tuple[str, ...], Diagonal | Kronecker]
    places: dict[str, slice]

    def gaussian(self, prior: Tensor) -> Layers:
        """Rotate every Kronecker product into its eigenbasis."""
        for names, part in self.parts.items():
            own = torch.cat([prior[self.places[name]] for name in names])
            if isinstance(part, Kronecker) and float(own.max() - own.min()) > 1e-6 * float(own.max()):
                raise ValueError(
                    f"a Kronecker structure needs one prior precision for {' and '.join(names)}, which has several: "
                    "give its layer one, or use structure='diagonal'"
                )
        rotated: dict[tuple[str, ...], Part] = {
            names: part.rotated() if isinstance(part, Kronecker) else part for names, part in self.parts.items()
        }
        return Layers(rotated, self.places, prior)

    def plus(self, other: "Layered") -> "Layered":
        """The curvature of both data sets together."""
        summed: dict[tuple[str, ...], Diagonal | Kronecker] = {}
        for names, part in self.parts.items():
            more = other.parts[names].tensors()
            added = {key: value + more[key] for key, value in part.tensors().items()}
            summed[names] = (
                Diagonal(**added) if isinstance(part, Diagonal) else Kronecker(**added, has_bias=part.has_bias)
            )
        return Layered(summed, self.places)

    def times(self, factor: float) -> "Layered":
        """The curvature times a number."""
        return Layered({names: part.times(factor) for names, part in self.parts.items()}, self.places)

    def path(self, prior: Tensor) -> Layers:
        """The same: a prior's multiples only change what is added."""
        return self.gaussian(prior)

    def tensors(self) -> Params:
        """Every part's sums."""
        return {
            f"{'+'.join(names)}|{key}": value
            for names, part in self.parts.items()
            for key, value in part.tensors().items()
        }


def restored(tensors: Params, places: dict[str, slice]) -> Dense | LowRank | Layers:
    """A Gaussian from what `tensors` stored."""
    prior = tensors["prior"]
    if "rows" in tensors:
        return LowRank(tensors["rows"], tensors["cholesky"], prior)
    if "cholesky" in tensors:
        return Dense(tensors["cholesky"], prior)
    grouped: dict[str, Params] = {}
    for key, value in tensors.items():
        if key != "prior":
            part, field = key.rsplit("|", 1)
            grouped.setdefault(part, {})[field] = value
    parts: dict[tuple[str, ...], Part] = {}
    for key, own in grouped.items():
        names = tuple(key.split("+"))
        parts[names] = Diagonal(own["ggn"]) if "ggn" in own else Rotated(**own, has_bias=len(names) > 1)
    return Layers(parts, places, prior)


def _shifted(j: Tensor, deltas: Tensor) -> Tensor:
    return torch.movedim(j @ deltas.T.to(j.dtype), -1, 0)


def _wide(matrix: Tensor) -> Tensor:
    return matrix.double() if len(matrix) <= DOUBLE_UP_TO else matrix


def _factored(curvature: Tensor, prior: Tensor) -> Tensor:
    """The Cholesky factor of curvature + diag(prior)."""
    precision = _wide(curvature).clone()
    precision.diagonal().add_(prior.to(precision))
    factor, failed = torch.linalg.cholesky_ex(precision)
    if int(failed) or not bool(factor.diagonal().isfinite().all()):
        lowest = float(precision.diagonal().min())
        raise ValueError(
            f"the posterior's precision matrix ({len(precision):,} weights) is not positive definite (its smallest "
            f"diagonal entry is {lowest:.3g}, the prior's precision {float(prior.min()):.3g}): raise the prior's "
            "precision, or compute in float64 or with arithmetic='full'"
        )
    return factor.contiguous()  # as it will be when loaded: a solve's last bits depend on the layout


def _normal(shape: tuple[int, ...], rng: torch.Generator, like: Tensor) -> Tensor:
    """Standard normals, the same on every device up to 16 million of them; more are made where they are needed."""
    if like.device.type == "cpu" or math.prod(shape) <= 2**24:
        return torch.randn(shape, generator=rng, dtype=like.dtype).to(like.device)
    there = torch.Generator(like.device).manual_seed(int(torch.randint(2**62, (), generator=rng)))
    return torch.randn(shape, generator=there, dtype=like.dtype, device=like.device)
