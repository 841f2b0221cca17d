"""Do posteriors that were trained apart keep the same weights? The overlap of their supports, layer by layer.

    python experiments/ssvi/overlap.py runs/95 runs/95-1    # folders of cifar.py; overlap.csv, half a minute on a CPU

For every pair, the share of the sparser one's active weights of a layer that the other has too; layers that one of the
two keeps whole, or that are of different shapes, are left out. Supports drawn at random would share the other's
density. Trained ones have their active weights at some places of a kernel, and in some channels, more than in others,
and the channels of a hidden layer have no names: any renaming of them makes the same network. So the second support is
also compared as it is after its channels are renamed at random, those that are added to one another alike: the mean
and standard deviation over renamings are what chance gives to two supports of these shapes.
"""

import argparse
import csv
import itertools
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

import caveat
from caveat import models
from caveat.engine.channels import Channels, find_channels, gather
from caveat.engine.sparse import weight_name
from caveat.engine.variational import LayerState

COLUMNS = ("first", "second", "layer", "weights", "active_first", "active_second", "shared", "overlap", "chance")
COLUMNS += ("renamed_mean", "renamed_std", "renamings")
ALL = "all"  # layers together
Masks = dict[str, Tensor]  # by layer, bool and shaped as its weight: which weights are active


@dataclass(frozen=True)
class Support:
    """Which weights of a network a posterior has, and which of its channels can be renamed."""

    masks: Masks  # of the layers that are sparse
    channels: Channels

    @classmethod
    def read(cls, folder: Path) -> "Support":
        """Of a posterior that cifar.py made with weights one by one, on CIFAR-10 or CIFAR-100."""
        path = folder / "state.safetensors"
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing: give a folder that cifar.py --folder made")
        with safe_open(path, framework="pt") as file:
            mean, indices, counts = (file.get_tensor(f"state.active/{name}") for name in ("mean", "indices", "counts"))
            width, classes = (len(file.get_tensor(f"state.rest/{name}")) for name in ("stem.1.bias", "head.bias"))
        module = models.resnet18(3, classes, width)
        network = caveat.Network(module, caveat.Categorical())
        layout = LayerState(mean, indices, counts, rest={}, hyper={}).layout(network)
        masks = {}
        for layer, places in layout.indices_of().items():
            if places is not None:
                geometry = layout.geometries[layer]
                mask = torch.zeros(geometry.size, dtype=torch.bool)
                mask[places.long()] = True
                masks[layer] = mask.view(geometry.shape)
        return cls(masks, find_channels(module, torch.zeros(2, 3, 32, 32)))

    def renamed(self, rng: torch.Generator) -> Masks:
        """The same support after the channels of every space are put in a random order."""
        order = [torch.randperm(width, generator=rng) for width in self.channels.widths]
        masks = {}
        for layer, mask in self.masks.items():
            axes = self.channels.extents[weight_name(layer)].axes
            masks[layer] = gather(mask, tuple(_entries(axis, order) for axis in axes))
        return masks


def _entries(axis: tuple, order: list[Tensor]) -> Tensor | None:
    """Where the entries along an axis come from; None where its channels have names, such as classes."""
    if not axis or axis[0].space is None:
        return None
    (segment,) = axis
    assert segment.block == 1  # no map is flattened in a ResNet
    return order[segment.space]


def overlaps(first: Support, second: Support, renamings: int) -> list[dict[str, str | int]]:
    """A line for each layer that both have in part, and one for all of them."""
    layers = [name for name in first.masks if name in second.masks]
    layers = [name for name in layers if first.masks[name].shape == second.masks[name].shape]
    if not layers:
        raise ValueError("the two posteriors have no sparse layer of the same shape")
    rng = torch.Generator().manual_seed(0)

    def shared_with(masks: Masks) -> Tensor:
        """How many weights of each layer are active in the first and here, [layers]."""
        return torch.stack([(first.masks[name] & masks[name]).sum() for name in layers])

    sizes = torch.tensor([first.masks[name].numel() for name in layers])
    active = torch.stack([first.masks[name].sum() for name in layers])
    active_second = torch.stack([second.masks[name].sum() for name in layers])
    shared = with_sum(shared_with(second.masks))
    renamed = with_sum(torch.stack([shared_with(second.renamed(rng)) for _ in range(renamings)]))  # [R, layers + 1]
    expected = with_sum(active * active_second / sizes.double())  # how many random supports share
    sizes, active, active_second = with_sum(sizes), with_sum(active), with_sum(active_second)
    fewer = torch.minimum(active, active_second)
    shares = {"overlap": shared, "chance": expected, "renamed_mean": renamed.double().mean(0)}
    shares |= {"renamed_std": renamed.double().std(0)}
    lines: list[dict[str, str | int]] = []
    for place, layer in enumerate([*layers, ALL]):
        line: dict[str, str | int] = {"layer": layer, "weights": int(sizes[place]), "shared": int(shared[place])}
        line |= {"active_first": int(active[place]), "active_second": int(active_second[place])}
        line |= {name: f"{float(counts[place] / fewer[place]):.5f}" for name, counts in shares.items()}
        lines.append(line | {"renamings": renamings})
    return lines


def with_sum(counts: Tensor) -> Tensor:
    """Numbers of layers, [..., layers], and behind them their sum, [..., layers + 1]."""
    return torch.cat([counts, counts.sum(-1, keepdim=True)], -1)


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", type=Path, nargs="+", help="of posteriors; all pairs of them are compared")
    parser.add_argument("--renamings", type=int, default=200, help="of the channels of the second of a pair")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("overlap.csv"))
    a = parser.parse_args(words)
    if len(a.folders) < 2:
        parser.error("give at least two folders")
    supports = {folder.name: Support.read(folder) for folder in a.folders}
    lines = []
    print("| first | second | layer | active | overlap | chance | renamed at random |\n|---|---|---|---|---|---|---|")
    for first, second in itertools.combinations(supports, 2):
        for line in overlaps(supports[first], supports[second], a.renamings):
            lines.append({"first": first, "second": second} | line)
            values = (first, second, line["layer"], line["active_first"], line["overlap"], line["chance"])
            print("|", " | ".join(map(str, values)), f"| {line['renamed_mean']} ±{line['renamed_std']} |", flush=True)
    with a.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines)


if __name__ == "__main__":
    main()
