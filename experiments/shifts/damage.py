"""What every corruption at every severity does to a small convolutional network: damage.csv, a table.

    CAVEAT_DATA=... python experiments/shifts/damage.py

Three convolutions of 16, 32 and 64 channels with BatchNorm, trained for five epochs on the first 20,000 images of
CIFAR-10; the error on the first 2,000 test images. Some five minutes on one core.
"""

import csv
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from caveat import data

TRAIN, TEST, EPOCHS, BATCH = 20_000, 2_000, 5, 128


def trained(x: Tensor, y: Tensor) -> nn.Module:
    """The network, from seed 0."""
    torch.manual_seed(0)
    layers: list[nn.Module] = []
    for inside, outside in ((3, 16), (16, 32), (32, 64)):
        convolution = nn.Conv2d(inside, outside, 3, padding=1, bias=False)
        layers += [convolution, nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
    network = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 10)).to(memory_format=torch.channels_last)
    steps = len(x) // BATCH
    optimiser = torch.optim.SGD(network.parameters(), 0.05, momentum=0.9, nesterov=True, weight_decay=5e-4)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 0.1, total_steps=EPOCHS * steps)
    rng = torch.Generator().manual_seed(0)
    for _ in range(EPOCHS):
        for rows in torch.randperm(len(x), generator=rng)[: steps * BATCH].split(BATCH):
            images = data.crop_and_flip(x[rows], rng).contiguous(memory_format=torch.channels_last)
            optimiser.zero_grad()
            F.cross_entropy(network(images), y[rows]).backward()
            optimiser.step()
            schedule.step()
    return network.eval()


def main() -> None:
    cifar = data.load("cifar10")
    network = trained(*(tensor[:TRAIN] for tensor in cifar.train.tensors))

    @torch.no_grad()
    def error(rows: torch.utils.data.Dataset) -> float:
        x, y = next(iter(torch.utils.data.DataLoader(rows, TEST)))
        return 100 * (network(x).argmax(1) != y).float().mean().item()

    found = [["clean", 0, f"{error(cifar.test):.1f}"]]
    for name in data.CORRUPTIONS:
        errors = [f"{error(rows):.1f}" for rows in data.shifted(cifar, name).values()]
        found += [[name, severity, value] for severity, value in enumerate(errors, start=1)]
        print(f"| {name} | {' | '.join(errors)} |", flush=True)
    with Path(__file__).with_name("damage.csv").open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([["corruption", "severity", "error"], *found])


if __name__ == "__main__":
    main()
