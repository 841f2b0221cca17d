"""A posterior over adapters of a base of a hundred million weights: bytes that are written, and peak memory.

    python benchmarks/adapters.py                  # a minute or two on one core; --width 64 to see it run

A decoder with random weights gets LoRA of rank 8 in its attention; each step's peak is what the process grew by over
what it had before, in bytes of the base.
"""

import argparse
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6)
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of peft
    warm_up()
    module = model(given.width, given.layers)
    base = sum(p.nbytes for p in module.parameters() if not p.requires_grad)
    own = sum(p.nbytes for p in module.parameters() if p.requires_grad)
    print(f"base {base / 1e6:.1f} MB ({base // 4:,} weights), adapters {own / 1e6:.2f} MB")
    tokens = torch.randint(1, 8192, (24, 12), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": row, "labels": row[0] % 2} for row in tokens]
    task, peak, _ = grown(lambda: caveat.Task(module, DataLoader(rows, 8), caveat.Categorical(classes=(5, 9))))
    print(f"Task: grew by {peak / base:.3f} of the base")
    for turn in ("first", "second"):
        _, peak, _ = grown(lambda: bare_step(module, tokens))
        print(f"a bare training step, the {turn}: grew by {peak / base:.3f} of the base")
    training = caveat.Training(epochs=3, learning_rate=3e-3)
    point, peak, seconds = grown(lambda: caveat.fit(task, caveat.MAP(training=training), progress=False))
    print(f"MAP: {seconds:.0f} s, grew by {peak / base:.3f} of the base")
    shared = zip(module.named_parameters(), point.network.module.named_parameters(), strict=True)
    pairs = [(p, q) for (_, p), (_, q) in shared if not p.requires_grad]
    print(
        f"frozen tensors shared with the module: {sum(p.data_ptr() == q.data_ptr() for p, q in pairs)} of {len(pairs)}"
    )
    fresh = model(given.width, given.layers)
    for method in (caveat.Laplace(precision=1.0), caveat.SampledLaplace(samples=4, at_once=4, precision=1.0)):
        print(f"{type(method).__name__}: {measured(method, task, point, fresh, base)}", flush=True)


def bare_step(module: torch.nn.Module, tokens: torch.Tensor) -> None:
    """Gradients of the adapters for one batch, without anything of ours: what torch itself allocates."""
    logits = module(input_ids=tokens[:8]).logits[:, -1]
    torch.nn.functional.cross_entropy(logits, tokens[:8, 0]).backward()
    module.zero_grad(set_to_none=True)


def measured(method: Any, task: caveat.Task, start: caveat.Posterior, fresh: torch.nn.Module, base: int) -> str:
    """What a method's fit, its file and loading that take."""
    posterior, peak, seconds = grown(lambda: caveat.fit(task, method, start=start, progress=False))
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place) / "posterior"
        _, wrote, save_seconds = grown(lambda: posterior.save(folder, base="without"))
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        _, loaded, load_seconds = grown(lambda: caveat.load(folder, fresh))
    return (
        f"{seconds:.0f} s, grew by {peak / base:.3f} of the base; written {size / 1e6:.2f} MB in {save_seconds:.1f} s "
        f"(grew by {wrote / base:.3f}); loaded in {load_seconds:.1f} s (grew by {loaded / base:.3f})"
    )


if __name__ == "__main__":
    main()
