"""Draws first.svg, the picture of README's first screen: what a posterior adds, to an image and to a curve.

Run with `python docs/images/first.py`. Left: a grainy digit that the trained network names surely and wrongly, and what
a short HMC run of the same network says of it. Right: a regression whose band widens away from the data, by
SubnetworkLaplace over all weights.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import caveat
from caveat import data, models
from caveat.randomness import seeded

HERE = Path(__file__).parent
WIDTH, HEIGHT = 860, 300
INK, QUIET, POINT, POSTERIOR, DATA = "#1c2126", "#5b6570", "#b3261e", "#1a56b0", "#1c2126"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', 'Liberation Sans', sans-serif"


def main() -> None:
    """Fit, draw, write."""
    parts = [f'<rect width="{WIDTH}" height="{HEIGHT}" rx="10" fill="#ffffff"/>', *digit_panel(), *curve_panel()]
    frame = f'viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" font-family="{FONT}" fill="{INK}"'
    title = "Left: a digit that a network misnames surely, and a posterior that doubts it. Right: a regression band."
    svg = f'<svg xmlns="http://www.w3.org/2000/svg" {frame} role="img"><title>{title}</title>{"".join(parts)}</svg>\n'
    (HERE / "first.svg").write_text(svg, encoding="utf-8")
    print(f"{HERE / 'first.svg'}: {len(svg):,} bytes")


def digit_panel() -> list[str]:
    """The image, and two rows of bars: what the network and what the posterior says of each label."""
    grainy, task = data.load("grainy_digits"), caveat.reference_task("grainy_digits")
    point = caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=100)))
    posterior = caveat.fit(task, caveat.HMC(chains=2, length=100, warmup=50))
    x, y = grainy.test.tensors
    of_point, of_posterior = point.predict(x).probs, posterior.predict(x).probs
    row = worst_row(of_point, of_posterior, y)
    named, true = int(of_point[row].argmax()), int(y[row])
    shares = [float(of_point[row, named]), float(of_posterior[row, named]), float(of_posterior[row, true])]
    print(f"row {row}: a {true}, named {named} with {shares[0]:.3f}; posterior {shares[1]:.3f}, truth {shares[2]:.3f}")
    pixels = x[row, 0] * grainy.preprocessing["std"][0] + grainy.preprocessing["mean"][0]
    shown = [text(24, 36, f"A noisy {true}", 17, weight=600), *image(pixels.clamp(0, 1), 24, 62, 18)]
    shown.append(text(24, 226, "a test image", 13, QUIET))
    for top, title, colour, probs in (
        (62, f"the network: “a {named}”, {shares[0]:.0%} sure", POINT, of_point[row]),
        (168, f"its posterior: {shares[1]:.0%} for {named}, {shares[2]:.0%} for {true}", POSTERIOR, of_posterior[row]),
    ):
        shown += [text(194, top + 12, title, 13, colour, 600), *bars(probs, 194, top + 22, colour)]
    return shown


def worst_row(of_point: Tensor, of_posterior: Tensor, y: Tensor) -> int:
    """The row that the network misnames surely (more than 90%) and about which the posterior's doubt is largest."""
    confidence, label = of_point.max(1)
    doubt = confidence - of_posterior.gather(1, label[:, None])[:, 0]
    return int(doubt.masked_fill((label == y) | (confidence < 0.9), -1.0).argmax())


def curve_panel() -> list[str]:
    """Points, the mean, and the 90% interval of SubnetworkLaplace, beyond the points on both sides and between them."""
    rng = torch.Generator().manual_seed(0)
    x = torch.cat([torch.linspace(-1.7, -0.6, 24), torch.linspace(0.7, 1.3, 16)])[:, None]
    y = torch.sin(3 * x) + 0.12 * torch.randn(x.shape, generator=rng)
    with seeded(0):
        module = models.mlp(1, 1, hidden=(20, 20), activation=nn.Tanh)
    task = caveat.Task(module, TensorDataset(x, y), caveat.Gaussian(), caveat.GaussianPrior(precision=0.3))
    start = caveat.MAP(training=caveat.Training(epochs=600, learning_rate=0.01))
    posterior = caveat.fit(task, caveat.SubnetworkLaplace(weights=1.0, prediction="closed"), start=start)
    grid = torch.linspace(-2.5, 2.5, 121)[:, None]
    prediction = posterior.predict(grid)
    low, high = prediction.interval(0.9)
    widths = [float((high - low)[i]) for i in (0, int((grid.flatten() + 1).abs().argmin()))]
    print(f"width of the band: {widths[0]:.2f} at the edge, {widths[1]:.2f} among the data")
    across = [498 + 338 * (float(value) + 2.5) / 5 for value in grid]
    ends = float(low.min()), float(high.max())
    above, below = (list(zip(across, heights(edge, ends), strict=True)) for edge in (high, low))
    band = above + below[::-1]
    places = [498 + 338 * (float(value) + 2.5) / 5 for value in x]
    line = path(list(zip(across, heights(prediction.mean, ends), strict=True)))
    points = [
        f'<circle cx="{left:.1f}" cy="{top:.1f}" r="2.6" fill="{DATA}"/>'
        for left, top in zip(places, heights(y, ends), strict=True)
    ]
    return [
        f'<line x1="472" y1="24" x2="472" y2="{HEIGHT - 24}" stroke="#dfe3e8"/>',
        text(498, 36, "A regression: 90% intervals", 17, weight=600),
        f'<polygon points="{path(band)}" fill="{POSTERIOR}" fill-opacity="0.22"/>',
        f'<polyline points="{line}" fill="none" stroke="{POSTERIOR}" stroke-width="2"/>',
        *points,
        text(498, 282, "narrow at the data (dots), wide away from them", 13, QUIET),
    ]


def heights(values: Tensor, ends: tuple[float, float]) -> list[float]:
    """Numbers between two ends, the lowest and the highest that is drawn, as places on the page."""
    low, high = ends
    return [256 - 202 * (float(value) - low) / (high - low) for value in values.flatten()]


def image(pixels: Tensor, left: int, top: int, side: int) -> list[str]:
    """Grey squares."""
    size = f'width="{side + 0.5}" height="{side + 0.5}"'
    return [
        f'<rect x="{left + side * j}" y="{top + side * i}" {size} fill="rgb({g},{g},{g})"/>'
        for i, line in enumerate(pixels)
        for j, value in enumerate(line)
        for g in [round(255 * float(value))]
    ]


def bars(probs: Tensor, left: int, top: int, colour: str, height: int = 52) -> list[str]:
    """One bar a label, over the ten digits."""
    shown = [f'<line x1="{left}" y1="{top + height}" x2="{left + 250}" y2="{top + height}" stroke="#a0a9b3"/>']
    for label, value in enumerate(probs.tolist()):
        tall = height * value
        place = f'x="{left + 25 * label + 3}" y="{top + height - tall:.1f}" width="19" height="{tall:.1f}"'
        shown.append(f'<rect {place} fill="{colour}"/>')
        shown.append(text(left + 25 * label + 9, top + height + 15, str(label), 12, QUIET))
    return shown


def text(left: float, top: float, words: str, size: int, colour: str = INK, weight: int = 400) -> str:
    """Words at a place."""
    return f'<text x="{left}" y="{top}" font-size="{size}" fill="{colour}" font-weight="{weight}">{words}</text>'


def path(points: Sequence[tuple[float, float]]) -> str:
    """Points of a line."""
    return " ".join(f"{left:.1f},{top:.1f}" for left, top in points if math.isfinite(top))


if __name__ == "__main__":
    main()
