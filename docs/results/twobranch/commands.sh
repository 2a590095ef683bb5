#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE
#
# SOURCE is a folder for `vse-data prepare f8k`. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite0.pth and all-MiniLM-L6-v2/.
set -eu
results=results/twobranch
names="single linear linear_single default sampling constraints after_last"

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
for extraction in "cnn effnet" "text minilm"; do
  set -- $extraction
  [ -f "features/f8k_$2.h5" ] || vse-extract "$1" --dataset data/f8k/dataset.json --feature "$2" --set precision=fp32
done

for name in $names; do
  experiment=twobranch_${name}_effnet
  [ "$name" != default ] || experiment=twobranch_effnet
  for seed in 0 1 2; do
    run=runs/f8k_$experiment/seed-$seed
    [ -f "$run/test.h5" ] && continue
    vse-train --features features/f8k_effnet.h5 --experiment "$experiment" --seed "$seed" --out "$run" --threads 1 --resume \
      --set feature=effnet --set caption_feature=minilm
    vse-embed "$run" --threads 1
  done
  vse-eval runs/f8k_"$experiment"/seed-*/test.h5 --protocol full --protocol sentence --out "$results/$name.json"
done

compare() { # NAME NAME: of the first and the second side of a difference
  vse-eval --compare runs/f8k_"$1"/seed-*/test.h5 runs/f8k_"$2"/seed-*/test.h5 --protocol full --protocol sentence \
    --out "$results/$3.json"
}
compare twobranch_single_effnet twobranch_linear_single_effnet single_vs_linear_single
compare twobranch_effnet twobranch_linear_effnet default_vs_linear
compare twobranch_effnet twobranch_single_effnet default_vs_single
compare twobranch_sampling_effnet twobranch_effnet sampling_vs_default
compare twobranch_constraints_effnet twobranch_sampling_effnet constraints_vs_sampling
compare twobranch_after_last_effnet twobranch_effnet after_last_vs_default
for table in summary cards; do
  for name in $names; do echo "$results/$name.json"; done | xargs vse-table "$table" --out "$results/$table.csv"
done
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
