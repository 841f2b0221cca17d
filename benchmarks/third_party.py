"""Networks of other packages in every setting: whether each fits, predicts, is saved, and loads bit-equal.

    python benchmarks/third_party.py                                       # all, about an hour on one core
    python benchmarks/third_party.py --network "*LoRA*" --setting laplace
    python benchmarks/third_party.py --again refused --again fault         # cells that ended so once more
    python benchmarks/third_party.py --core                                # thirteen settings of all
    python benchmarks/third_party.py --tables                              # of the rows that are there
    python benchmarks/third_party.py --page docs/networks.md               # written into the page
    python benchmarks/third_party.py --packages FOLDER                     # where more packages are installed

Every cell is a process of its own within a limit of processor time. The rows are in a csv file, to which an interrupted
run adds; the tables (the grid, and what was said where a cell did not end well) are printed at the end. Networks are
tiny, with random weights; nothing is downloaded. A package that is missing leaves its networks out, which is said.

    pip install transformers peft torch_geometric lightning
    pip install --target FOLDER --no-deps timm open_clip_torch torchvision segmentation_models_pytorch ftfy wcwidth
    pip install --target FOLDER --no-deps monai pytorch-tabnet rtdl_revisiting_models delu
    pip install --target FOLDER --no-deps x-transformers torch-einops-utils einops einx loguru frozendict

The second line is for what asks for torchvision, which belongs to one build of torch each: what it lacks of another
build's is declared before it is imported, so that torch stays as it is.
"""

import argparse
import importlib
import re
import sys
import warnings
from fnmatch import fnmatchcase
from pathlib import Path

import torch

import caveat

sys.path.append(str(Path(__file__).resolve().parent))
from third_party_parts.cases import CASES, define_operators_of_torchvision
from third_party_parts.cell import run_cell
from third_party_parts.settings import CORE, settings
from third_party_parts.tables import Rows, grid, page, refusals, summary


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--network", action="append", help="only networks of this pattern; may be repeated")
    parser.add_argument("--setting", action="append", help="only settings of this pattern; may be repeated")
    parser.add_argument(
        "--again", action="append", default=[], help="run cells that ended so again: refused, fault, ..."
    )
    parser.add_argument("--core", action="store_true", help="the settings of the page's grid")
    parser.add_argument("--tables", action="store_true", help="print the tables of the rows that are there")
    parser.add_argument(
        "--page", type=Path, help="a page whose part `networks` is written from the rows that are there"
    )
    parser.add_argument("--packages", help="a folder with more packages")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of the processor for a cell")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("third_party.csv"))
    parser.add_argument("--points", type=Path, default=Path("runs/third_party"), help="where trained points are kept")
    arguments = parser.parse_args()
    rows = Rows(arguments.csv)
    if arguments.page:
        arguments.page.write_text(filled(arguments.page.read_text(encoding="utf-8"), rows), encoding="utf-8")
        return
    if not arguments.tables:
        warnings.simplefilter("ignore")  # of the packages, while they are imported
        if arguments.packages:
            sys.path.append(arguments.packages)
            define_operators_of_torchvision()
        run(rows, arguments)
    print(f"\n{summary(rows.all())}\n\n{refusals(rows.all())}\n\n{grid(rows.all())}")


def run(rows: Rows, arguments: argparse.Namespace) -> None:
    """Every cell that has no row yet."""
    from third_party_parts import language, others, vision  # noqa: F401  which register their networks

    rows.drop(set(arguments.again))
    warm_up()
    for network, entry in CASES.items():
        if not chosen(network, arguments.network):
            continue
        if (reason := entry.missing()) is not None:
            print(f"{network}: left out, {reason}")
            continue
        for setting in CORE if arguments.core else settings():
            if (network, setting) in rows or not chosen(setting, arguments.setting):
                continue
            row = run_cell(network, setting, arguments.points, arguments.limit)
            rows.keep(row)
            print(f"{network}, {setting}: {row['outcome']} {row['seconds']} s {row['said'][:160]}", flush=True)


def filled(text: str, rows: Rows) -> str:
    """A page with the tables of the rows between `<!-- networks -->` and `<!-- end -->`."""
    part = f"<!-- networks -->\n{page(rows.all())}\n<!-- end -->"
    return re.sub(r"<!-- networks -->\n.*?<!-- end -->", lambda _: part, text, flags=re.DOTALL)


def warm_up() -> None:
    """Import what a first fit imports here, and not in every cell."""
    importlib.import_module("torch._dynamo")
    x = torch.zeros(4, 2)
    task = caveat.Task(torch.nn.Linear(2, 2), (x, torch.arange(4) % 2), caveat.Categorical())
    caveat.fit(task, caveat.MAP(training=caveat.Training(epochs=1)), progress=False).predict(x)


def chosen(name: str, patterns: list[str] | None) -> bool:
    return not patterns or any(fnmatchcase(name, pattern) for pattern in patterns)


if __name__ == "__main__":
    main()
