"""Adapters of a small language model, all methods: which family of modules does a docstring belong to?

    python experiments/adapters/language.py                             # three seeds, half an hour or so on one core
    python experiments/adapters/language.py --method laplace --seed 0
    python experiments/adapters/language.py --minutes 9                 # in pieces: again until it says done
    python experiments/adapters/language.py --width 16 --steps 20 --rows 60 --epochs 1 --csv try.csv   # to see it run

A decoder with the blocks of Llama learns to guess the next word of the standard library's documentation. Adapters
(LoRA of rank 4 in every linear layer but the last) are then tuned to answer the question at the end of a docstring by
one of six tokens, and every method makes a posterior over them; the rest is frozen and shared. Lines are added to
language.csv, a run at a time: on test rows of known modules, with words left out, of other modules, and told apart from
paragraphs of the language reference. Runs that are there are not made again. The size of the base and of the
task, the epochs, the precision of the prior and the temperature of the cold IVON were chosen by the point and by
variational methods on the split of seed 3, and so was the rate of SWAG; the results leave that seed out.
"""

import argparse
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from adapter_scores import Table, apart, cost, predicted, scores
from docstrings import ANSWERS, PADDING, Text, read
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader

import caveat
from caveat import Training
from caveat.files import whole_file

DRAWS = 16  # of a prediction


def language_model(vocabulary: int, width: int) -> nn.Module:
    """A decoder of three blocks, without dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=3,
        num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=64, pad_token_id=PADDING,
        tie_word_embeddings=True,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def pretrained(text: Text, given: argparse.Namespace, seed: int) -> dict[str, Tensor]:
    """The weights after some steps of guessing the next word, kept in the folder."""
    steps = given.steps
    kept = given.folder / f"pretrained-{given.width}-{steps}-{seed}.safetensors"
    if kept.exists():
        return load_file(kept)
    torch.manual_seed(seed)
    model = language_model(text.vocabulary, given.width).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total_steps=steps)
    for _ in range(steps):
        first = torch.randint(len(text.unlabelled) - 33, (16,))
        rows = text.unlabelled[first[:, None] + torch.arange(33)]
        logits = model(input_ids=rows[:, :-1]).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    print(f"pretrained with seed {seed}: {float(loss.detach()):.2f} nats a word in the last batch", flush=True)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with whole_file(kept) as unfinished:
        save_file(state, unfinished)
    return state


def adapted(model: nn.Module, seed: int) -> nn.Module:
    """The model with adapters; all else is frozen. Dropout of adapters is for MC dropout, and for training."""
    import peft

    torch.manual_seed(seed)
    layers = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    settings = peft.LoraConfig(
        r=4, lora_alpha=16, lora_dropout=0.05, target_modules=layers, task_type="CAUSAL_LM"
    )  # fmt: skip
    return peft.get_peft_model(model, settings)


def methods(epochs: int) -> dict[str, Any]:
    """Every method by the name of its lines; those that start from a trained point are given the MAP's."""
    training = Training(epochs=epochs, learning_rate=3e-3)
    return {
        "map": caveat.MAP(training=training),
        "map, temperature": caveat.MAP(temperature=True, training=Training(epochs=0)),
        "ensemble of 4": caveat.Ensemble(members=4, training=training),
        "mc dropout": caveat.MCDropout(training=training),
        "swag": caveat.SWAG(
            training=Training(epochs=max(epochs, 25), learning_rate=0.01)
        ),  # its own .1 leaves the point
        "laplace, kronecker": caveat.Laplace(),
        "laplace, diagonal": caveat.Laplace(structure="diagonal"),
        "ensemble of 4, laplace": caveat.Ensemble(of=caveat.Laplace(), members=4, training=training),
        "subnetwork of 1000": caveat.SubnetworkLaplace(weights=1000),
        "sampled laplace": caveat.SampledLaplace(samples=16, temperature="validation"),
        "ivon": caveat.IVON(training=Training(epochs=epochs, learning_rate=0.05)),
        "ivon, cold": caveat.IVON(temperature=0.001, training=Training(epochs=epochs, learning_rate=0.05)),
        "mean-field vi": caveat.MeanFieldVI(training=training),
        "ssvi": caveat.SSVI(density=0.3, training=training),
    }


def run(text: Text, model: nn.Module, name: str, given: argparse.Namespace, seed: int) -> list[dict[str, Any]]:
    """The lines of one method and one seed."""
    inputs, targets = text.train
    names = list(inputs)
    rows = [
        dict(zip(names, row, strict=True)) | {"labels": y} for *row, y in zip(*inputs.values(), targets, strict=True)
    ]
    module = adapted(model, seed)
    task = caveat.Task(
        module, DataLoader(rows, 16), caveat.Categorical(classes=ANSWERS), caveat.GaussianPrior(given.precision),
        validation=0.2, parameters="*lora_*",
    )  # fmt: skip
    method = methods(given.epochs)[name]
    folder = given.folder / f"map-{given.rows}-{given.epochs}-{seed}"
    if not folder.exists():
        caveat.fit(task, methods(given.epochs)["map"], seed=seed, folder=folder, progress=False)
    point = caveat.load(folder, module)
    starts = method.starts_from == "trained" or name == "map, temperature"
    posterior = (
        point if name == "map" else caveat.fit(task, method, start=point if starts else None, seed=seed, progress=False)
    )
    inside, seconds = predicted(posterior, text.test[0], DRAWS)
    common = {"rows": given.rows, "method": name, "seed": seed} | cost(posterior, seconds)
    lines = [common | {"on": "test"} | scores(inside, text.test[1])]
    shifted = {f"words left out {share:g}": pair for share, pair in text.dropped.items()}
    for where, (x, y) in (shifted | {"other modules": text.other_modules}).items():
        lines.append(common | {"on": where} | scores(predicted(posterior, x, DRAWS)[0], y))
    return [
        *lines,
        common | {"on": "reference paragraphs"} | apart(inside, predicted(posterior, text.outside, DRAWS)[0]),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", action="append", help="only this; may be repeated")
    parser.add_argument("--seed", type=int, action="append", help="0, 1 and 2 unless given")
    parser.add_argument("--rows", type=int, default=1000)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, default=4000, help="of pretraining")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--precision", type=float, default=1.0, help="of the prior over adapters")
    parser.add_argument("--minutes", type=float, default=1e9, help="begin no run after so many minutes")
    parser.add_argument("--folder", type=Path, default=Path("runs/adapters"), help="keeps the bases and the points")
    parser.add_argument("--csv", type=Path, default=Path(__file__).with_name("language.csv"))
    given = parser.parse_args()
    warnings.simplefilter("ignore", FutureWarning)  # of peft
    table, begun = Table(given.csv), time.monotonic()
    for seed in given.seed or (0, 1, 2):
        wanted = [name for name in given.method or methods(1) if not table.has(given.rows, name, seed)]
        if not wanted:
            continue
        text = read(given.rows, seed)
        state = pretrained(text, given, seed)
        for name in wanted:
            if time.monotonic() - begun > 60 * given.minutes:
                print("time is up: call this again to go on", flush=True)
                return
            begin = time.process_time()
            base = language_model(text.vocabulary, given.width)
            base.load_state_dict(state)
            try:
                lines = run(text, base.eval(), name, given, seed)
            except (ValueError, TypeError) as error:
                print(f"{name}, seed {seed}: refused, {error}", flush=True)
                continue
            table.add(lines)
            print(f"{name}, seed {seed}: {time.process_time() - begin:.0f} s, {lines[0]['nll']:.3f} nats", flush=True)
    print("done")


if __name__ == "__main__":
    main()
