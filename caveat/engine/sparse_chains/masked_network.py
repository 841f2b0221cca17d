"""A network whose nodes come and go while its weights are drawn.

    f(x; theta, m): node i of a space of channels passes on m_i times its activity, m_i = 0 or 1

A mask is the same as zeros in place of all weights that read the node, so that the masked network is computed as a
narrower one, without the nodes that are off. Their weights go on moving under the prior alone; when a node is born, it
comes with the weights that it has by then.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from caveat.batches import Inputs
from caveat.engine.chains import LangevinChain, LearnedNoise
from caveat.engine.channels import (
    Channels,
    Index,
    KeptChannels,
    find_channels,
    gather,
    is_restorable,
    kept_entries,
    narrow_network,
    scatter,
    stored_slices,
)
from caveat.engine.run import Run
from caveat.engine.sparse import Account, Cost, Scheme, network_account, plain_layers
from caveat.engine.sparse_chains.masks import MaskMove, penalty
from caveat.engine.training import BatchPart
from caveat.network import Network, Params
from caveat.randomness import seeded
from caveat.storage import State
from caveat.task import Task

__all__ = ["MaskedNetwork", "Masking", "mean_account"]

_SCHEME = Scheme(gaussian=False, optimizer="sgd")


class Masking(Protocol):
    """The knobs of masks, which a method has as its fields."""

    @property
    def sparsity(self) -> float:
        """Lambda: how much the prior is against many nodes."""

    @property
    def most(self) -> int:
        """Nodes that one move changes."""

    @property
    def interval(self) -> int:
        """Steps from one move to the next."""


class MaskedNetwork:
    """Weights of the whole network, which nodes are on, and the narrow network of those."""

    def __init__(self, task: Task, start: State, run: Run, masking: Masking) -> None:
        network = task.network.to(run.device)
        self.task, self.network, self.run = task, network.with_fixed(start["params"]), run
        self.example = task.example(run.device)
        self.channels = self._find_channels()
        self.spaces = [] if self.channels is None else _maskable(self.channels, network)
        widths = () if self.channels is None else tuple(self.channels.widths[s] for s in self.spaces)
        self.moves, self.interval = MaskMove(widths, penalty(masking.sparsity, task.n), masking.most), masking.interval
        self.mask = torch.ones(sum(widths), dtype=torch.bool)
        self.noise = LearnedNoise(network, task.hyper, start["hyper"])
        weights = {name: start["params"][name].detach().clone().requires_grad_() for name in network.names}
        self.moved = weights | self.noise.moved
        self.buffers = self.network.buffers()
        self.tried = self.accepted = 0
        self.arranged: tuple[Network, dict[str, Index]] | None = None  # the narrow network of the present mask
        self.whole = network_account(self.network, self.example, _SCHEME)
        self._arrange()
        self._check()

    def _find_channels(self) -> Channels | None:
        if len(plain_layers(self.network)) < 2:
            raise ValueError(
                "MaskedBNN masks nodes between linear and convolutional layers, and this network has fewer than two of "
                "them: use SGMCMC"
            )
        try:
            return find_channels(self.network.module, self.example)
        except ValueError as error:
            reason = str(error).partition(": use structure")[0]
            self.run.warnings.append(f"no node is masked, so that all are in every draw: {reason}")
            return None

    def _check(self) -> None:
        """Refuse a network that could not be read from a file, which knows a narrow one by its tensors alone."""
        if self.channels is not None and self.spaces:
            kept = self.kept(torch.cat([torch.arange(width) < max(1, width - 1) for width in self.moves.widths]))
            if not is_restorable(self.network, self.channels, kept):
                raise ValueError(
                    "MaskedBNN cannot narrow a normalisation without parameters or statistics of its own (GroupNorm or "
                    "InstanceNorm with affine=False): give it affine=True"
                )

    def kept(self, mask: Tensor) -> KeptChannels:
        """The nodes of every space that are on."""
        assert self.channels is not None
        kept = {space: torch.arange(width) for space, width in enumerate(self.channels.widths)}
        parts = mask.split(list(self.moves.widths))
        return kept | {space: part.nonzero()[:, 0] for space, part in zip(self.spaces, parts, strict=True)}

    def _narrow(self, mask: Tensor) -> tuple[Network, dict[str, Index]]:
        if mask is self.mask and self.arranged is not None:
            return self.arranged
        if self.channels is None:
            return self.network, {}
        kept = self.kept(mask)
        return narrow_network(self.network, self.channels, kept), kept_entries(self.channels, kept, self.run.device)

    def _arrange(self) -> None:
        self.arranged = None
        self.narrow, self.index = self.arranged = self._narrow(self.mask)
        self.training_flops = self.narrow_account(self.narrow).total.training_flops

    def log_joint(self, x: Inputs, y: Tensor, part: BatchPart) -> Tensor:
        """The log joint density of a batch: likelihood of the narrow network, prior of all weights."""
        thin = _gathered(self.moved | self.buffers, self.index)
        outputs = self.narrow(thin, x, train=True)
        with torch.no_grad():
            for name, buffer in self.buffers.items():
                if name in self.index:
                    buffer.copy_(scatter(thin[name], self.index[name], buffer))
        likelihood = self.task.log_joint(outputs, y, {}, self.noise.hyper, batch_rows=part.batch_rows, share=0.0)
        weights = {name: self.moved[name] for name in self.network.names}
        return likelihood + part.prior_share * (self.task.network.prior.log_prob(weights) + self.noise.log_prior())

    log_smooth = log_joint

    def evaluate(self, mask: Tensor, batch: tuple[Inputs, Tensor] | None, part: BatchPart) -> tuple[float, Tensor]:
        """The log likelihood with these nodes on, estimated from a batch, and its gradient in their masks."""
        likelihood = torch.zeros((), dtype=torch.float64, device=self.run.device)
        gradient = torch.zeros(len(mask), dtype=torch.float64, device=self.run.device)
        if batch is not None:
            network, index = self._narrow(mask)
            values = {name: t.detach() for name, t in self.moved.items()}
            values |= {name: t.clone() for name, t in self.buffers.items()}  # which a pass would write into
            ones = {s: torch.ones(len(nodes), device=self.run.device) for s, nodes in self._on(mask).items()}
            ones = {s: m.to(network.dtype).requires_grad_() for s, m in ones.items()}
            thin = self._multiplied(_gathered(values, index), ones)
            hyper = {name: t.detach() for name, t in self.noise.hyper.items()}
            outputs = network(thin, batch[0], train=True)
            density = self.task.log_joint(outputs, batch[1], {}, hyper, batch_rows=part.batch_rows, share=0.0)
            gradients = torch.autograd.grad(density, [*ones.values()], materialize_grads=True)
            likelihood += density.detach().double()
            gradient[mask.to(gradient.device)] = torch.cat(gradients).double()
        self.run.ranks.add([likelihood, gradient])
        return float(likelihood), gradient.cpu()

    def _on(self, mask: Tensor) -> KeptChannels:
        parts = mask.split(list(self.moves.widths))
        return {space: part.nonzero()[:, 0] for space, part in zip(self.spaces, parts, strict=True)}

    def _multiplied(self, thin: Params, masks: dict[int, Tensor]) -> Params:
        """The narrow network's values, with every weight that reads a node multiplied by the node's mask."""
        assert self.channels is not None
        result = dict(thin)
        for name in self.channels.weights:
            axes = self.channels.extents[name].axes if name in self.channels.extents else ()
            if len(axes) > 1 and name in thin and any(s.space in masks for s in axes[1]):
                parts = [
                    masks[s.space].repeat_interleave(s.block)
                    if s.space in masks
                    else thin[name].new_ones(s.width * s.block)
                    for s in axes[1]
                ]
                result[name] = thin[name] * torch.cat(parts).view(1, -1, *[1] * (thin[name].ndim - 2))
        return result

    @property
    def arrangement(self) -> object:
        """The network of the nodes that are on."""
        return self.narrow

    def written(self) -> list[Tensor]:
        """Statistics of the module."""
        return [*self.buffers.values()]

    def numbers(self, chain: LangevinChain, step: int) -> list[float]:
        """None."""
        return []

    def follow(self, numbers: Sequence[float] | Tensor) -> None:
        """Nothing follows the weights but what is decided."""

    def decides_after(self, step: int) -> bool:
        """Every few steps."""
        return (step + 1) % self.interval == 0 and len(self.mask) > 0

    def decide(self, chain: LangevinChain, batch: tuple[Inputs, Tensor] | None, part: BatchPart) -> None:
        """Try a birth or a death on the last step's batch."""

        def evaluate(mask: Tensor) -> tuple[float, Tensor]:
            with seeded(chain.step, self.run.device):  # dropout inside the module is the same for both masks
                return self.evaluate(mask, batch, part)

        new = self.moves.move(self.mask, evaluate, chain.choices)
        self.tried += 1
        if new is not None:
            self.accepted += 1
            self.mask = new
            self._arrange()

    def after_epoch(self, chain: LangevinChain) -> None:
        """All ranks go on with the mean of their statistics."""
        self.run.ranks.average(self.buffers.values())
        if chain.history:
            chain.history[-1]["nodes"] = int(self.mask.sum())

    def narrow_account(self, narrow: Network) -> Account:
        """The costs of a network with fewer nodes, beside those of the whole one."""
        few = network_account(narrow, self.example, _SCHEME)
        rows = [replace(r, cost=now.cost, active=now.weights) for r, now in zip(self.whole.rows, few.rows, strict=True)]
        return replace(few, rows=tuple(rows))

    def flops(self) -> float:
        """Operations of a row: those of a step, and two more passes for each move."""
        moves = 2 / self.interval if len(self.mask) else 0.0
        return self.training_flops * (1 + moves)

    def draw(self) -> State:
        """A draw: values of the narrow network, and which entries of the whole one they are."""
        values = _gathered({name: t.detach() for name, t in (self.moved | self.buffers).items()}, self.index)
        state = {
            "active": {"mean": torch.zeros(0, device=self.run.device)},
            "rest": {name: t.clone() for name, t in values.items()},
        }
        if self.channels is not None:
            state["slices"] = stored_slices(self.channels, self.kept(self.mask))
        return state

    def carry(self) -> State:
        """What a checkpoint keeps: which nodes are on, how many moves were tried and accepted, and statistics."""
        counts = torch.tensor([self.tried, self.accepted])
        return {"mask": {"mask": self.mask, "counts": counts}, "buffers": self.buffers}

    def restore(self, carry: State) -> None:
        """Go on from a checkpoint."""
        self.mask = carry["mask"]["mask"].cpu().clone()
        self.tried, self.accepted = carry["mask"]["counts"].tolist()
        self.buffers = {name: t.to(self.run.device, copy=True) for name, t in carry["buffers"].items()}
        self._arrange()


def mean_account(accounts: list[Account]) -> Account:
    """The mean costs of several networks, layer by layer."""
    n, rows = len(accounts), []
    for each in zip(*(account.rows for account in accounts), strict=True):
        total = sum((row.cost for row in each), Cost())
        cost = Cost(
            total.inference_flops / n, total.training_flops / n, round(total.parameters / n),
            round(total.stored_bytes / n), round(total.training_bytes / n),
        )  # fmt: skip
        rows.append(replace(each[0], cost=cost, active=round(sum(row.active for row in each) / n)))
    return replace(accounts[0], rows=tuple(rows))


def _gathered(params: Params, index: dict[str, Index]) -> Params:
    return {name: gather(value, index[name]) if name in index else value for name, value in params.items()}


def _maskable(channels: Channels, network: Network) -> list[int]:
    """Spaces whose nodes selected weights alone read, since a mask stands for zeros in those weights."""
    fixed = set()
    for name in channels.weights:
        axes = channels.extents[name].axes if name in channels.extents else ()
        if len(axes) > 1 and name not in network.names:
            fixed |= {segment.space for segment in axes[1]}
    return [space for space in range(len(channels.widths)) if space not in fixed]
