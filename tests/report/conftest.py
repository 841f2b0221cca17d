"""Results folders made by hand: predictions from a seeded generator, metrics by numpy from those predictions."""

import json
import math
import re
import shutil
import subprocess

import numpy as np
import pytest

from caveat.storage import write_json

VERSIONS = {"caveat": "0.1.0", "torch": "2.13.0", "numpy": "2.4", "python": "3.11.7"}


def score(values):
    return {"mean": float(np.mean(values)), "stderr": float(np.std(values, ddof=1) / math.sqrt(len(values)))}


def bare(value):
    return {"mean": float(value), "stderr": None}


def write_run(folder, label, method, kind, class_names, sets, info=None):
    """`sets` holds (name, family, severity, role, arrays, metrics)."""
    (folder / "predictions").mkdir(parents=True)
    data = []
    for name, family, severity, role, arrays, metrics in sets:
        file = f"predictions/{name.replace(' ', '-')}.npz"
        np.savez(folder / file, **arrays)
        entry = {"name": name, "family": family, "severity": severity, "role": role, "rows": len(arrays["rows"])}
        data.append({**entry, "file": file, "metrics": metrics})
    facts = {"seconds": 3.0, "stored_bytes": 40_000, "gradient_evaluations": 600, "peak_bytes": 4e8, "flops": 1e11}
    notes = {"coverage": [], "diagnostics": {}, "warnings": [], "seed": 0, "versions": VERSIONS}
    content = {
        "format": 1,
        "label": label,
        "method": {"name": method, "fields": {"training": {"epochs": 60}}},
        "kind": kind,
        "class_names": class_names,
        "info": {**facts, **notes, **(info or {})},
        "data": data,
    }
    write_json(folder / "metrics.json", content)


def classify(rng, targets, classes, sharpness, noise, rows=None):
    """Arrays and metrics of a classifier whose logits favour the target by `sharpness` amid `noise`."""
    logits = sharpness * np.eye(classes)[targets] + noise * rng.normal(size=(len(targets), classes))
    probs = np.exp(logits - logits.max(axis=1, keepdims=True))
    probs = (probs / probs.sum(axis=1, keepdims=True)).astype(np.float32)
    entropy = -(probs * np.log(probs.clip(1e-30))).sum(axis=1)
    log_prob = np.log(probs[np.arange(len(targets)), targets].clip(1e-30))
    arrays = {
        "rows": np.arange(len(targets)) if rows is None else rows,
        "targets": targets,
        "probs": probs,
        "entropy": entropy,
        "aleatoric": entropy * 0.7,
        "epistemic": entropy * 0.3,
        "log_prob": log_prob,
    }
    metrics = {
        "accuracy": score(probs.argmax(axis=1) == targets),
        "nll": score(-log_prob),
        "brier": score(((probs - np.eye(classes)[targets]) ** 2).sum(axis=1)),
        "ece": bare(abs(probs.max(axis=1).mean() - (probs.argmax(axis=1) == targets).mean())),
    }
    return arrays, metrics


def with_thumbnails(rng, arrays, count=8, colour=False):
    size = (count, 8, 8, 3) if colour else (count, 8, 8)
    images = rng.integers(0, 256, size, dtype=np.uint8)
    return {**arrays, "thumbnails": images, "thumbnail_rows": np.arange(count)}


def auroc(inside, ood):
    """By counting pairs."""
    return float((ood[:, None] > inside).mean() + 0.5 * (ood[:, None] == inside).mean())


def classification_run(folder, label, method, sharpness, seed, info=None):
    classes = 4
    rng = np.random.default_rng(seed)
    targets = np.random.default_rng(0).integers(0, classes, 120)
    clean, metrics = classify(rng, targets, classes, sharpness, 1.0)
    sets = [("clean", "clean", None, "test", with_thumbnails(np.random.default_rng(1), clean), metrics)]
    for severity in (15.0, 30.0, 60.0):
        arrays, metrics = classify(rng, targets, classes, sharpness * (1 - severity / 90), 1.0)
        sets.append((f"rotated {severity:g}", "rotated", severity, "test", arrays, metrics))
    ood, _ = classify(rng, rng.integers(0, classes, 80), classes, 0.2 * sharpness, 0.5)
    ood = {key: ood[key] for key in ood if key not in ("targets", "log_prob")}
    metrics = {"auroc_entropy": bare(auroc(clean["entropy"], ood["entropy"]))}
    ood = with_thumbnails(np.random.default_rng(2), ood, colour=True)
    sets.append(("photographs", "photographs", None, "ood", ood, metrics))
    write_run(folder, label, method, "classification", ["cat", "dog", "owl", "fox"], sets, info)


@pytest.fixture
def classification(tmp_path):
    """Three runs over four classes: clean, three rotations, photographs; thumbnails of clean and photographs."""
    folder = tmp_path / "results"
    classification_run(folder / "map", "MAP", "map", 3.0, seed=1)
    warned = {"warnings": ["one member did not converge"], "seconds": 15.0, "stored_bytes": 200_000}
    layers = {"coverage": [{"layer": "0", "kind": "Linear", "parameters": 2112, "treatment": "Bayesian", "why": ""}]}
    classification_run(folder / "deep_ensemble", "Deep ensemble", "deep_ensemble", 6.0, 2, {**warned, **layers})
    classification_run(folder / "swag", "SWAG", "swag", 3.0, seed=3)
    return folder


@pytest.fixture
def binary(tmp_path):
    """One run of a single-logit network: two classes, clean data only, no baseline."""
    rng = np.random.default_rng(0)
    arrays, metrics = classify(rng, rng.integers(0, 2, 60), 2, 2.0, 1.0)
    write_run(
        tmp_path / "binary" / "laplace",
        "Laplace",
        "laplace",
        "classification",
        ["no", "yes"],
        [("clean", "clean", None, "test", arrays, metrics)],
    )
    return tmp_path / "binary"


def regress(rng, spread, outputs, shift=0.0):
    """Gaussian predictions with standard deviation `spread` of targets whose true noise is 1."""
    mean = rng.normal(size=(90, outputs)) * 3
    targets = mean + shift + rng.normal(size=mean.shape)
    z = (targets - mean) / spread
    density = -0.5 * z**2 - math.log(spread * math.sqrt(2 * math.pi))
    pit = 0.5 * (1 + np.vectorize(math.erf)(z / math.sqrt(2)))
    arrays = {
        "rows": np.arange(90),
        "targets": targets,
        "mean": mean,
        "variance": np.full_like(mean, spread**2),
        "aleatoric": np.full_like(mean, spread**2 / 2),
        "epistemic": np.full_like(mean, spread**2 / 2),
        "log_prob": density.sum(axis=1),
        "pit": pit,
        "lower_90": mean - 1.6449 * spread,
        "upper_90": mean + 1.6449 * spread,
    }
    error = ((targets - mean) ** 2).mean(axis=1)
    metrics = {
        "rmse": bare(math.sqrt(error.mean())),
        "nll": score(-density.sum(axis=1)),
        "crps": bare(0.5),
        "coverage_90": score((np.abs(z) <= 1.6449).mean(axis=1)),
        "calibration_error": bare(0.02),
    }
    return arrays, metrics


@pytest.fixture
def regression(tmp_path):
    """Two runs with two outputs: clean, two severities, out-of-distribution data. MAP is too sure, the other not."""
    folder = tmp_path / "regression"
    for label, method, spread in (("MAP", "map", 0.4), ("Laplace", "laplace", 1.0)):
        rng = np.random.default_rng(7)
        sets = []
        for name, severity in (("clean", None), ("drift 1", 1.0), ("drift 2", 2.0)):
            arrays, metrics = regress(rng, spread, 2, shift=severity or 0.0)
            sets.append((name, name.split()[0], severity, "test", arrays, metrics))
        arrays, _ = regress(rng, spread, 2)
        arrays["variance"] = arrays["variance"] * np.linspace(1, 3, 90)[:, None]
        arrays = {key: arrays[key] for key in ("rows", "mean", "variance", "aleatoric", "epistemic")}
        inside, ood = (one["variance"].sum(axis=1) for one in (sets[0][4], arrays))
        metrics = {"auroc_variance": bare(auroc(inside, ood))}
        sets.append(("elsewhere", "elsewhere", None, "ood", arrays, metrics))
        write_run(folder / method, label, method, "regression", [], sets)
    return folder


def edit(folder, change):
    """Rewrites the metrics.json of a run through `change`."""
    path = folder / "metrics.json"
    content = json.loads(path.read_text())
    del content["checksum"]
    change(content)
    write_json(path, content)


@pytest.fixture
def change_metrics():
    return edit


@pytest.fixture
def rendered(tmp_path):
    """The text of a page after its scripts ran in headless Chromium: every plot drawn, nothing gone wrong."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("no Chromium on PATH")
    switches = (
        "--headless --no-sandbox --disable-gpu --no-first-run --disable-background-networking "
        "--disable-component-update --disable-sync --virtual-time-budget=30000 --window-size=1200,900 --dump-dom"
    )

    def run(path, fragment=""):
        command = [chromium, *switches.split(), f"--user-data-dir={tmp_path / 'profile'}", path.as_uri() + fragment]
        text = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
        root = text[: text.index("<head>")]
        assert "data-errors" not in root, root
        assert 'data-ready="true"' in root
        canvases = re.split(r'<div class="canvas', text)[1:]
        assert canvases
        assert all("<svg" in canvas and "<path" in canvas for canvas in canvases)
        return text

    return run
