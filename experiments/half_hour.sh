#!/usr/bin/env bash
# Runs of docs/papers_scale.md side by side on one GPU, for so many seconds: those that half an hour has room for.
#
#     CAVEAT_DATA=data bash experiments/half_hour.sh 1500 results > half_hour.log 2>&1
#
# What is not done by then goes on with the same command; a row is in its csv as soon as its cell is finished. MNIST
# must be there; the runs on CIFAR begin when there is a file $CAVEAT_DATA/ready, for data that come in parts. No two
# subnetworks are fitted at once (36 GB each) while all samples are made (30 GB).

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
cells() { # an experiment file, and what pieces.py takes beside it
    python3 "$here/pieces.py" "$here/$1" --device cuda --out "$out/$(basename "$1" .toml)" --seconds "$(left)" "${@:2}"
}
run() { timeout "$(left)" python3 "$here/$1" --device cuda "${@:2}"; }
ready() { until [ -e "$CAVEAT_DATA/ready" ]; do sleep 1; done; }

(
    run sampled_laplace/run.py --rows 60000 --folder "$out/lenet" --cells descent \
        --csv "$here/sampled_laplace/results_cuda.csv"
    ready
    cells hmc/lenet_cifar10.toml --cells '*/*/hmc/0'
    cells hmc/lenet_cifar10.toml --cells '*/*/*/0'
) > "$out/small.log" 2>&1 &
(
    cells subnetwork/resnet18_mnist.toml --cells '*/*/[!e]*/0' '*/*/energy/0'
    cells subnetwork/resnet18_mnist.toml --cells '*/*/ensemble/0'
) > "$out/mnist.log" 2>&1 &
(
    ready
    cells sampled_laplace/resnet18_cifar100.toml --cells 'cifar100/*/map*/0' 'cifar100/*/sampled_laplace/0'
    cells sampled_laplace/resnet18_cifar100.toml --cells 'cifar100/*/last_layer_laplace/0' 'cifar100/*/kronecker/0'
    cells subnetwork/resnet18_cifar10.toml --jobs 2 --cells '*/*/[!e]*/0' '*/*/energy/0'
) > "$out/laplace.log" 2>&1 &
(
    ready
    run ssvi/cifar.py --data cifar100 --density 0.1 --folder "$out/100-90-0"
    run ssvi/cifar.py --data cifar100 --density 0.2 --folder "$out/100-80-0"
    run ssvi/cifar.py --data cifar100 --folder "$out/100-95-1" --seed 1
) > "$out/ssvi.log" 2>&1 &
wait
