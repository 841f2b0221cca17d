#!/usr/bin/env bash
# The vision transformer's posteriors in as many processes as fill a GPU, for so many seconds; again until all is done.
#
#     CAVEAT_DATA=data bash experiments/adapters/side_by_side.sh 520 runs/vit          # SEEDS="0 1" for fewer
#     CAVEAT_DATA=data bash experiments/adapters/side_by_side.sh 0 runs/vit &          # the base alone
#
# Three processes a seed: 1,000 rows, and 5,000 in two. What is in the folder is not made again; runs/vit/vit.csv has the
# lines of all of them. DEVICE, ROWS (--test-rows 3000 --shifted-rows 300) and EXTRA (--tiny) are for trials.

set -u
seconds=$1 out=$2
here=$(cd "$(dirname "$0")" && pwd)
export PYTHONPATH="$here/../..${PYTHONPATH:+:$PYTHONPATH}" PYTHONUNBUFFERED=1 OMP_NUM_THREADS=1
mkdir -p "$out/base"
# Processes share a GPU without taking turns where the multi-process service works.
if command -v nvidia-cuda-mps-control > /dev/null && nvidia-cuda-mps-control -d 2> /dev/null; then
    python3 -c 'import torch; torch.ones(1, device="cuda").sum().item()' || echo quit | nvidia-cuda-mps-control
fi
vit() { python3 "$here/vit.py" --device "${DEVICE:-cuda}" ${EXTRA:-} "$@"; }
left() { echo $((seconds - SECONDS > 30 ? seconds - SECONDS : 30)); }

if [ ! -s "$out/base/base.txt" ]; then
    vit --folder "$out/base" --pretrain > "$out/base.log" 2>&1 || { tail -c 1500 "$out/base.log"; exit 1; }
fi
cat "$out/base/base.txt"
[ "$seconds" -gt 0 ] || exit 0

some() { # rows, seed, folder, then methods
    local rows=$1 seed=$2 folder=$out/$3 chosen=()
    shift 3
    for method in "$@"; do chosen+=(--method "$method"); done
    for _ in 1 2; do # a run that fails is said in the log, and the rest goes on
        timeout "$(left)" bash -c "$(declare -f vit); here='$here'; vit \"\$@\"" vit --folder "$folder" --csv "$folder.csv" \
            ${ROWS:---test-rows 3000 --shifted-rows 300} --rows "$rows" --seed "$seed" "${chosen[@]}" \
            --minutes "$(python3 -c "print($(left) / 60 - 0.4)")" >> "$folder.log" 2>&1 && break
    done
}
fresh() { [ -e "$out/$1" ] || cp -r "$out/${2:-base}" "$out/$1"; }

fits=("ensemble of 5" "swag" "mc dropout" "last layer")
for seed in ${SEEDS:-0 1 2}; do
    (
        fresh "1000-$seed"
        some 1000 "$seed" "1000-$seed" "map" "map, temperature" "laplace, kronecker" "laplace, diagonal" "${fits[@]}" "ivon" \
            "mean-field vi" "ssvi" "subnetwork of 5000" "ensemble of 5, laplace" "sgmcmc" "sampled laplace"
    ) &
    (
        fresh "5000-$seed"
        some 5000 "$seed" "5000-$seed" "map"
        fresh "5000b-$seed" "5000-$seed"
        some 5000 "$seed" "5000b-$seed" "mean-field vi" "ivon" "ssvi" "ensemble of 5, laplace" "subnetwork of 5000" "sgmcmc" \
            "sampled laplace" &
        some 5000 "$seed" "5000-$seed" "map, temperature" "laplace, kronecker" "laplace, diagonal" "${fits[@]}"
        wait
    ) &
done
wait
cat "$out"/*00*-*.csv | awk '!seen[$0]++' > "$out/vit.csv"
tail -n 2 "$out"/*.log | grep -v '%|' | cut -c1-300
wc -l "$out/vit.csv"
