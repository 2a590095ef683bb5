#!/bin/sh
# Repeat the comparison of three image networks in the current folder, a clone of the repository. Finished steps are not run again.
#
#   sh docs/results/ladder/commands.sh SOURCE WEIGHTS
#
# SOURCE is a folder for `vse-data prepare f8k`. WEIGHTS is a folder with tf_efficientnet_lite0.pth, tf_efficientnet_lite2.pth,
# mobilenet_v2.pth and all-MiniLM-L6-v2/. All steps run on the CPU. Extractions, trainings and embeddings have one thread each;
# as many run at a time as there are cores.
set -eu
results=results/ladder
heads="vsepp infonce_minilm twobranch cca"
networks="effnet effnet2 mobilenet"
mkdir -p "$results"

name() { # HEAD NETWORK; the names of the presets end with _effnet, whichever network the features come from
  echo "$1_effnet@f8k+minilm+$2"
}

for head in $heads; do
  for network in $networks; do echo "results/f8k_$(name "$head" "$network").json"; done
done >"$results/targets"
xargs snakemake --cores all --config device=cpu threads=1 f8k_dir="$1" weights_dir="$2" -- <"$results/targets"

for head in $heads; do
  for other in effnet2 mobilenet; do
    vse-eval --compare "runs/f8k_$(name "$head" $other)"/seed-*/test.h5 "runs/f8k_$(name "$head" effnet)"/seed-*/test.h5 \
      --out "$results/${head}_${other}_vs_effnet.json"
  done
done
for table in summary cards; do xargs vse-table "$table" --out "$results/$table.csv" <"$results/targets"; done
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
