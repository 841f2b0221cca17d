"""Gaussians over weights without covariance between layers: diagonal, or a Kronecker product for each layer.

Within a part the precision is diagonal: for a parameter's diagonal as it is, for a Kronecker product G (x) A in its
eigenbasis, into which gradients are rotated factor by factor. All weights can be afforded, one part after the other.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from caveat.engine.cost import working_numbers
from caveat.engine.laplace.factor_sides import Side, Sketch
from caveat.engine.laplace.gaussians import DenseGaussian, LowRankGaussian
from caveat.engine.row_gradients import Jacobian, ProductUse, RowPass
from caveat.engine.state_checks import check_names, check_tensor
from caveat.network import Params
from caveat.randomness import normals
from caveat.storage import CorruptFile

__all__ = [
    "DiagonalPart",
    "KroneckerPart",
    "LayerCurvature",
    "LayerGaussian",
    "RotatedPart",
    "check_gaussian",
    "factors",
    "restored",
]


@dataclass(frozen=True)
class DiagonalPart:
    """The GGN's diagonal for one parameter, [p]."""

    ggn: Tensor

    def spectrum(self) -> Tensor:
        """The curvature of each coordinate, [p]."""
        return self.ggn

    def pieces(self, row_pass: RowPass, names: Sequence[str]) -> Iterator[tuple[slice, Tensor]]:
        """Pieces of J of this parameter, [b, D, p], each with its rows."""
        yield from row_pass.jacobian_blocks(names)

    def coordinates(self, weights: Tensor) -> Tensor:
        """The weights themselves."""
        return weights

    def weights(self, deltas: Tensor) -> Tensor:
        """The draws themselves: the coordinates are weights."""
        return deltas

    def shares(self) -> Tensor:
        """Each coordinate is a dimension of its own."""
        return torch.ones_like(self.ggn)

    def variances(self, precision: Tensor) -> Tensor:
        """One over the precision of each coordinate, [p]."""
        return 1 / precision

    def plus(self, other: "DiagonalPart") -> "DiagonalPart":
        """The diagonal of both sums together."""
        return DiagonalPart(self.ggn + other.ggn)

    def times(self, factor: float) -> "DiagonalPart":
        """The curvature times a number."""
        return DiagonalPart(self.ggn * factor)

    def tensors(self) -> Params:
        """The diagonal, [p]."""
        return {"ggn": self.ggn}


@dataclass(frozen=True)
class KroneckerPart:
    """G (x) A / count over a layer's weight [O, I] and, as a last input that is always 1, its bias.

    A = sum a a^T over inputs (patches), G = sum g g^T over gradients at the outputs, count = positions summed over.
    """

    inputs: Tensor | Sketch  # A, [I, I]
    outputs: Tensor | Sketch  # G, [O, O]
    count: Tensor
    has_bias: bool

    def rotated(self) -> "RotatedPart":
        """The same product in its eigenbasis, where it is diagonal."""
        return RotatedPart(Side.of(self.inputs, self.count), Side.of(self.outputs), self.count, self.has_bias)

    def plus(self, other: "KroneckerPart") -> "KroneckerPart":
        """The product of both sums together."""
        sums = (_sum(self.inputs, other.inputs), _sum(self.outputs, other.outputs))
        return KroneckerPart(*sums, self.count + other.count, self.has_bias)

    def times(self, factor: float) -> "KroneckerPart":
        """The curvature times a number."""
        outputs = self.outputs.times(factor) if isinstance(self.outputs, Sketch) else self.outputs * factor
        return KroneckerPart(self.inputs, outputs, self.count, self.has_bias)

    def tensors(self) -> Params:
        """The sums A [I, I] and G [O, O], or what is known of them, and the count of positions."""
        sums: Params = {"count": self.count}
        for name, factor in (("inputs", self.inputs), ("outputs", self.outputs)):
            if isinstance(factor, Sketch):
                sums |= {f"{name}_products": factor.products, f"{name}_trace": factor.trace}
            else:
                sums[name] = factor
        return sums


def _sum(one: Tensor | Sketch, other: Tensor | Sketch) -> Tensor | Sketch:
    if isinstance(one, Sketch) and isinstance(other, Sketch):
        return one.plus(other)
    assert isinstance(one, Tensor)
    assert isinstance(other, Tensor)
    return one + other


@dataclass(frozen=True)
class RotatedPart:
    """A Kronecker factorisation in its eigenbasis: coordinate (o, i) has curvature outputs[o] inputs[i]."""

    inputs: Side
    outputs: Side
    count: Tensor
    has_bias: bool

    def kronecker(self) -> KroneckerPart:
        """The sums A and G that it was rotated from."""
        return KroneckerPart(self.inputs.factor(self.count), self.outputs.factor(), self.count, self.has_bias)

    def spectrum(self) -> Tensor:
        """The curvature of each coordinate, flat, [O I]."""
        return torch.outer(self.outputs.spectrum(), self.inputs.spectrum()).flatten()

    def shares(self) -> Tensor:
        """Which share of a dimension each coordinate is, flat, [O I]."""
        return torch.outer(self.outputs.shares(), self.inputs.shares()).flatten()

    def pieces(self, row_pass: RowPass, names: Sequence[str]) -> Iterator[tuple[slice, Tensor]]:
        """J in the eigenbasis: (Q_G^T g) (Q_A^T a)^T, so that inputs are rotated once and not for every output."""
        if row_pass.has_copies(names[0]):
            yield slice(0, len(row_pass.outputs)), self._of_copies(row_pass, names)
            return
        places = row_pass.factored(names[0])
        gradients = row_pass.output_gradients()
        size = self.inputs.coordinates * self.outputs.coordinates * max(len(gradients), 1)
        step = max(1, working_numbers(row_pass.outputs) // size)
        for start in range(0, len(row_pass.outputs) if places else 0, step):
            rows = slice(start, min(start + step, len(row_pass.outputs)))
            by_use: list[Tensor] = []
            for use, point in places:
                a, _ = factors(use, gradients[0][point], rows, self.has_bias)  # [n, I, T]
                a = self.inputs.rotated(a)
                per_output = []
                for g in gradients:
                    _, o = factors(use, g[point], rows, self.has_bias, inputs=False)
                    block = self.outputs.rotated(o) @ a.mT  # [n, O, I]
                    m = len(block) // (rows.stop - rows.start)
                    per_output.append(block.unflatten(0, (-1, m)).sum(1).flatten(1))
                by_use.append(torch.stack(per_output, 1))
            yield rows, torch.stack(by_use).sum(0)

    def _of_copies(self, row_pass: RowPass, names: Sequence[str]) -> Tensor:
        """J in the eigenbasis, [B, D, O I], where rows reach a layer otherwise than those of the curvature."""
        b, d = len(row_pass.outputs), row_pass.outputs.shape[1:].numel()
        whole = []
        for name in names:  # the weight [O, I], and the bias [O] as a last input
            shape = row_pass.jacobian.params[name].shape
            rows = row_pass.outputs.new_zeros(b, d, shape.numel())
            for place, block in row_pass.jacobian_blocks([name]):
                rows[place] = block
            whole.append(rows.reshape(b * d, shape[0], -1))
        return self.coordinates(torch.cat(whole, 2).flatten(1)).unflatten(0, (b, d))

    def coordinates(self, weights: Tensor) -> Tensor:
        """Weights [count, O I], the bias as a last input, in the eigenbasis: Q_G^T W Q_A."""
        blocks = weights.unflatten(1, (len(self.outputs.vectors), len(self.inputs.vectors)))
        return self.inputs.rotated(self.outputs.rotated(blocks).mT).mT.flatten(1)

    def weights(self, deltas: Tensor) -> Tensor:
        """Coordinates [count, O I] back to the weight, then the bias."""
        blocks = deltas.unflatten(1, (self.outputs.coordinates, self.inputs.coordinates))
        whole = self.inputs.restored(self.outputs.restored(blocks).mT).mT
        return _split_bias(whole, self.has_bias)

    def variances(self, precision: Tensor) -> Tensor:
        """Squares of the rotation times one over the precision."""
        inverse = (1 / precision).reshape(self.outputs.coordinates, self.inputs.coordinates)
        whole = self.inputs.squares(self.outputs.squares(inverse).T).T
        return _split_bias(whole.unsqueeze(0), self.has_bias)[0]

    def tensors(self) -> Params:
        """The eigenvalues, the bases and the count."""
        return self.inputs.tensors("in") | self.outputs.tensors("out") | {"count": self.count}

    @classmethod
    def of(cls, tensors: Params, has_bias: bool) -> "RotatedPart":
        """What `tensors` gave."""
        inputs, outputs = Side.from_tensors(tensors, "in"), Side.from_tensors(tensors, "out")
        return cls(inputs, outputs, tensors["count"], has_bias)


def factors(use: ProductUse, g: Tensor, rows: slice, has_bias: bool, inputs: bool = True) -> tuple[Tensor, Tensor]:
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


Part = DiagonalPart | RotatedPart


@dataclass(frozen=True)
class LayerGaussian:
    """Independent parts, each diagonal in its own coordinates; weights in the network's order."""

    parts: dict[tuple[str, ...], Part]
    places: dict[str, slice]  # of each parameter among the weights
    prior: Tensor  # [n]
    lowest: ClassVar[float] = 0.0

    def rows_at_once(self, jacobian: Jacobian) -> int:
        """How many rows a pass should take, as the gradients of all outputs at all layers fit."""
        return jacobian.rows_at_once(layers=jacobian.plan.outputs)

    def precisions(self, scale: float = 1.0) -> Iterator[tuple[tuple[str, ...], Part, Tensor]]:
        """Every part with the names of its parameters and the precision of its coordinates, [p]."""
        for names, part in self.parts.items():
            values = part.spectrum()
            prior = torch.cat([self.prior[self.places[name]] for name in names]).to(values)
            if isinstance(part, RotatedPart):
                prior = prior[:1]  # one for all: a rotation mixes its weights
            yield names, part, values + scale * prior

    def covariance(self, row_pass: RowPass, joint: bool = False) -> Tensor:
        """J P^-1 J^T summed over the parts, [B, D, D], or joint [B D, B D]."""
        if not joint:
            d = row_pass.outputs[0].numel() if len(row_pass.outputs) else 0
            by_row = row_pass.outputs.new_zeros(len(row_pass.outputs), d, d)
            for names, part, precision in self.precisions():
                root = precision.rsqrt().to(by_row.dtype)
                for rows, block in part.pieces(row_pass, names):
                    half = block.to(by_row.dtype) * root
                    by_row[rows] += half @ half.mT
            return by_row
        total = row_pass.outputs.new_zeros(row_pass.outputs.numel(), row_pass.outputs.numel())
        for names, part, precision in self.precisions():
            blocks = [block for _, block in part.pieces(row_pass, names)]
            if blocks:  # none where a weight does not act
                whole = torch.cat(blocks).flatten(0, 1).to(total.dtype)
                total += (whole / precision) @ whole.T
        return total

    def covariances(self, row_pass: RowPass, scales: Sequence[float]) -> Tensor:
        """J P^-1 J^T for several multiples of the prior from one pass, [K, B, D, D]."""
        d = row_pass.outputs[0].numel() if len(row_pass.outputs) else 0
        i, j = torch.triu_indices(d, d, device=row_pass.outputs.device)
        pairs = row_pass.outputs.new_zeros(len(row_pass.outputs), len(i), len(scales))
        for names, part, _ in self.precisions():
            values = part.spectrum()
            prior = torch.cat([self.prior[self.places[name]] for name in names]).to(values)
            prior = prior[:1] if isinstance(part, RotatedPart) else prior
            inverse = torch.stack([1 / (values + scale * prior) for scale in scales], 1).to(pairs.dtype)  # [p, K]
            for rows, block in part.pieces(row_pass, names):
                # Products of two outputs' gradients once, a piece of the weights at a time; then all scales at once.
                step = max(1, working_numbers(pairs) // max(len(block) * len(i), 1))
                for start in range(0, len(values), step):
                    piece = block[..., start : start + step].to(pairs.dtype)
                    pairs[rows] += (piece[:, i] * piece[:, j]) @ inverse[start : start + step]
        total = pairs.new_zeros(len(scales), len(pairs), d, d)
        total[..., i, j] = pairs.movedim(2, 0)
        total[..., j, i] = pairs.movedim(2, 0)
        return total

    def deltas(self, count: int, rng: torch.Generator) -> Tensor:
        """Draws [count, n], independent in the coordinates of each part, in the order of the parts.

        They are P^-1/2 z with the symmetric root, Q diag(p^-1/2) Q^T, of z that are standard normal over the weights:
        which of the eigenvectors' signs, or of the bases of equal eigenvalues, rounding has chosen does not matter.
        """
        return torch.cat(
            [
                part.coordinates(normals((count, self._size(names)), rng, p)) / p.sqrt()
                for names, part, p in self.precisions()
            ],
            1,
        )

    def _size(self, names: Sequence[str]) -> int:
        """How many weights the parameters of a part have."""
        return sum(self.places[name].stop - self.places[name].start for name in names)

    def shifts(self, row_pass: RowPass, deltas: Tensor) -> Tensor:
        """J delta for each draw, summed over the parts, [count, B, D]."""
        d = row_pass.outputs[0].numel() if len(row_pass.outputs) else 0
        total = deltas.new_zeros(len(row_pass.outputs), d, len(deltas))
        before = 0
        for names, part in self.parts.items():
            size = len(part.spectrum())
            part_deltas = deltas[:, before : before + size].T
            before += size
            for rows, block in part.pieces(row_pass, names):
                total[rows] += block.to(part_deltas.dtype) @ part_deltas
        return total.movedim(2, 0)

    def weights(self, deltas: Tensor) -> Tensor:
        """Each part's coordinates back to its weights, in the network's order."""
        weights = deltas.new_empty(len(deltas), len(self.prior))
        before = 0
        for names, part in self.parts.items():
            sizes = [self.places[name].stop - self.places[name].start for name in names]
            coordinates = len(part.spectrum())
            part_weights = part.weights(deltas[:, before : before + coordinates])
            before += coordinates
            for name, piece in zip(names, part_weights.split(sizes, 1), strict=True):
                weights[:, self.places[name]] = piece
        return weights

    def covariance_root(self) -> Tensor:
        """The symmetric root P^-1/2 of each part, as `deltas` has it, [n, n]."""
        one, before, parts = torch.eye(len(self.prior)).to(self.prior), 0, []
        for names, part, precision in self.precisions():
            size = self._size(names)
            parts.append(part.coordinates(one[:, before : before + size]) / precision.sqrt())
            before += size
        return self.weights(torch.cat(parts, 1))

    def log_det(self, scale: float = 1.0) -> float:
        """The log determinant of the precision, summed over all coordinates."""
        return sum(float((p.double().log() * part.shares()).sum()) for _, part, p in self.precisions(scale))

    def variances(self) -> Tensor:
        """The marginal variance of every weight, [n], part by part."""
        variances = torch.empty_like(self.prior)
        for names, part, precision in self.precisions():
            sizes = [self.places[name].stop - self.places[name].start for name in names]
            for name, piece in zip(names, part.variances(precision).split(sizes), strict=True):
                variances[self.places[name]] = piece.to(variances)
        return variances

    def tensors(self) -> Params:
        """The curvature of each part, and the prior precisions [n]."""
        tensors = {"prior": self.prior}
        for names, part in self.parts.items():
            tensors |= {f"{'+'.join(names)}|{key}": value for key, value in part.tensors().items()}
        return tensors

    def curvature(self) -> "LayerCurvature":
        """The data's part of the precision."""
        return LayerCurvature(
            {n: p.kronecker() if isinstance(p, RotatedPart) else p for n, p in self.parts.items()}, self.places
        )


@dataclass(frozen=True)
class LayerCurvature:
    """Curvature without covariance between parts: a parameter's diagonal, or a layer's Kronecker product."""

    form: ClassVar[str] = "layered"
    parts: dict[tuple[str, ...], DiagonalPart | KroneckerPart]
    places: dict[str, slice]

    def gaussian(self, prior: Tensor) -> LayerGaussian:
        """Rotate every Kronecker product into its eigenbasis."""
        for names, part in self.parts.items():
            precisions = torch.cat([prior[self.places[name]] for name in names])
            uneven = float(precisions.max() - precisions.min()) > 1e-6 * float(precisions.max())
            if isinstance(part, KroneckerPart) and uneven:
                raise ValueError(
                    f"a Kronecker structure needs one prior precision for {' and '.join(names)}, which has several: "
                    "give its layer one, or use structure='diagonal'"
                )
        rotated: dict[tuple[str, ...], Part] = {
            names: part.rotated() if isinstance(part, KroneckerPart) else part for names, part in self.parts.items()
        }
        return LayerGaussian(rotated, self.places, prior)

    def plus(self, other: "LayerCurvature") -> "LayerCurvature":
        """The curvature of both data sets together."""
        return LayerCurvature(
            {names: _together(part, other.parts[names]) for names, part in self.parts.items()}, self.places
        )

    def times(self, factor: float) -> "LayerCurvature":
        """The curvature times a number."""
        return LayerCurvature({names: part.times(factor) for names, part in self.parts.items()}, self.places)

    def path(self, prior: Tensor) -> LayerGaussian:
        """The Gaussian itself: multiples of the prior only change what is added to each coordinate."""
        return self.gaussian(prior)

    def tensors(self) -> Params:
        """The sums of every part, each under the names of its parameters."""
        return {
            f"{'+'.join(names)}|{key}": value
            for names, part in self.parts.items()
            for key, value in part.tensors().items()
        }


def _together(part: DiagonalPart | KroneckerPart, more: DiagonalPart | KroneckerPart) -> DiagonalPart | KroneckerPart:
    if isinstance(part, DiagonalPart):
        assert isinstance(more, DiagonalPart)
        return part.plus(more)
    assert isinstance(more, KroneckerPart)
    return part.plus(more)


def restored(tensors: Params, places: dict[str, slice]) -> DenseGaussian | LowRankGaussian | LayerGaussian:
    """A Gaussian from what `tensors` stored."""
    prior = tensors["prior"]
    if "rows" in tensors:
        return LowRankGaussian(tensors["rows"], tensors["cholesky"], prior)
    if "cholesky" in tensors:
        return DenseGaussian(tensors["cholesky"], prior)
    grouped: dict[str, Params] = {}
    for key, value in tensors.items():
        if key != "prior":
            part, field = key.rsplit("|", 1)
            grouped.setdefault(part, {})[field] = value
    parts: dict[tuple[str, ...], Part] = {}
    for key, fields_of_part in grouped.items():
        names = tuple(key.split("+"))
        is_diagonal = "ggn" in fields_of_part
        parts[names] = (
            DiagonalPart(**fields_of_part) if is_diagonal else RotatedPart.of(fields_of_part, has_bias=len(names) > 1)
        )
    return LayerGaussian(parts, places, prior)


def check_gaussian(tensors: Params, shapes: dict[str, torch.Size], size: int, dtype: torch.dtype) -> None:
    """Refuse what `restored` cannot make a Gaussian of: one over `size` weights, of parameters of these shapes."""
    where, types = "gaussian", (dtype, torch.float32, torch.float64)
    check_tensor(f"{where}/prior", tensors["prior"], (size,), types)
    if not bool((tensors["prior"] > 0).all()):
        raise CorruptFile(f"{where}/prior holds precisions that are not positive")
    expected: dict[str, tuple[int, ...]] = {}
    if "rows" in tensors or "cholesky" in tensors:
        check_names(where, tensors, ["prior", "cholesky"], ["rows"])
        count = len(tensors["rows"]) if "rows" in tensors and tensors["rows"].ndim else size
        expected["cholesky"] = (count, count)
        if "rows" in tensors:
            expected["rows"] = (count, size)
    else:
        parts = dict.fromkeys(key.rpartition("|")[0] for key in tensors if key != "prior")
        named = [name for part in parts for name in part.split("+")]
        if sorted(named) != sorted(shapes):
            raise CorruptFile(f"{where} is about {', '.join(named) or 'nothing'}, not about {', '.join(shapes)}")
        for part in parts:
            weight, *bias = part.split("+")
            shape = shapes[weight]
            if f"{part}|ggn" in tensors:
                expected[f"{part}|ggn"] = (sum(shapes[name].numel() for name in part.split("+")),)
                continue
            outputs = int(shape[0]) if len(shape) else 1
            inputs = shape.numel() // max(outputs, 1) + len(bias)
            expected |= _expected_side(tensors, f"{part}|in", inputs) | _expected_side(tensors, f"{part}|out", outputs)
            expected[f"{part}|count"] = ()
        check_names(where, tensors, ["prior", *expected])
    for name, shape_of_it in expected.items():
        in_double = "rows" in tensors and name == "cholesky"  # the inner matrix of the dual form is factored so
        kinds = (tensors["prior"].dtype, *([torch.float64] if in_double else []))
        check_tensor(f"{where}/{name}", tensors[name], shape_of_it, kinds)


def _expected_side(tensors: Params, name: str, size: int) -> dict[str, tuple[int, ...]]:
    """The shapes of a factor's tensors: whole, or as many directions as it has and the mean of the rest."""
    values = tensors.get(f"{name}_values")
    kept = size if f"{name}_rest" not in tensors or values is None else min(values.numel(), size)
    rest: dict[str, tuple[int, ...]] = {f"{name}_rest": ()} if f"{name}_rest" in tensors else {}
    return {f"{name}_values": (kept,), f"{name}_vectors": (size, kept)} | rest
