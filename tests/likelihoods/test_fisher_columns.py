"""The columns of the Fisher factor, one after the other, are those of the whole factor and take no more memory."""

import pytest
import torch

from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from caveat.likelihoods.protocol import fisher_columns, fisher_rank
from tests.likelihoods.likelihood_cases import SEQUENCE, case


class Whole:
    """A likelihood of one's own, which has nothing but its factor."""

    output_axis = 1

    def fisher_factor(self, outputs, targets, hyper):
        return Categorical().fisher_factor(outputs, targets, hyper)


ALL = [
    Categorical(),
    SEQUENCE,
    Categorical(ignore_index=1, class_weights=(1.0, 2.0, 0.5, 3.0)),
    Bernoulli(),
    Gaussian(noise=0.5),
    HeteroscedasticGaussian(),
    Poisson(),
]


@pytest.mark.parametrize("positions", [(5,), (5, 3, 2)], ids=["row", "pixels"])
@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_columns_are_those_of_the_whole_factor(likelihood, positions):
    outputs, targets, hyper = case(likelihood, *positions)
    factor = likelihood.fisher_factor(outputs, targets, hyper).reshape(5, -1, *_last_two(likelihood, outputs))
    columns = list(fisher_columns(likelihood, outputs, targets, hyper))
    assert len(columns) == fisher_rank(likelihood, outputs, targets, hyper) == factor.shape[1] * factor.shape[3]
    for number, column in enumerate(columns):
        position, k = divmod(number, factor.shape[3])
        expected = torch.zeros_like(factor[..., 0])  # [B, positions, C]
        expected[:, position] = factor[:, position, :, k]
        assert column.shape == outputs.shape
        flat = column.movedim(likelihood.output_axis, -1).reshape(expected.shape)
        assert torch.equal(flat, expected)


def _last_two(likelihood, outputs):
    classes = outputs.shape[likelihood.output_axis]
    return classes, classes - isinstance(likelihood, Categorical)


@pytest.mark.parametrize("positions", [(5,), (5, 3, 2)], ids=["row", "pixels"])
def test_a_likelihood_that_has_its_factor_alone_is_enough(positions):
    outputs, targets, hyper = case(Categorical(), *positions)
    own, known = (list(fisher_columns(which, outputs, targets, hyper)) for which in (Whole(), Categorical()))
    assert fisher_rank(Whole(), outputs, targets, hyper) == len(own) == len(known)
    for one, other in zip(own, known, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("likelihood", ALL, ids=repr)
def test_the_diagonal_and_the_sum_over_rows_are_those_of_the_whole_factor(likelihood):
    outputs, targets, hyper = case(likelihood, 5)
    if likelihood == SEQUENCE:
        likelihood = Categorical()
    outputs[0] *= 20  # one class, or rate, far ahead
    factor = likelihood.fisher_factor(outputs, targets, hyper)
    information = factor @ factor.mT  # [B, C, C]
    diagonal = likelihood.fisher_diagonal(outputs, targets, hyper)
    torch.testing.assert_close(diagonal, information.diagonal(dim1=1, dim2=2), rtol=1e-7, atol=1e-12)
    torch.testing.assert_close(
        likelihood.fisher_sum(outputs, targets, hyper), information.sum(0), rtol=1e-9, atol=1e-12
    )
