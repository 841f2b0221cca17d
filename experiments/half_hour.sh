#!/usr/bin/env bash
# Runs of docs/papers_scale.md side by side on one GPU, for so many seconds: those that half an hour has room for.
#
#     CAVEAT_DATA=data bash experiments/half_hour.sh 1500 results > half_hour.log 2>&1
#
# What is not done by then goes on with the same command; a row is in its csv as soon as its cell is finished. MNIST
# must be there; the runs on CIFAR begin when there is a file $CAVEAT_DATA/ready, for data that come in parts.

set -u
seconds=$1
out=${2:-results}
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/.." PYTHONUNBUFFERED=1
mkdir -p "$out"

# Several processes share a GPU without taking turns where the multi-process service works.
if command -v nvidia-cuda-mps-control > /dev/null && nvidia-cuda-mps-control -d; then
    python3 -c 'import torch; torch.ones(1, device="cuda").sum().item()' || echo quit | nvidia-cuda-mps-control
fi

left() { echo $((seconds - SECONDS > 30 ? seconds - SECONDS : 30)); }
cells_for() { # so many seconds: an experiment file, and what pieces.py takes beside it
    python3 "$here/pieces.py" "$here/$2" --device cuda --out "$out/$(basename "$2" .toml)" --seconds "$1" "${@:3}"
}
cells() { cells_for "$(left)" "$@"; }
run() { timeout "$(left)" python3 "$here/$1" --device cuda "${@:2}"; }
ready() { until [ -e "$CAVEAT_DATA/ready" ]; do sleep 1; done; }
mnist=(subnetwork/resnet18_mnist.toml --cells '*/*/[!e]*/0' '*/*/energy/0')

# What the half hour is for goes in two rows, so that each has half of the card: with more at once none would be done.
(
    cells_for 150 "${mnist[@]}"
    ready
    cells sampled_laplace/resnet18_cifar100.toml --cells 'cifar100/*/map*/0' 'cifar100/*/sampled_laplace/0'
    cells "${mnist[@]}"
    cells sampled_laplace/resnet18_cifar100.toml --cells 'cifar100/*/last_layer_laplace/0' 'cifar100/*/kronecker/0'
    cells subnetwork/resnet18_cifar10.toml --cells '*/*/[!e]*/0' '*/*/energy/0'
) > "$out/laplace.log" 2>&1 &
(
    ready
    run ssvi/cifar.py --data cifar100 --density 0.1 --folder "$out/100-90-0"
    run ssvi/cifar.py --data cifar100 --density 0.2 --folder "$out/100-80-0"
    run ssvi/cifar.py --data cifar100 --folder "$out/100-95-1" --seed 1
) > "$out/ssvi.log" 2>&1 &
( # small networks, which leave most of the card to the others
    run sampled_laplace/run.py --folder "$out/lenet" --cells descent --csv "$here/sampled_laplace/results_cuda.csv"
    ready
    cells hmc/lenet_cifar10.toml --cells '*/*/hmc/0'
    cells hmc/lenet_cifar10.toml --cells '*/*/*/0'
) > "$out/small.log" 2>&1 &
wait
