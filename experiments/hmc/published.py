"""The test images that published HMC predictions are about, and how near an ensemble comes by its members.

    caveat reference fetch cifar10_resnet20_frn      # or, of the first rows alone (`probs` in an npz):
    python experiments/hmc/published.py --import probs.npz
    python experiments/hmc/published.py --posterior results/resnet20_fidelity/cells/CELL/posterior --device cuda

`resnet20_fidelity.toml` names `first_test_images`. The reference is called cifar10_resnet20_frn, and lies in
CAVEAT_REFERENCES, else in the user's cache. The last line adds a row for each number of members to members.csv.
"""

import argparse
import csv
from dataclasses import replace
from pathlib import Path

from torch.utils.data import TensorDataset

import caveat
from caveat import data
from caveat.data import DataSet
from caveat.references import Origin, import_reference, load_reference

REFERENCE = "cifar10_resnet20_frn"
ORIGIN = Origin("cifar10", "resnet20_frn", 5.0, source="full-batch HMC of Izmailov et al. (2021), no augmentation")
MEMBERS = (1, 2, 5, 10, 20, 50)
COLUMNS = ("method", "members", "agreement", "total_variation", "command", "commit")


def first_test_images(data_dir: Path | None, seed: int) -> DataSet:
    """CIFAR-10, of its test images those that the stored reference has predictions for."""
    whole = data.load("cifar10", data_dir)
    count = len(load_reference(REFERENCE).parts["clean"]["inputs"])
    return replace(whole, test=TensorDataset(*(tensor[:count] for tensor in whole.test.tensors)))


def main() -> None:
    """Import the predictions, or compare a stored ensemble by its members."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--import", dest="predictions", type=Path, help="store these predictions as the reference")
    parser.add_argument("--posterior", type=Path, help="an ensemble that `pieces.py` or `caveat bench` fitted")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("members.csv"))
    given = parser.parse_args()
    if given.predictions:
        place = import_reference(given.predictions, ORIGIN, name=REFERENCE, first=0, data_dir=given.data_dir)
        print(place, load_reference(REFERENCE).summary())
    if given.posterior:
        compare(given)


def compare(given: argparse.Namespace) -> None:
    """Agreement and total variation of the first so many members."""
    from pieces import commit

    rows = first_test_images(given.data_dir, 0)
    posterior = caveat.load(given.posterior, caveat.models.resnet20_frn(), device=given.device)
    whole = posterior.method.default_draws
    with given.csv.open("a", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if not file.tell():
            writer.writeheader()
        for members in (m for m in MEMBERS if m <= whole):
            near = caveat.fidelity(posterior, load_reference(REFERENCE), rows.test, draws=members)
            line = {name: f"{near[name].mean:.5f}" for name in ("agreement", "total_variation")}
            line |= {"method": "ensemble", "members": str(members), "commit": commit()}
            writer.writerow(line | {"command": f"published.py --posterior {given.posterior.parent.name}"})
            print(members, line["agreement"], line["total_variation"], flush=True)


if __name__ == "__main__":
    import sys

    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # pieces.py
    main()
