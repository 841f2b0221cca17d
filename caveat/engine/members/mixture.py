"""A mixture of posteriors of one network: their states side by side, and predictions from all of them.

mean = 1/M sum_m mean_m,   covariance = 1/M sum_m [ covariance_m + (mean_m - mean)(mean_m - mean)^T ]
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.predictors import FixedForm, Fixing, LinearDraws, LinearMixture, Predictor, WeightDraws, pick
from caveat.likelihoods import Hyper
from caveat.network import Params
from caveat.storage import CorruptFile, State

__all__ = ["MixturePredictor", "as_one_state", "state_of_member"]


def as_one_state(states: Sequence[State]) -> State:
    """The states of all members as one: member 1 has the groups "member-1.params" and so on."""
    return {f"{_prefix(m)}{group}": tensors for m, state in enumerate(states) for group, tensors in state.items()}


def state_of_member(state: State, m: int) -> State:
    """The state of a member, from what `as_one_state` made."""
    groups = {g.removeprefix(_prefix(m)): tensors for g, tensors in state.items() if g.startswith(_prefix(m))}
    if not groups:
        raise CorruptFile(f"there is no member {m + 1}: the state has {', '.join(state) or 'nothing'}")
    return groups


def _prefix(m: int) -> str:
    return f"member-{m + 1}."


class MixturePredictor:
    """Predicts with the predictors of all members; of n draws each member makes its share."""

    def __init__(self, members: Sequence[Predictor]) -> None:
        self._members = members

    def _shares(self, n: int, rng: torch.Generator) -> list[tuple[Predictor, int]]:
        """The members that make some of n draws, and how many; who makes one more is drawn."""
        chosen = pick(len(self._members), n, rng)
        return [(member, chosen.count(m)) for m, member in enumerate(self._members) if m in chosen]

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Weight samples, n of them, one member after the other."""
        for member, share in self._shares(n, rng):
            yield from member.draws(share, rng)

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n draws, [S, B, ...], and the hyper: one for all, or stacked where members differ."""
        parts = [(*member.outputs(x, share, rng), share) for member, share in self._shares(n, rng)]
        outputs = torch.cat([part[0] for part in parts])
        return outputs, _common_hyper([(hyper, share) for _, hyper, share in parts])

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> FixedForm:
        """The draws that `outputs` makes; raises a TypeError where a member has none that are fixed."""
        assert n is not None  # predictions of a mixture are made with draws
        shares = self._shares(n, rng)
        forms = [_form(member, share, rng, example) for member, share in shares]
        hyper = _common_hyper([(form.hyper, share) for form, (_, share) in zip(forms, shares, strict=True)])
        if linear := [form for form in forms if isinstance(form, LinearDraws)]:
            return LinearMixture(linear, hyper)  # members are of one method, so that all are
        each = {name: hyper.pop(name) for name, value in list(hyper.items()) if value.ndim > _axes(name)}
        draws = [draw for form in forms if isinstance(form, WeightDraws) for draw in form.members]
        own = [{f"hyper/{name}": stack[number] for name, stack in each.items()} for number in range(len(draws))]
        return WeightDraws([(network, own[m] | params) for m, (network, params) in enumerate(draws)], hyper)

    def moments(self, x: Inputs, joint: bool = False) -> tuple[Tensor, Tensor] | None:
        """Mean [B, ...] and covariance of the outputs, [B, D, D] or joint; None where a member has none."""
        moments = [member.moments(x, joint) for member in self._members]
        closed = [pair for pair in moments if pair is not None]
        if len(closed) < len(moments):
            return None
        means, covariances = (torch.stack(parts) for parts in zip(*closed, strict=True))  # [M, B, ...]
        mean = means.mean(0)
        flat = (means - mean).flatten(1) if joint else (means - mean).reshape(*means.shape[:2], -1)
        between = torch.einsum("m...i,m...j->...ij", flat, flat) / len(means)
        return mean, covariances.mean(0) + between


def _form(member: Predictor, share: int, rng: torch.Generator, example: Inputs) -> WeightDraws | LinearDraws:
    form = member.fixed_form(share, rng, example) if isinstance(member, Fixing) else None
    if not isinstance(form, WeightDraws | LinearDraws):
        raise TypeError(
            "the members of this ensemble predict in a way of their own that has no module: serve it with predict"
        )
    return form


def _axes(name: str) -> int:
    """How many axes an entry of the hyper has for one draw."""
    return 0 if name == "temperature" else 1


def _common_hyper(parts: Sequence[tuple[Hyper, int]]) -> Hyper:
    """The hyper of all draws: an entry as it is where all members have the same, else one for each draw."""
    names = dict.fromkeys(name for hyper, _ in parts for name in hyper)
    common: Hyper = {}
    for name in names:
        base = _axes(name)
        values = [hyper[name] if name in hyper else torch.ones(()) for hyper, _ in parts]  # no temperature is 1
        if all(value.ndim == base and torch.equal(value, values[0]) for value in values):
            common[name] = values[0]
            continue
        place = next(value.device for (hyper, _), value in zip(parts, values, strict=True) if name in hyper)
        each = [
            (value if value.ndim > base else value.expand(share, *value.shape)).to(place)
            for (_, share), value in zip(parts, values, strict=True)
        ]
        common[name] = torch.cat(each)
    return common
