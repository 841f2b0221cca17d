"""Every likelihood, with random outputs and targets of any number of positions, and torch's own densities."""

import torch
from torch import distributions

from caveat.likelihoods import Bernoulli, Categorical, Gaussian, HeteroscedasticGaussian, Poisson

DOUBLE = torch.float64
SEQUENCE = Categorical(class_axis=-1)
GIVEN_NOISE = Gaussian(noise=0.5)


def normal(*shape, seed=0, dtype=DOUBLE):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE).to(dtype)


def labels(classes, *shape, seed=1):
    return torch.randint(classes, shape, generator=torch.Generator().manual_seed(seed))


def case(likelihood, *positions, dtype=DOUBLE):
    """Random outputs and targets of a likelihood, with rows and positions as given, and hyper of other targets."""
    if isinstance(likelihood, Categorical):
        outputs, targets = normal(*positions, 4, dtype=dtype).movedim(-1, likelihood.class_axis), labels(4, *positions)
    elif isinstance(likelihood, Bernoulli):
        outputs, targets = normal(*positions, 3, dtype=dtype), labels(2, *positions, 3).to(dtype)
    elif isinstance(likelihood, Poisson):
        outputs, targets = normal(*positions, 2, dtype=dtype), labels(6, *positions, 2)
    else:
        width = 4 if isinstance(likelihood, HeteroscedasticGaussian) else 2
        outputs, targets = normal(*positions, width, dtype=dtype), 3 * normal(*positions, 2, seed=1, dtype=dtype) + 5
    return outputs, targets, likelihood.initial_hyper(3 * normal(30, 2, seed=2) + 5)


def reference(likelihood, outputs, targets, hyper):
    """Log probability of every target by torch.distributions, the rows' axis first."""
    if isinstance(likelihood, Categorical):
        return distributions.Categorical(logits=outputs.movedim(likelihood.class_axis, -1)).log_prob(targets)
    if isinstance(likelihood, Bernoulli):
        return distributions.Bernoulli(logits=outputs).log_prob(targets.reshape(outputs.shape))
    if isinstance(likelihood, Poisson):
        return distributions.Poisson(outputs.exp()).log_prob(targets.reshape(outputs.shape))
    if isinstance(likelihood, HeteroscedasticGaussian):
        mean, log_variance = outputs.chunk(2, -1)
        return distributions.Normal(mean, (log_variance / 2).exp()).log_prob(targets.reshape(mean.shape))
    noise = likelihood.noise or hyper["log_noise"].exp()
    return distributions.Normal(outputs, noise).log_prob(targets.reshape(outputs.shape))


ALL = [Categorical(), SEQUENCE, Bernoulli(), Gaussian(), GIVEN_NOISE, HeteroscedasticGaussian(), Poisson()]
ALL += [Gaussian(standardise=True), HeteroscedasticGaussian(standardise=True)]
