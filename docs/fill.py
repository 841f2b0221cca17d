"""Fills README.md, docs/demo.md, docs/which_method.md and docs/index.md with what was measured.

    python docs/fill.py              # write the generated parts again from docs/demo_results/
    python docs/fill.py --measure    # run the demo first (a minute or two)

A part stands between `<!-- demo: NAME -->` and `<!-- end -->`. A test fails where a page differs from what its part
would be now, and another runs the demo and compares it with docs/demo_results/.
"""

import csv
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from caveat.demo import NAMES, demo_rows, demo_verdicts, run_demo
from caveat.evaluate.metrics import METRICS

DOCS = Path(__file__).parent
RESULTS = DOCS / "demo_results"
PAGES = (DOCS.parent / "README.md", DOCS / "demo.md", DOCS / "which_method.md", DOCS / "index.md")
PART = re.compile(r"<!-- demo: (\w+) -->\n.*?<!-- end -->", re.DOTALL)
FIRST_SCREEN = ("map", "map_tempered", "subnetwork_laplace", "ssvi", "hmc")
LAPLACE = ("last_layer_laplace", "subnetwork_laplace", "sampled_laplace")


def read(name: str) -> list[dict[str, Any]]:
    """The rows of a csv file of the demo."""
    with (RESULTS / f"{name}.csv").open(encoding="utf-8", newline="") as lines:
        return list(csv.DictReader(lines))


def printed() -> str:
    """What the demo printed."""
    return f"```text\n{(RESULTS / 'printed.txt').read_text(encoding='utf-8').rstrip()}\n```"


def table() -> str:
    """The table of README's first screen."""
    lines = ["| | NLL clean | NLL rotated | joint NLL | fit | a prediction |", "|---|---|---|---|---|---|"]
    rows = demo_rows(read("summary"))
    for label in FIRST_SCREEN:
        _, clean, rotated, joint, _, seconds, latency = rows[label]
        trainings, row = seconds / rows["map"][5], METRICS["predict_seconds_per_row"].text(latency)
        price = "1 training" if trainings < 1.05 else f"{trainings:.1f} trainings"
        lines.append(f"| {NAMES[label]} | {clean:.2f} | {rotated:.2f} | {joint:.2f} | {price} | {row} |")
    return "\n".join(lines)


def temperature() -> str:
    """When a temperature is enough."""
    rows, verdicts = demo_rows(read("summary")), demo_verdicts(read("comparisons"))
    point, tempered = rows["map"], rows["map_tempered"]
    joint = sorted(rows[label][3] for label in FIRST_SCREEN if label not in ("map", "map_tempered"))
    beaten = [ahead(verdicts["", "nll"]), ahead(verdicts["rotation", "nll"])]
    return (
        "**A temperature is enough** where each image is decided alone. It costs next to nothing and takes the NLL "
        f"from {point[1]:.2f} to {tempered[1]:.2f}, of rotated images from {point[2]:.2f} to {tempered[2]:.2f}; of the "
        f"other methods {beaten[0]} better by more than chance on clean images, and {beaten[1]} on rotated ones. Of "
        f"several labels together it says little: joint NLL {tempered[3]:.2f}, where the posteriors above have "
        f"{joint[0]:.2f} to {joint[-1]:.2f}."
    )


def ahead(verdicts: dict[str, str]) -> str:
    """Who is better than the temperature, as a sentence says it."""
    names = [NAMES[label].partition(",")[0] for label in NAMES if verdicts.get(label) == "better"]
    if not names:
        return "none is"
    return f"only {names[0]} is" if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]} are"


def which() -> str:
    """What the demo says of the temperature, for docs/which_method.md."""
    rows, verdicts = demo_rows(read("summary")), demo_verdicts(read("comparisons"))
    lines = [
        "| against the temperature | NLL clean | NLL rotated | joint NLL | distance to HMC |",
        "|---|---|---|---|---|",
    ]
    for label, values in rows.items():
        if label in ("map", "map_tempered"):
            continue
        said = [verdicts[key][label] for key in (("", "nll"), ("rotation", "nll"), ("", "joint_nll"))]
        lines.append(f"| {NAMES[label]} | {' | '.join(said)} | {values[4]:.3f} |")
    point = f"{rows['map'][4]:.3f} for the MAP and {rows['map_tempered'][4]:.3f} with a temperature"
    return "\n".join(lines) + f"\n\nThe distance (total variation, of the probabilities) is {point}."


PARTS: dict[str, Callable[[], str]] = {"printed": printed, "table": table, "temperature": temperature, "which": which}


def filled(page: str) -> str:
    """A page with its generated parts as they would be now."""
    return PART.sub(lambda part: f"<!-- demo: {part[1]} -->\n{PARTS[part[1]]()}\n<!-- end -->", page)


def measure() -> None:
    """Run the demo and keep what pages are made from."""
    with tempfile.TemporaryDirectory() as scratch:
        text = run_demo(Path(scratch) / "demo", progress=False)
        RESULTS.mkdir(exist_ok=True)
        for name in ("summary.csv", "comparisons.csv"):
            shutil.copy(Path(scratch) / "demo" / name, RESULTS)
    (RESULTS / "printed.txt").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    if "--measure" in sys.argv:
        measure()
    for file in PAGES:
        file.write_text(filled(file.read_text(encoding="utf-8")), encoding="utf-8")
