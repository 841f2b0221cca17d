"""A posterior over adapters of a base of a hundred million weights: bytes that are written, and peak memory.

    python benchmarks/adapters.py                  # a minute or two on one core; --width 64 to see it run

A decoder with random weights gets LoRA of rank 8 in its attention; each step's peak is what the process grew by over
what it had before, in bytes of the base. The figures of the last run are in adapters.csv.
"""

import argparse
import csv
import tempfile
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader

import caveat


def model(width: int, layers: int) -> torch.nn.Module:
    """A decoder with adapters; the same every time."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=8192, hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, max_position_embeddings=64, pad_token_id=0,
    )  # fmt: skip
    settings = peft.LoraConfig(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
    return peft.get_peft_model(transformers.LlamaForCausalLM(config), settings)


def resident() -> int:
    """Bytes of memory that this process has now."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def grown(step: Callable[[], Any]) -> tuple[Any, int, float]:
    """What a step gives, the most by which the process grew in it, and the seconds it computed."""
    before, most, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal most
        while not done.wait(0.005):
            most = max(most, resident() - before)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.process_time()
    try:
        result = step()
    finally:
        done.set()
        watcher.join()
    return result, most, time.process_time() - begin


def warm_up() -> None:
    """Import what first fits import, so that it does not count."""
    x = torch.zeros(8, 2)
    x[::2] = 1
    task = caveat.Task(torch.nn.Linear(2, 2), (x, torch.arange(8) % 2), caveat.Categorical())
    point = caveat.MAP(training=caveat.Training(epochs=60, learning_rate=0.1))
    for method in (caveat.Laplace(), caveat.SampledLaplace(samples=2)):
        posterior = caveat.fit(task, method, start=point, progress=False)
        with tempfile.TemporaryDirectory() as place:
            posterior.save(Path(place) / "it")


class Figures:
    """What was measured, printed as it comes and written to a csv file at the end."""

    def __init__(self) -> None:
        self.lines: list[tuple[str, str, float]] = []

    def add(self, step: str, **measured: float) -> None:
        """Figures of one step, each with its unit at the end of its name."""
        self.lines += [(step, name, value) for name, value in measured.items()]
        print(f"{step}: " + ", ".join(f"{name} {value:.5g}" for name, value in measured.items()), flush=True)

    def write(self, path: Path) -> None:
        """All of them."""
        with path.open("w", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow(("step", "figure", "value"))
            writer.writerows((step, name, f"{value:.6g}") for step, name, value in self.lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of peft
    warm_up()
    figures = Figures()
    module = model(given.width, given.layers)
    base = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    own = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    figures.add("model", base_mb=base / 1e6, base_weights=base // 4, adapters_mb=own / 1e6)
    tokens = torch.randint(1, 8192, (24, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
    task, peak, _ = grown(lambda: caveat.Task(module, DataLoader(rows, 8), caveat.Categorical(classes=(5, 9))))
    figures.add("task", grew_share=peak / base)
    for turn in ("first", "second"):
        _, peak, _ = grown(lambda: bare_step(module, tokens))
        figures.add(f"bare training step, the {turn}", grew_share=peak / base)
    training = caveat.Training(epochs=3, learning_rate=3e-3)
    point, peak, seconds = grown(lambda: caveat.fit(task, caveat.MAP(training=training), progress=False))
    shared = zip(module.named_parameters(), point.network.module.named_parameters(), strict=True)
    pairs = [(p, q) for (_, p), (_, q) in shared if not p.requires_grad]
    same = sum(p.data_ptr() == q.data_ptr() for p, q in pairs)
    figures.add("MAP", seconds=seconds, grew_share=peak / base, frozen_tensors=len(pairs), frozen_shared=same)
    fresh = model(given.width, given.layers)
    methods = {
        "Laplace": caveat.Laplace(precision=1.0),
        "Laplace, whole factors": caveat.Laplace(precision=1.0, factors="whole"),
        "SampledLaplace": caveat.SampledLaplace(samples=4, at_once=4, precision=1.0),
    }
    for name, method in methods.items():
        figures.add(name, **measured(method, task, point, fresh, base))
    figures.write(given.csv)


def bare_step(module: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Gradients of the adapters for one batch, without anything of ours: what torch itself allocates."""
    logits = module(input_ids=tokens[:8]).logits[:, -1]
    torch.nn.functional.cross_entropy(logits, tokens[:8, 0]).backward()
    module.zero_grad(set_to_none=True)


def measured(
    method: Any, task: caveat.Task, start: caveat.Posterior, fresh: torch.nn.Module, base: int
) -> dict[str, float]:
    """What a method's fit, its file and loading that take."""
    posterior, peak, seconds = grown(lambda: caveat.fit(task, method, start=start, progress=False))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "posterior"
        _, wrote, save_seconds = grown(lambda: posterior.save(folder, base="without"))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        _, loaded, load_seconds = grown(lambda: caveat.load(folder, fresh))
    return {
        "fit_seconds": seconds, "fit_grew_share": peak / base, "written_mb": size / 1e6,
        "save_seconds": save_seconds, "save_grew_share": wrote / base,
        "load_seconds": load_seconds, "load_grew_share": loaded / base,
    }  # fmt: skip


if __name__ == "__main__":
    main()
