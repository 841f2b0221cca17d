"""Adapters of a vision transformer, all methods: pretrained on CIFAR-100, tuned to a few rows of CIFAR-10, on a GPU.

    python experiments/adapters/vit.py --device cuda --folder runs/vit --minutes 9   # again until it says done
    python experiments/adapters/vit.py --device cuda --folder runs/vit --pretrain    # the base alone
    python experiments/adapters/vit.py --tiny --folder runs/vit-tiny --csv tiny.csv   # on a CPU, to see it run

A ViT of 6 blocks and width 256 learns CIFAR-100; LoRA of rank 8 in its attention and a fresh head are then tuned to
1,000 and 5,000 training images of CIFAR-10 in as many steps, and every method makes a posterior over adapters and
head, three seeds each. Lines are added to vit.csv, a run at a time: clean test images, four corruptions at severity 1,
3 and 5, and how test images of CIFAR-100 and of MNIST are told apart (--outside svhn where that is at hand); joint
likelihoods are of ten labels of two images. A run that would begin after --minutes is left to the next call, and one
that is stopped, pretraining too, goes on there where it was. Processes side by side need a folder and a csv file each.
"""

import argparse
import math
import shutil
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from adapter_scores import Table, apart, cost, predicted, scores
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat import Training, data

CORRUPTIONS = ("gaussian_noise", "defocus_blur", "fog", "jpeg_compression")
SEVERITIES = (1, 3, 5)
DRAWS = 32  # of a prediction
BATCH, STEPS = 64, 600  # of tuning, whatever the rows
HELD_OUT = 0.1  # of the rows, for temperatures
Lines = list[dict[str, Any]]


class Logits(nn.Module):
    """A classifier of transformers, which takes images and gives logits."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        """The logits, [B, C]."""
        return self.inner(pixel_values=x).logits


def vit(classes: int, tiny: bool) -> nn.Module:
    """A vision transformer for images of 32 pixels, in patches of 4."""
    from transformers import ViTConfig, ViTForImageClassification

    width, blocks = (16, 2) if tiny else (256, 6)
    config = ViTConfig(
        image_size=32, patch_size=4, hidden_size=width, num_hidden_layers=blocks, num_attention_heads=4,
        intermediate_size=4 * width, num_labels=classes,
    )  # fmt: skip
    return ViTForImageClassification(config)


def pretrained(given: argparse.Namespace) -> dict[str, Tensor] | None:
    """The weights of a point on CIFAR-100, kept in the folder; None where time is up before it is trained."""
    folder = given.folder / "pretrained"
    torch.manual_seed(0)
    module = Logits(vit(100, given.tiny))
    if not folder.exists():
        rows = images("cifar100", given).train.tensors
        x, y = (part[:200] for part in rows) if given.tiny else rows
        training = Training(
            epochs=2 if given.tiny else 100, batch_size=64 if given.tiny else 512, learning_rate=1e-3,
            schedule="cosine", precision="bfloat16" if given.device == "cuda" else "float32",
        )  # fmt: skip
        task = caveat.Task(
            module, DataLoader(TensorDataset(x, y), 256), caveat.Categorical(), caveat.GaussianPrior(25.0),
            augment=data.crop_and_flip,
        )  # fmt: skip
        # A call that is stopped here is resumed by the next one, which finds the place in the folder.
        caveat.fit(task, caveat.MAP(training=training), device=given.device, folder=folder)
        if late(given):
            return None
    point = caveat.load(folder, module, device=given.device)
    if not (given.folder / "base.txt").exists():
        rows = images("cifar100", given).test.tensors
        found = scores(predicted(point, rows[0][: given.test_rows], 1)[0], rows[1][: given.test_rows])
        said = f"the base: accuracy {found['accuracy']:.3f} and {found['nll']:.3f} nats on test rows of CIFAR-100"
        (given.folder / "base.txt").write_text(f"{said}, {point.info.seconds:.0f} s of training\n")
        print(said, flush=True)
    values = point.network.fixed() | point.state["params"]
    return {name.removeprefix("inner."): value.cpu() for name, value in values.items()}


def images(name: str, given: argparse.Namespace) -> data.DataSet:
    """A data set of images; random ones of its shape for a tiny run."""
    if not given.tiny:
        return data.load(name, given.data_dir)
    rng = torch.Generator().manual_seed(len(name))
    classes = 100 if name == "cifar100" else 10
    parts = []
    for n in (300, 60):
        y = torch.arange(n) % classes
        x = torch.rand(n, 3, 32, 32, generator=rng) * 0.5 + (y[:, None, None, None] % 10) / 20
        parts.append(TensorDataset((x - 0.5) / 0.25, y))
    scale = {"mean": [0.5] * 3, "std": [0.25] * 3, "black": [-2.0] * 3}
    return data.DataSet(name, *parts, "categorical", classes, tuple(map(str, range(classes))), scale)


def adapted(base: dict[str, Tensor], given: argparse.Namespace, seed: int) -> nn.Module:
    """The pretrained trunk with adapters, and a fresh head of ten classes."""
    import peft

    torch.manual_seed(seed)
    module = vit(10, given.tiny)
    own = module.state_dict()
    module.load_state_dict({n: v if v.shape == own[n].shape else own[n] for n, v in base.items()})
    attention = [name for name, layer in module.named_modules() if isinstance(layer, nn.Linear) and "attention" in name]
    settings = peft.LoraConfig(
        r=8, lora_alpha=16, lora_dropout=0.05, target_modules=attention, modules_to_save=["classifier"]
    )
    return Logits(peft.get_peft_model(module, settings))


def methods(tiny: bool, rows: int) -> dict[str, Any]:
    """Every method by the name of its lines, for so many rows."""
    epoch = math.ceil(rows * (1 - HELD_OUT) / BATCH)  # steps
    epochs = 2 if tiny else round(STEPS / epoch)
    training = Training(epochs=epochs, learning_rate=2e-3, batch_size=BATCH)
    few = caveat.SGMCMC(chains=2, length=4, burn_in=4)
    # After 1,000 steps a draw of each of four chains every 25 steps or so.
    chains = caveat.SGMCMC(
        chains=4, length=32, batch_size=BATCH, burn_in=math.ceil(1000 / epoch), thin=math.ceil(25 / epoch)
    )
    return {
        "map": caveat.MAP(training=training),
        "map, temperature": caveat.MAP(temperature=True, training=Training(epochs=0)),
        "ensemble of 5": caveat.Ensemble(members=5, training=training),
        "mc dropout": caveat.MCDropout(training=training),
        "swag": caveat.SWAG(
            rank=2 if tiny else 20, training=Training(epochs=3 if tiny else max(20, epochs), learning_rate=0.01)
        ),
        "laplace, kronecker": caveat.Laplace(),
        "laplace, diagonal": caveat.Laplace(structure="diagonal"),
        "ensemble of 5, laplace": caveat.Ensemble(of=caveat.Laplace(), members=5, training=training),
        "last layer": caveat.LastLayerLaplace(),
        "subnetwork of 5000": caveat.SubnetworkLaplace(weights=100 if tiny else 5000),
        "sampled laplace": caveat.SampledLaplace(samples=4 if tiny else 32, temperature="validation"),
        "ivon": caveat.IVON(training=Training(epochs=epochs, batch_size=BATCH)),
        "mean-field vi": caveat.MeanFieldVI(training=training),
        "ssvi": caveat.SSVI(density=0.3, training=training),
        "sgmcmc": few if tiny else chains,
    }


def late(given: argparse.Namespace) -> bool:
    """Whether the time of this call is up."""
    return time.monotonic() - given.begin > 60 * given.minutes


@dataclass(frozen=True)
class Images:
    """CIFAR-10 in all that is asked of a posterior, read and corrupted once a call."""

    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    shifted: dict[str, tuple[Tensor, Tensor]]  # by corruption and severity
    outside: dict[str, Tensor]  # images of other things

    @classmethod
    def read(cls, given: argparse.Namespace) -> "Images":
        """Training rows, test rows, test rows corrupted, and images of other things."""
        whole = images("cifar10", given)
        shifted = {}
        for corruption in CORRUPTIONS:
            for severity, rows in data.shifted(whole, corruption, SEVERITIES).items():
                x, y = zip(*rows.__getitems__(list(range(given.shifted_rows))), strict=True)
                shifted[f"{corruption} {severity}"] = torch.stack(x), torch.stack(y)
        count = min(given.test_rows, 10_000)
        names = ("permuted", "noise") if given.tiny else given.outside or ("cifar100", "mnist")
        outside = {name: data.out_of_distribution(name, whole, given.data_dir, n=count).tensors[0] for name in names}
        test = tuple(part[: given.test_rows] for part in whole.test.tensors)
        return cls(whole.train.tensors, test, shifted, outside)


def run(base: dict[str, Tensor], rows_of: Images, name: str, rows: int, seed: int, given: argparse.Namespace) -> Lines:
    """The lines of one method, number of rows and seed."""
    x, y = rows_of.train
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))[:rows]
    module = adapted(base, given, seed)
    loader = DataLoader(TensorDataset(x[order], y[order]), BATCH)
    task = caveat.Task(module, loader, caveat.Categorical(), caveat.GaussianPrior(1.0), validation=HELD_OUT)
    offered = methods(given.tiny, rows)
    point, method = fitted(task, offered["map"], None, given, f"map-{rows}-{seed}", seed), offered[name]
    start = point if method.starts_from == "trained" or name == "map, temperature" else None
    posterior = point if name == "map" else fitted(task, method, start, given, f"posterior-{rows}-{seed}-{name}", seed)
    inside, seconds = predicted(posterior, rows_of.test[0], DRAWS)
    common = {"rows": rows, "method": name, "seed": seed} | cost(posterior, seconds)
    lines = [common | {"on": "test"} | scores(inside, rows_of.test[1])]
    for where, (inputs, targets) in rows_of.shifted.items():
        lines.append(common | {"on": where} | scores(predicted(posterior, inputs, DRAWS)[0], targets))
    for where, inputs in rows_of.outside.items():
        lines.append(common | {"on": where} | apart(inside, predicted(posterior, inputs, DRAWS)[0]))
    return lines


def fitted(
    task: caveat.Task, method: Any, start: Any, given: argparse.Namespace, name: str, seed: int
) -> caveat.Posterior:
    """A fit that is kept in the folder, where a call that is stopped leaves it to the next one."""
    place = given.folder / name.replace(",", "").replace(" ", "-")
    if not place.exists():
        caveat.fit(task, method, start=start, seed=seed, folder=place, device=given.device)
    return caveat.load(place, task.network.module, device=given.device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, required=True, help="keeps the pretrained network and the points")
    parser.add_argument("--data-dir")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--pretrain", action="store_true", help="the network on CIFAR-100, and no more")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many minutes")
    parser.add_argument("--rows", type=int, action="append", help="1000 and 5000 unless given")
    parser.add_argument("--seed", type=int, action="append", help="0, 1 and 2 unless given")
    parser.add_argument("--method", action="append", help="only this; may be repeated")
    parser.add_argument("--test-rows", type=int, default=10_000)
    parser.add_argument("--shifted-rows", type=int, default=1000, help="of each corruption and severity")
    parser.add_argument("--outside", action="append", help="images of other things; cifar100 and mnist unless given")
    parser.add_argument("--tiny", action="store_true", help="a small network on random images")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("vit.csv"))
    given = parser.parse_args()
    given.begin = time.monotonic()
    warnings.simplefilter("ignore", FutureWarning)  # of peft
    given.folder.mkdir(parents=True, exist_ok=True)
    base = pretrained(given)
    if given.pretrain:
        return
    table = Table(given.csv)
    wanted = [
        (name, rows, seed)
        for rows in given.rows or ((100,) if given.tiny else (1000, 5000))
        for seed in given.seed or (0, 1, 2)
        for name in given.method or methods(given.tiny, rows)
        if not table.has(rows, name, seed)
    ]
    rows_of = Images.read(given) if wanted and base is not None else None
    for name, rows, seed in wanted:
        if base is None or rows_of is None or late(given):
            print("time is up: call this again to go on", flush=True)
            return
        try:
            lines = run(base, rows_of, name, rows, seed, given)
        except (ValueError, TypeError, MemoryError, RuntimeError) as error:  # the last where a GPU is full
            print(f"{name}, {rows} rows, seed {seed}: refused or failed, {error}", flush=True)
            continue
        table.add(lines)
        for place in given.folder.glob("posterior-*"):  # the point is kept: others start from it
            shutil.rmtree(place)
        print(f"{name}, {rows} rows, seed {seed}: {lines[0]['nll']:.3f} nats on test rows", flush=True)
    print("done")


if __name__ == "__main__":
    main()
