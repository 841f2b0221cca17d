"""Members: several posteriors of one network, each from weights of its own, as one mixture of them.

    p(theta | D) ~ 1/M sum_m q_m(theta)

    points      points that are trained from fresh weights, side by side on a GPU, or taken from networks as they are
    mixture     the members' states as one state, and predictions that go to every member for its share of the draws

Called by Ensemble and DeepEnsemble.
"""

from caveat.engine.members.mixture import MixturePredictor, as_one_state, state_of_member
from caveat.engine.members.points import check_points, draws_of_points, fresh_points, points_of_modules, start_of

__all__ = [
    "MixturePredictor",
    "as_one_state",
    "check_points",
    "draws_of_points",
    "fresh_points",
    "points_of_modules",
    "start_of",
    "state_of_member",
]
