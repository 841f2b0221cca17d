"""Posterior folders that were changed, and whose checksums were mended: what an attentive vandal would leave."""

import contextlib
import copy
import hashlib
import io
import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import caveat
from caveat.cli import main as command_line
from caveat.storage import write_json, write_state
from tests.test_contract import METHODS, short

Groups = dict[str, dict[str, Tensor]]
Outcome = tuple[str, str]  # what happened, and to what


def module() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 2))


def on_frozen_layers() -> nn.Module:
    """The same module with its first layer frozen, as the base of an adapter is."""
    network = module()
    network[0].requires_grad_(False)
    return network


def inputs() -> Tensor:
    return torch.randn(40, 4, generator=torch.Generator().manual_seed(0))


def save_one(name: str, likelihood: str, folder: Path) -> Path:
    """A posterior of a method on a small network with BatchNorm, saved."""
    x = inputs()
    y = x[:, :2] * 2 + 1 if likelihood == "Gaussian" else (x[:, 0] > 0).long()
    network_task = caveat.Task(
        module(), DataLoader(TensorDataset(x, y), 20), getattr(caveat, likelihood)(), validation=0.2
    )
    start = caveat.MAP(temperature=likelihood != "Gaussian", training=caveat.Training(epochs=30))
    needs_start = METHODS[name].starts_from == "trained"
    posterior = caveat.fit(network_task, short(METHODS[name]), start=start if needs_start else None, progress=False)
    return posterior.save(folder / f"{name}-{likelihood}")


def save_calibrated(likelihood: str, folder: Path) -> Path:
    """A calibrated posterior over a frozen base that is not in its folder, whose state is that of several members."""
    x = inputs()
    y = x[:, :2] * 2 + 1 if likelihood == "Gaussian" else (x[:, 0] > 0).long()
    network_task = caveat.Task(on_frozen_layers(), (x, y), getattr(caveat, likelihood)(), validation=0.2)
    members = caveat.Ensemble(of=short(METHODS["laplace"]), members=2, training=caveat.Training(epochs=5))
    posterior = caveat.fit(network_task, members, progress=False).calibrate((x, y))
    return posterior.save(folder / f"calibrated-{likelihood}", base="without")


def answer(folder: Path) -> Tensor:
    """What a saved posterior predicts for a few rows: every draw, and where it is calibrated its intervals or sets."""
    with torch.no_grad():
        posterior = caveat.load(folder, module())
        prediction = posterior.predict(inputs()[:5], seed=3)
    parts = [prediction.samples]
    if posterior.calibration is not None:
        parts += prediction.interval(0.8) if prediction.kind == "regression" else [prediction.label_set(0.8)]
    return torch.cat([part.double().flatten() for part in parts])


def read_groups(folder: Path) -> Groups:
    with safe_open(folder / "state.safetensors", framework="pt") as file:
        names = json.loads(file.metadata()["groups"])
        return {group: {name: file.get_tensor(f"{group}/{name}") for name in names[group]} for group in names}


def write_groups(folder: Path, groups: Groups) -> None:
    """Write tensors, and mend the digest and the checksum."""
    content = json.loads((folder / "posterior.json").read_text())
    content["digest"] = write_state(folder / "state.safetensors", groups)
    del content["checksum"]
    write_json(folder / "posterior.json", content)


def _reshaped(tensor: Tensor, chance: random.Random) -> Tensor:
    forms: list[Callable[[Tensor], Tensor]] = [
        lambda t: t.unsqueeze(0),
        lambda t: t.flatten() if t.ndim != 1 else t.unsqueeze(1),
        lambda t: t[:-1] if t.ndim and len(t) else t.repeat(2),
        lambda t: torch.cat([t, t]) if t.ndim else t.expand(3).clone(),
        lambda t: t.mT.contiguous() if t.ndim == 2 and t.shape[0] != t.shape[1] else t.unsqueeze(-1),
    ]
    return chance.choice(forms)(tensor)


def _of_other_type(tensor: Tensor, chance: random.Random) -> Tensor:
    kinds = [torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.bool, torch.float64, torch.float32]
    return tensor.to(chance.choice([kind for kind in kinds if kind != tensor.dtype]))


def _not_a_number(tensor: Tensor, chance: random.Random, *, any_whole: bool) -> Tensor:
    """A NaN or an infinity among numbers; among whole ones what is out of range, which of seeds is below zero alone."""
    tensor = tensor.clone()
    if tensor.numel() and tensor.is_floating_point():
        tensor.view(-1)[chance.randrange(tensor.numel())] = chance.choice([float("nan"), float("inf")])
    elif tensor.numel() and tensor.dtype != torch.bool:
        tensor.view(-1)[chance.randrange(tensor.numel())] = -1 if any_whole else chance.choice([-1, 2**30])
    return tensor


def change_state(folder: Path, chance: random.Random) -> str:
    """One change of one tensor or group; returns what it was."""
    groups = read_groups(folder)
    group = chance.choice([group for group in groups if groups[group]])
    name = chance.choice(list(groups[group]))
    kind = chance.choice(["drop", "rename", "reshape", "nan", "type", "swap", "add", "drop group", "rename group"])
    tensors = groups[group]
    if kind == "drop":
        del tensors[name]
    elif kind == "rename":
        groups[group] = {f"{key}x" if key == name else key: value for key, value in tensors.items()}
    elif kind == "reshape":
        tensors[name] = _reshaped(tensors[name], chance)
    elif kind == "nan":
        tensors[name] = _not_a_number(tensors[name], chance, any_whole=group == "state.seeds")
    elif kind == "type":
        tensors[name] = _of_other_type(tensors[name], chance)
    elif kind == "swap":
        other = chance.choice(list(tensors))
        kind += f" with {other}"
        if tensors[name].shape != tensors[other].shape:  # of one shape, nobody could tell
            tensors[name], tensors[other] = tensors[other], tensors[name]
    elif kind == "add":
        tensors["added"] = torch.zeros(3)
    elif kind == "drop group":
        del groups[group]
    else:
        groups = {f"{key}x" if key == group else key: value for key, value in groups.items()}
    write_groups(folder, groups)
    return f"{kind} {group}/{name}"


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside json."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in entries:
        yield (*path, key)
        yield from _places(item, (*path, key))


def nested(depth: int) -> Any:
    value: Any = []
    for _ in range(depth):
        value = [value]
    return value


def change_json(folder: Path, chance: random.Random, name: str = "posterior.json") -> str:
    """One change of a value that makes it of another type, missing, or huge; returns what it was."""
    content = json.loads((folder / name).read_text())
    del content["checksum"]
    where = chance.choice([place for place in _places(content) if place[-1] not in ("note", "diagnostics")])
    holder = content
    for key in where[:-1]:
        holder = holder[key]
    old = copy.deepcopy(holder[where[-1]])
    kind = chance.choice(["drop", "type", "type", "huge", "nested", "add", "rename"])
    if kind == "drop":
        del holder[where[-1]]
    elif kind == "rename" and isinstance(holder, dict):
        holder[f"{where[-1]}x"] = holder.pop(where[-1])
    elif kind in ("type", "rename"):
        others = ["text", {"a": 1}, [[], {}], {"tensor": "nowhere"}, {"type": "list", "fields": {}}]
        others += [] if isinstance(old, bool) or old is None else [True]
        holder[where[-1]] = chance.choice([other for other in others if type(other) is not type(old)])
    elif kind == "huge":
        holder[where[-1]] = chance.choice([10**30, -(10**40), "x" * 100_000, [0] * 10_000])
    elif kind == "nested":
        holder[where[-1]] = nested(chance.choice([50, 900]))
    else:
        holder = content if not isinstance(old, dict) else old
        inner = content
        for key in where:
            inner = inner[key]
        (inner if isinstance(inner, dict) else content)["added"] = 1
    text = json.dumps(content, sort_keys=True)
    checksum = hashlib.sha256(text.encode()).hexdigest()
    (folder / name).write_text(json.dumps(content | {"checksum": checksum}))
    return f"{kind} {'.'.join(map(str, where))}"


def table_command(folder: Path) -> tuple[list[str], Path]:
    """A command that predicts rows of a table by the posterior in a folder, and the file that it writes."""
    return ["predict", "--posterior", str(folder), "--data", str(folder.parent / "new.csv"), "--quiet", "--out"], (
        folder.parent / "predicted.csv"
    )


def save_table(folder: Path) -> Path:
    """A posterior of a table with text, blanks, dates and money, calibrated, as the command line writes it."""
    day = [f"2024-{1 + i % 12:02d}-{1 + i % 28:02d}" for i in range(200)]
    town = ["Ulm", "Bonn", "Köln", ""]
    rows = [f"{i % 9 or ''},{town[i % 4]},{day[i]},${i % 11}.50" for i in range(200)]
    (folder / "people.csv").write_text("\n".join(["age,town,since,paid", *rows]) + "\n")
    (folder / "new.csv").write_text("\n".join(["age,town,since", *(row.rpartition(",")[0] for row in rows[:9])]) + "\n")
    fitted, calibrated = str(folder / "fitted"), folder / "table"
    data = ["--data", str(folder / "people.csv")]
    assert command_line(["fit", "map", *data, "--out", fitted, "--training.epochs", "20", "--quiet"]) == 0
    assert command_line(["calibrate", "--posterior", fitted, "--out", str(calibrated), "--quiet"]) == 0
    return calibrated


def try_table(saved: Path, place: Path, seed: int) -> Outcome:
    """Change a copy of a table's posterior by a seed, and predict from it by the command line."""
    chance = random.Random(seed)
    folder = place / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    what = f"{saved.name} {seed}: "
    what += change_state(folder, chance) if chance.random() < 0.2 else change_json(folder, chance)
    (command, expected), out = table_command(saved), place / "changed.csv"
    command[2] = str(folder)
    out.unlink(missing_ok=True)
    said = io.StringIO()
    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
            code = command_line([*command, str(out)])
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}", what
    if code == 1 and said.getvalue().startswith("error: "):
        return "refused", what
    if code == 0 and out.read_text() == expected.read_text():
        return "same", what
    return f"exit {code}: {said.getvalue()[:200]}", what


def try_one(saved: Path, expected: Tensor, place: Path, seed: int) -> Outcome:
    """Change a copy of a folder by a seed, and read it: "refused", "same", or what went wrong."""
    chance = random.Random(seed)
    folder = place / "changed"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(saved, folder)
    what = f"{saved.name} {seed}: "
    what += change_state(folder, chance) if chance.random() < 0.6 else change_json(folder, chance)
    try:
        found = answer(folder)
    except caveat.CorruptFile:
        return "refused", what
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}", what
    if found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6):
        return "same", what
    return "another prediction", what
