"""How wide should the samples be? The likelihood of test rows at several temperatures, two priors.

    CAVEAT_DATA=DATA python experiments/sampled_laplace/temperature.py      # temperature.csv: half an hour on two cores

ResNet-18 of width 8 (176,000 weights) on images of half their size, trained until it is sure of its rows. Each line of
the csv is (data, rows, prior, temperature, NLL, accuracy) of 1,000 test rows by 32 samples; temperature 0 is the MAP.
"""

import argparse
import csv
import dataclasses
from pathlib import Path

import torch
from torch.nn.functional import avg_pool2d

import caveat
from caveat import MAP, SampledLaplace, Training, data, models
from caveat.engine.linear_model import ConjugateGradients, Tuning

PROBLEMS = {"mnist": 2000, "cifar10": 3000}  # and how many of their rows
TEMPERATURES = (1.0, 0.25, 0.0625, 0.01)


def method(g_prior: bool) -> SampledLaplace:
    return SampledLaplace(
        samples=32,
        g_prior=g_prior,
        first_precision=100.0 if g_prior else 10.0,
        negligible=1e-2,
        tuning=Tuning(samples=2, tolerance=2e-2),
        solver=ConjugateGradients(rank=64, at_once=16, tolerance=1e-2),
    )


def scores(posterior: caveat.Posterior, x: torch.Tensor, y: torch.Tensor) -> tuple[float, float]:
    prediction = posterior.predict(x)
    right = prediction.probs.argmax(-1) == y  # type: ignore[attr-defined]
    return -float(prediction.log_prob(y).mean()), float(right.double().mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", choices=PROBLEMS, action="append", help="only this one; may be repeated")
    parser.add_argument("--rows", type=int, help="fewer of them")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("temperature.csv"))
    given = parser.parse_args()
    lines = []
    for name in given.data or PROBLEMS:
        count, images = given.rows or PROBLEMS[name], data.load(name)
        (x, y), (test_x, test_y) = images.train.tensors, images.test.tensors
        x, y, test_x, test_y = avg_pool2d(x[:count], 2), y[:count], avg_pool2d(test_x[:1000], 2), test_y[:1000]
        torch.manual_seed(0)
        module = models.resnet18(in_channels=x.shape[1], out_features=10, width=8)
        task = caveat.Task(module, (x, y), caveat.Categorical(), caveat.GaussianPrior(5e-4 * count))
        training = Training(epochs=30, batch_size=128, optimizer="sgd", learning_rate=0.1, schedule="onecycle")
        start = caveat.fit(task, MAP(training=training))
        lines.append((name, count, "", 0.0, *scores(start, test_x, test_y)))
        for prior in ("one precision", "g-prior"):
            posterior = caveat.fit(task, method(prior == "g-prior"), start=start)
            for temperature in TEMPERATURES:
                value = {"posterior": {"temperature": torch.tensor(temperature, dtype=torch.float64)}}
                cold = dataclasses.replace(posterior, state=posterior.state | value)
                lines.append((name, count, prior, temperature, *scores(cold, test_x, test_y)))
                print(*lines[-1], flush=True)
    with given.csv.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(("data", "rows", "prior", "temperature", "nll", "accuracy"))
        writer.writerows([(*line[:4], f"{line[4]:.4g}", f"{line[5]:.4g}") for line in lines])


if __name__ == "__main__":
    main()
