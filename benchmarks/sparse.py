"""What sparsity saves: training steps and inference of SSVI against dense variational inference, seconds and bytes.

    python benchmarks/sparse.py                                      # our side alone, a quarter of an hour on two cores
    python benchmarks/sparse.py --peer bayesian-torch/bin/python     # with bayesian-torch 0.5.0 (Intel Labs)
    python benchmarks/sparse.py --part inference --case resnet18 --csv benchmarks/sparse.csv
    python benchmarks/sparse.py --device cuda --peer PYTHON          # batch 512; eager, then compiled
    python benchmarks/sparse.py --device cuda --part training --mode compiled --way "SSVI 95%"
    python benchmarks/sparse.py --processor-time                     # on a machine that others use as well

A row is printed when it is there, and --csv written again, so that what a time limit ends has kept what it measured.
Threads of several programs on one core wait for each other, so on a machine in use only the seconds that a process
itself computes on one thread compare: that is --processor-time.

bayesian-torch lives in an environment of its own. It asks for torchvision, tensorboard and scikit-learn, of which its
layers import none:

    python3.11 -m venv bayesian-torch
    bayesian-torch/bin/pip install torch==2.13.0 numpy safetensors tqdm
    bayesian-torch/bin/pip install --no-deps bayesian-torch==0.5.0

In `sparse_parts`, each part says how it measures: training.py steps, inference.py networks at the means of posteriors,
prediction.py draws, peer.py what bayesian-torch does of this. cases.py has the networks and the ways to train them.
"""

import argparse
import json
import os
import sys
from pathlib import Path

import torch

# Not there under -P, by which jobs run; at the end, as scripts beside this one have the names of packages.
sys.path.append(str(Path(__file__).resolve().parent))
from sparse_parts import peer
from sparse_parts.cases import CASES, WAYS, chosen_ways
from sparse_parts.fitted import fitted
from sparse_parts.inference import compare_inference
from sparse_parts.job import Job
from sparse_parts.prediction import compare_predictions
from sparse_parts.tables import Table, print_inference, print_targets, print_training
from sparse_parts.training import compare_training, train

PARTS = ("training", "inference", "prediction")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peer", help="python of an environment with bayesian-torch")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--part", choices=PARTS, action="append", help="only this; may be repeated")
    parser.add_argument("--case", choices=CASES, action="append", help="only this network; may be repeated")
    parser.add_argument("--way", choices=WAYS, action="append", help="only this and dense VI; in the order given")
    parser.add_argument("--batch", type=int, help="of training; 16 (ResNet) and 128 (MLP), on a GPU 512, unless given")
    parser.add_argument("--interval", type=int, help="steps of a block of training; 5, on a GPU 20, unless given")
    parser.add_argument("--blocks", type=int, default=4, help="of training, of which the first is not timed")
    parser.add_argument("--repeats", type=int, help="3, on a GPU 1, unless given")
    parser.add_argument("--mode", choices=("eager", "compiled", "both"), help="eager, on a GPU both, unless given")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--processor-time", action="store_true", help="the process's own seconds, on one thread")
    parser.add_argument("--rounds", type=int, default=40, help="of inference")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds that one measurement may take")
    parser.add_argument("--csv", help="also write all tables to this file")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        job = Job(**json.loads(arguments.job))
        return print(json.dumps(train(job) if job.part == "training" else peer.predict(job)))
    cuda = arguments.device != "cpu"
    arguments.threads = 1 if arguments.processor_time else arguments.threads
    arguments.mode = arguments.mode or ("both" if cuda else "eager")
    arguments.way = chosen_ways(arguments.way, arguments.peer)
    cases, parts = arguments.case or list(CASES), arguments.part or PARTS
    machine = torch.cuda.get_device_name() if cuda else f"{arguments.threads} threads, load {os.getloadavg()[0]:.1f}"
    print(f"torch {torch.__version__}, {machine}")
    table = Table(arguments.csv)
    for case in cases if "training" in parts else ():
        compare_training(arguments, case, table)
    for case in cases if {"inference", "prediction"} & {*parts} else ():
        posteriors = fitted(arguments, case)
        if "inference" in parts:
            compare_inference(arguments, posteriors, table)
        if "prediction" in parts:
            compare_predictions(arguments, posteriors, table)
    print_training(table.rows)
    print_inference(table.rows)
    print_targets(table.rows)


if __name__ == "__main__":
    main()
