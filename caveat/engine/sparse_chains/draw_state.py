"""Posteriors of a few draws of networks with few weights or few nodes: what they keep, and their predictions.

Each draw is a posterior of points by itself (`LayerState`); all draws share the places of their weights. On disk, the
tensors of a draw are named "<draw>/<name>" in the groups "active", "rest" and "slices"; `indices` and `counts` of
"active", and "hyper", are common to all draws. What the likelihood learned in a draw is in "rest", under
"<draw>/hyper/<name>".
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from caveat.batches import Inputs, move, slices
from caveat.engine.chains import DrawChecks
from caveat.engine.predictors import PIECE_ROWS, Replicas, WeightDraws, pick
from caveat.engine.run import Run
from caveat.engine.sparse import Substitute
from caveat.engine.state_checks import check_hyper, check_tensor, learned_hyper
from caveat.engine.variational import LayerState
from caveat.likelihoods import Hyper
from caveat.network import Network, Params
from caveat.storage import CorruptFile, State
from caveat.task import Task

__all__ = ["DrawsPredictor", "DrawsState", "check_draws", "deployed_state"]

_LEARNED = "hyper/"  # in a draw's group "rest", before what the likelihood learned with it


@dataclass(frozen=True)
class DrawsState:
    """The state of AEB and MaskedBNN."""

    draws: tuple[LayerState, ...]  # of points, at the same places; the hyper of each has what it learned
    learned: tuple[Hyper, ...]  # by the likelihood in each draw
    hyper: Hyper  # common to all draws

    @classmethod
    def of_chain(cls, drawn: State, indices: Tensor, counts: Tensor, hyper: Hyper) -> "DrawsState":
        """The draws that a chain took, with tensors named "<draw>/<name>", at common places."""
        common = {"indices": indices, "counts": counts}
        return cls.of({**drawn, "active": drawn.get("active", {}) | common, "hyper": hyper})

    def tensors(self) -> State:
        """As a posterior keeps it, by group and name."""
        state: State = {"active": {}, "rest": {}}
        for number, (draw, learned) in enumerate(zip(self.draws, self.learned, strict=True)):
            state["active"][f"{number}/mean"] = draw.mean
            rest = draw.rest | {f"{_LEARNED}{name}": value for name, value in learned.items()}
            state["rest"] |= {f"{number}/{name}": value for name, value in rest.items()}
            if draw.slices:
                stored = {f"{number}/{name}": value for name, value in draw.slices.items()}
                state.setdefault("slices", {}).update(stored)
        state["active"] |= {"indices": self.draws[0].indices, "counts": self.draws[0].counts}
        return state | {"hyper": self.hyper}

    @classmethod
    def of(cls, state: State) -> "DrawsState":
        """The state that `tensors` made groups of."""
        missing = [group for group in ("active", "rest", "hyper") if group not in state]
        active = state.get("active", {})
        missing += [f"active/{name}" for name in ("0/mean", "indices", "counts") if name not in active]
        if missing:
            raise CorruptFile(f"this is not the state of draws of sparse networks: it has no {missing[0]!r}")
        count = sum(name.endswith("/mean") for name in active)
        means, rests, all_slices = (_by_draw(state.get(group, {}), count) for group in ("active", "rest", "slices"))
        draws, learned = [], []
        for number, (mean, rest, stored) in enumerate(zip(means, rests, all_slices, strict=True)):
            if "mean" not in mean:
                raise CorruptFile(f"draw {number} of {count} has no weights: active/{number}/mean is missing")
            learned.append({n.removeprefix(_LEARNED): t for n, t in rest.items() if n.startswith(_LEARNED)})
            others = {name: t for name, t in rest.items() if not name.startswith(_LEARNED)}
            hyper = state["hyper"] | learned[-1]
            draws.append(LayerState(mean["mean"], active["indices"], active["counts"], others, hyper, slices=stored))
        return cls(tuple(draws), tuple(learned), state["hyper"])

    def check(self, network: Network, count: int) -> None:
        """Refuse what are not so many draws of a network with few weights."""
        if len(self.draws) != count:
            raise CorruptFile(f"there are {len(self.draws)} draws, and the method has {count}")
        check_hyper(self.hyper, network)
        for number, (draw, learned) in enumerate(zip(self.draws, self.learned, strict=True)):
            if learned.keys() != learned_hyper(network, self.hyper).keys():
                raise CorruptFile(f"draw {number} has learned {sorted(learned)}, which is not what it learns")
            for name, value in learned.items():
                like = self.hyper[name]
                check_tensor(f"rest/{number}/{_LEARNED}{name}", value, like.shape, (torch.float32, torch.float64))
            try:
                draw.check(network, learned)
            except CorruptFile as error:
                raise CorruptFile(f"draw {number}: {error}") from error


def _by_draw(group: Params, count: int) -> list[Params]:
    """The tensors of each draw, by their names in it; those that are common to all draws are left out."""
    draws: list[Params] = [{} for _ in range(count)]
    for key, tensor in group.items():
        number, slash, name = key.partition("/")
        if slash and number.isdigit() and int(number) < count:
            draws[int(number)][name] = tensor
    return draws


def deployed_state(state: State, rng: torch.Generator | None) -> LayerState:
    """The state to deploy: of a posterior of draws one of them, the last without a generator; of any other, itself."""
    if "0/mean" not in state["active"]:
        return LayerState.of(state)
    draws = DrawsState.of(state).draws
    return draws[-1] if rng is None else draws[pick(len(draws), 1, rng)[0]]


def check_draws(state: DrawsState, task: Task, run: Run) -> dict[str, Any]:
    """Whether the draws of a chain have mixed and explain the rows, as json; adds warnings to the run."""
    checks, count = DrawChecks(task, run), len(state.draws)
    predictor = DrawsPredictor(state, task.network.to(run.device))
    outputs, _ = predictor.outputs(checks.x, count, torch.Generator().manual_seed(0))  # each draw once, in order
    for outputs_of_draw, learned in zip(outputs, state.learned, strict=True):
        checks.add(outputs_of_draw, learned)
    return checks.findings(1, {})


class DrawsPredictor:
    """Predicts from a few draws, each through its own sparse or narrow network."""

    def __init__(self, state: DrawsState, network: Network) -> None:
        self._state, self._network = state, network
        self._networks = Replicas(lambda: _DrawNetworks(state, network))

    def draws(self, n: int, rng: torch.Generator) -> Iterator[Params]:
        """Whole weights of n draws, zero where there are none, with what the likelihood learned riding along."""
        for number in pick(len(self._state.draws), n, rng):
            draw = self._state.draws[number]
            layout = draw.layout(draw.network(self._network))
            learned = {f"{_LEARNED}{name}": value for name, value in self._state.learned[number].items()}
            yield draw.whole_params(self._network, layout, rng) | learned

    def outputs(self, x: Inputs, n: int, rng: torch.Generator) -> tuple[Tensor, Hyper]:
        """Outputs of n passes, each through a draw's own network, [S, B, ...], and the hyper of each."""
        outputs: list[Tensor] = []
        learned: dict[str, list[Tensor]] = {}
        with torch.no_grad(), self._networks.lent() as networks:
            for number in pick(len(self._state.draws), n, rng):
                network = networks.of(number)
                pieces = (move(piece, network.device) for piece in slices(x, PIECE_ROWS))
                outputs.append(torch.cat([network.evaluation_pass(piece) for piece in pieces]))
                for name, value in self._state.learned[number].items():
                    learned.setdefault(name, []).append(value)
        return torch.stack(outputs), self._state.hyper | {name: torch.stack(values) for name, values in learned.items()}

    def fixed_form(self, n: int | None, rng: torch.Generator, example: Inputs) -> WeightDraws:
        """The draws that `outputs` takes, each of its own narrow network where it has one."""
        assert n is not None  # there is no closed form
        members = []
        for number in pick(len(self._state.draws), n, rng):
            draw = self._state.draws[number]
            network = draw.network(self._network)
            layout = draw.layout(network)
            learned = {f"{_LEARNED}{name}": value for name, value in self._state.learned[number].items()}
            members.append((network, draw.rest | layout.whole(draw.values(layout, rng)) | learned))
        return WeightDraws(members, self._state.hyper)

    def moments(self, x: Inputs, joint: bool = False) -> None:
        """None: there is no closed form."""
        return None


class _DrawNetworks:
    """The networks of draws: narrow ones are made once each, draws with the same places of weights share one."""

    def __init__(self, state: DrawsState, network: Network) -> None:
        self._state, self._network = state, network
        self._narrow: dict[int, Network] = {}
        self._shared: Substitute | None = None

    def of(self, number: int) -> Network:
        """The network of a draw, ready for a pass."""
        draw = self._state.draws[number]
        if draw.slices:
            if number not in self._narrow:
                self._narrow[number] = draw.network(self._network).with_fixed(draw.rest)
            return self._narrow[number]
        if self._shared is None:
            self._shared = Substitute(self._network, draw.layout(self._network), draw.rest)
        module = self._shared.network.module
        targets = dict(module.named_parameters()) | dict(module.named_buffers())
        for name, value in draw.rest.items():
            targets[name].copy_(value)
        self._shared.use(draw.mean)
        return self._shared.network
