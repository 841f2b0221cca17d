"""Random command lines: verbs, options and values put together by chance, with paths to whole and to broken things."""

import random
from pathlib import Path

import numpy as np

METHODS = ["map", "swag", "deep_ensemble", "mc_dropout"]  # with few epochs each takes no time
COMMON = {"--seed": "number", "--device": "device", "--quiet": "", "--json": "", "--help": ""}
VERBS: dict[str, dict[str, str]] = {
    "fit": {
        "--out": "new", "--data": "place", "--target": "word", "--model": "model", "--likelihood": "likelihood",
        "--prior-precision": "number", "--parameters": "word", "--validation": "number", "--start": "place",
        "--training.epochs": "few", "--training.batch-size": "number", "--members": "few", "--rank": "number",
    },
    "predict": {"--posterior": "place", "--out": "new", "--data": "place", "--model": "model", "--draws": "few"},
    "evaluate": {
        "--posteriors": "place", "--out": "new", "--data": "place", "--rotate": "number", "--shift": "word",
        "--ood": "word", "--draws": "few",
    },
    "report": {"--results": "place", "--out": "new", "--title": "word"},
    "diagnose": {"--posterior": "place", "--out": "new", "--data": "place", "--rows": "number", "--surface": "few"},
    "bench": {"--out": "new", "--jobs": "number", "--cells": "word", "--dry-run": "", "--parquet": ""},
    "methods": {},
    "reference": {"--out": "new"},
    "nothing": {"--out": "new"},
}  # fmt: skip
NEEDED = {"fit": ("--out", "--data"), "predict": ("--posterior",), "evaluate": ("--posteriors",)}
NEEDED |= {"report": ("--results",), "diagnose": ("--posterior",)}
VALUES = {
    "number": ["0", "1", "-1", "2.5", "1e309", "nan", "0.1", "9" * 400],
    "few": ["1", "2", "3", "0", "-4", "x"],
    "device": ["cpu", "cpu", "cpu", "cuda:9", "abacus"],
    "likelihood": ["auto", "categorical", "gaussian", "poisson", "bernoulli", "strange"],
    "word": ["y", "a", "*", "digits", "noise", "fog", "corruptions", "*/map/0", "\x1b[31m", "ä\u202e", " "],
    "model": ["mlp", "lenet5", "resnet18", "no.py:make", "mlp:x", ":"],
}
ODD = ["", " ", "None", "../..", "[1,2]", "{}", "-x", "--unknown", "\x00", "9" * 40]


def made_places(folder: Path, posterior: Path) -> list[str]:
    """Files and folders, whole and broken, that command lines may name."""
    (folder / "empty").mkdir()
    (folder / "empty.csv").write_text("")
    (folder / "short.csv").write_text("a,b,y\n1,2,u\n3,4,v\n")
    (folder / "table.csv").write_text("a,b,y\n" + "".join(f"{i % 7},{i % 5},{'uv'[i % 2]}\n" for i in range(40)))
    (folder / "binary.csv").write_bytes(bytes(range(256)))
    (folder / "broken.npz").write_bytes(b"PK\x03\x04 not a zip")
    np.savez(folder / "other.npz", z=np.zeros(3))
    (folder / "bad.toml").write_text("data = [")
    (folder / "odd.toml").write_text('data = ["digits"]\nmodels = 3\n')
    (folder / "few.toml").write_text('data = ["table.csv"]\nmodels = ["mlp"]\n[map]\nepochs = 1\n')
    (folder / "net.py").write_text("def make():\n    return 3\n")
    (folder / "fails.py").write_text("raise RuntimeError('no')\n")
    (folder / "cut").mkdir()
    for file in posterior.iterdir():
        (folder / "cut" / file.name).write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    names = [path.name for path in folder.iterdir()] + ["net.py:make", "fails.py:make", "net.py:none"]
    return [*(str(folder / name) for name in names), str(posterior)]


def random_command(chance: random.Random, places: list[str], number: int) -> list[str]:
    """One command line: a verb with what it needs and a few options, of values that are mostly of the right kind."""
    verb = chance.choice(list(VERBS))
    words = [verb]
    if verb == "fit":
        words += [chance.choice(METHODS), "--training.epochs", "3"]
    if verb == "bench":
        words.append(chance.choice([place for place in places if place.endswith(".toml")] + places[:2]))
    if verb == "reference":
        words.append(chance.choice(["list", "list", "build", "other"]))

    def value(kind: str) -> list[str]:
        if not kind:
            return []
        if chance.random() < 0.1:
            return [chance.choice(ODD)] * chance.randrange(3)
        if kind == "new":
            return [chance.choice([f"new-{number}", f"new-{number}.csv", *places])]
        if kind == "place":
            return [chance.choice(places)]
        extra = [place for place in places if ".py:" in place] if kind == "model" else []
        return [chance.choice([*VALUES[kind], *extra])]

    options = VERBS[verb] | COMMON
    named = [option for option in NEEDED.get(verb, ()) if chance.random() < 0.95]
    more = [option for option in options if option not in named]
    named += chance.sample(more, min(len(more), chance.choice([0, 1, 1, 2, 3])))
    for option in named:
        words += [option, *value(options[option])]
    return words
