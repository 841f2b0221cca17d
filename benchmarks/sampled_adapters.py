"""SampledLaplace over all adapter weights of a transformer, beside laplace-torch on the same adapter: seconds, memory.

    python benchmarks/sampled_adapters.py                       # a few minutes on one core
    python benchmarks/sampled_adapters.py --rows 200 --width 128
    python benchmarks/sampled_adapters.py --packages FOLDER     # where laplace-torch is installed

A BERT with random weights gets LoRA of rank 4 in its attention, trained on a made-up task: whether a text's first token
is of the upper half of the vocabulary. Every side is a process of its own, with the same
adapter, rows and prior precision; times are processor time, and the peak is what the process grew by over what it held
with model and rows. laplace-torch 0.3 takes every weight that requires a gradient, by Kronecker factors, with attention
in its plain form, since its passes cannot take the fused one; predictions are its linearised ones ("glm", "probit") and
took 7 GB for 64 units and 100 rows. A side that ends in an error has its first line. The figures of the last run are in
sampled_adapters.csv.
"""

import argparse
import csv
import json
import resource
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

import caveat
from caveat.engine.linear_model import ConjugateGradients

LENGTH, VOCABULARY, CLASSES, TEST_ROWS = 24, 40, 2, 100


class Texts(Dataset[dict[str, Tensor]]):
    """Random tokens with padding, and what they are about."""

    def __init__(self, rows: int, seed: int) -> None:
        rng = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(3, VOCABULARY, (rows, LENGTH), generator=rng)
        lengths = torch.randint(LENGTH // 2, LENGTH + 1, (rows, 1), generator=rng)
        self.mask = (torch.arange(LENGTH) < lengths).long()
        self.labels = (self.tokens[:, 0] > VOCABULARY / 2).long()

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.tokens[i], "attention_mask": self.mask[i], "labels": self.labels[i]}


def adapted(width: int, data: Texts, attention: str) -> nn.Module:
    """A transformer whose adapters and head are trained, and the head then frozen; the same every time."""
    import peft
    import transformers

    torch.manual_seed(0)
    config = transformers.BertConfig(
        hidden_size=width, num_hidden_layers=3, num_attention_heads=4, intermediate_size=2 * width,
        vocab_size=VOCABULARY, max_position_embeddings=LENGTH, num_labels=CLASSES, hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0, attn_implementation=attention,
    )  # fmt: skip
    settings = peft.LoraConfig(r=4, lora_alpha=16, target_modules=["query", "value"], task_type="SEQ_CLS")
    model = peft.get_peft_model(transformers.BertForSequenceClassification(config), settings)
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    for _ in range(25):
        for batch in DataLoader(data, batch_size=32, shuffle=True):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            optimizer.step()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("lora_" in name)
    return model.eval()


def peak() -> int:
    """The most bytes that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def ours(model: nn.Module, data: Texts, test: Texts, method: caveat.SampledLaplace) -> tuple[Callable[[], Any], ...]:
    """Fit, and predictions of a fit."""
    task = caveat.Task(model, DataLoader(data, batch_size=32), caveat.Categorical(), parameters="*lora_*")
    x = {"input_ids": test.tokens, "attention_mask": test.mask}
    return (lambda: caveat.fit(task, method, progress=False)), (lambda posterior: posterior.predict(x).probs)


class Logits(nn.Module):
    """What laplace-torch calls: a batch goes in, logits come out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> Tensor:
        """The logits of a batch."""
        logits: Tensor = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return logits


def theirs(model: nn.Module, data: Texts, test: Texts) -> tuple[Callable[[], Any], ...]:
    """The same of laplace-torch."""
    here = Path(__file__).resolve().parent
    sys.path[:] = [place for place in sys.path if Path(place).resolve() != here]  # it has a laplace.py of its own
    from laplace import Laplace

    def fit() -> Any:
        la = Laplace(
            Logits(model), "classification", subset_of_weights="all", hessian_structure="kron", prior_precision=10.0
        )
        la.fit(DataLoader(data, batch_size=32))
        return la

    batch = next(iter(DataLoader(test, batch_size=len(test))))
    return fit, (lambda la: la(batch, pred_type="glm", link_approx="probit"))


SIDES: dict[str, Callable[[nn.Module, Texts, Texts], tuple[Callable[..., Any], ...]]] = {
    "SampledLaplace(samples=64)": lambda *given: ours(*given, caveat.SampledLaplace(precision=10.0, g_prior=False)),
    "... by conjugate gradients": lambda *given: ours(
        *given, caveat.SampledLaplace(precision=10.0, g_prior=False, solver=ConjugateGradients())
    ),
    "laplace-torch, kron": theirs,
}


COLUMNS = ("side", "rows", "width", "weights", "fit_seconds", "prediction_seconds", "peak_mb", "nll", "error")
HEADS = ("posterior", "adapter weights", "fit, s", "100 predictions, s", "peak, MB", "NLL of 100 test rows")


def measure(side: str, rows: int, width: int) -> dict[str, Any]:
    """One side, as a line of the csv file."""
    data, test = Texts(rows, 1), Texts(TEST_ROWS, 2)
    model = adapted(width, data, "eager" if side.startswith("laplace-torch") else "sdpa")
    weights = sum(p.numel() for p in model.parameters() if p.requires_grad)
    line: dict[str, Any] = {"side": side, "rows": rows, "width": width, "weights": weights}
    fit, predict = SIDES[side](model, data, test)
    before, begin = peak(), time.process_time()
    try:
        posterior = fit()
        line["fit_seconds"], begin = round(time.process_time() - begin, 2), time.process_time()
        probs = predict(posterior)
    except Exception as error:
        return line | {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:90]}"}
    line["prediction_seconds"] = round(time.process_time() - begin, 2)
    line["peak_mb"] = round((peak() - before) / 1e6)
    return line | {"nll": round(float(-probs.log()[torch.arange(len(test)), test.labels].mean()), 4)}


def as_table(lines: list[dict[str, Any]]) -> str:
    """The lines of the csv file for a page."""
    rows = [f"| {' | '.join(HEADS)} |", "|---" * len(HEADS) + "|"]
    for line in lines:
        figures = [line[name] for name in ("fit_seconds", "prediction_seconds", "peak_mb", "nll")]
        said = [line["error"], "", "", ""] if line["error"] else [_written(figure) for figure in figures]
        rows.append("| " + " | ".join([line["side"], f"{int(line['weights']):,}", *said]) + " |")
    return "\n".join(rows)


def _written(figure: Any) -> str:
    number = float(figure)
    return f"{number:,.0f}" if number >= 100 else f"{number:.1f}" if number >= 0.5 else f"{number:.3f}"


def main() -> None:
    """All sides, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=200, help="of training")
    parser.add_argument("--width", type=int, default=64, help="of the transformer")
    parser.add_argument("--packages", help="a folder with laplace-torch and what it needs")
    parser.add_argument("--side", help="one side in this process")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_suffix(".csv"))
    arguments = parser.parse_args()
    sys.path += [arguments.packages] if arguments.packages else []
    if arguments.side:
        warnings.simplefilter("ignore")
        print(json.dumps(measure(arguments.side, arguments.rows, arguments.width)))
        return
    lines = []
    for side in SIDES:
        command = [sys.executable, __file__, "--rows", str(arguments.rows), "--width", str(arguments.width)]
        command += ["--packages", arguments.packages] if arguments.packages else []
        finished = subprocess.run([*command, "--side", side], capture_output=True, text=True, check=False)
        told = [line for line in finished.stdout.splitlines() if line.startswith("{")]
        line = json.loads(told[-1]) if told else {"side": side, "error": f"ended with code {finished.returncode}"}
        lines.append(dict.fromkeys(COLUMNS, "") | line)
        print(lines[-1], flush=True)
    with arguments.csv.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
    print(as_table(lines))


if __name__ == "__main__":
    main()
