"""Likelihoods: what a network's outputs say about its targets. One protocol, shared by every method.

`hyper` holds what a likelihood learns beside the weights (log noise, the units of the targets) and what is tuned after
training (a temperature). Each entry has the shape given here; in `predictive` it may have one more leading axis, when
each posterior draw has its own. The Fisher information F of the outputs is handed out as a factor R with R R^T = F,
because F is positive semi-definite for every likelihood here while the Hessian is not (heteroscedastic regression).
"""

from caveat.likelihoods.answer_tokens import answer_logits
from caveat.likelihoods.classification import Bernoulli, Categorical
from caveat.likelihoods.protocol import Hyper, Likelihood, learned_noise
from caveat.likelihoods.regression import Gaussian, HeteroscedasticGaussian, Poisson

__all__ = ["Bernoulli", "Categorical", "Gaussian", "HeteroscedasticGaussian", "Hyper", "Likelihood", "Poisson",
           "answer_logits", "learned_noise"]  # fmt: skip
