#!/bin/sh
# Repeat the results of this folder, after ../judged/commands.sh, in the same current folder.
set -eu
results=results/hubness
names="cca infonce twobranch vse0 vsepp"
for name in $names; do
  for run in runs/f8k_"$name"/seed-*; do
    for split in val train; do [ -f "$run/$split.h5" ] || vse-embed "$run" --split "$split" --threads 1; done
  done
  vse-eval runs/f8k_"$name"/seed-*/test.h5 --protocol full --out "$results/$name.json"
  for method in mean csls nnn inverted-softmax qb-norm; do
    vse-eval runs/f8k_"$name"/seed-*/test.h5 --protocol full --correct "$method" --out "$results/${name}_$method.json"
  done
  for method in csls inverted-softmax; do
    vse-eval runs/f8k_"$name"/seed-*/test.h5 --protocol full --correct "$method" --bank test --out "$results/${name}_${method}_test.json"
  done
done
vse-table summary "$results"/*.json --transductive --out "$results/summary.csv"
for name in $names; do echo "$results/$name.json $results/${name}_inverted-softmax.json"; done |
  xargs vse-table compare --out "$results/compare.csv"
