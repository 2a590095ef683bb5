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

# SCAN and MaxSim score pairs, so their bank is a part of the training split. The runs are those of ../late_interaction.
for head in scan maxsim_both; do
  rate=$(sed -n "s/^$head,\(.*\),.*,yes$/\1/p" results/late_interaction/validation.csv)
  for run in runs/late_interaction/"$head-$rate"/seed-*; do
    mkdir -p "$run/bank"
    for split in val test; do
      [ -f "$run/bank/$split.h5" ] ||
        vse-embed "$run" --split "$split" --bank-images 1000 --threads 1 --out "$run/bank/$split.h5"
    done
  done
  vse-eval runs/late_interaction/"$head-$rate"/seed-*/bank/test.h5 --protocol full --out "$results/$head.json"
  for method in mean csls nnn inverted-softmax qb-norm; do
    vse-eval runs/late_interaction/"$head-$rate"/seed-*/bank/test.h5 --protocol full --correct "$method" \
      --out "$results/${head}_$method.json"
  done
  vse-eval runs/late_interaction/"$head-$rate"/seed-*/bank/test.h5 --protocol full --correct inverted-softmax --bank test \
    --out "$results/${head}_inverted-softmax_test.json"
done
vse-table summary "$results"/scan*.json "$results"/maxsim_both*.json --transductive --out "$results/pairs.csv"
ls "$results"/*.json | grep -v _test.json | xargs vse-table cards --out "$results/cards.csv"

# banks.csv: both banks for CCA on TF-IDF, and the test bank for other models. LADDER is the folder in which the ladder
# f8k_corrected ran (docs/ladder.md).
[ -n "${LADDER:-}" ] || exit 0
correct() { # NAME METHOD BANK FILE ...
  out=$results/banks/$1_$2_$3.json method=$2 bank=$3
  shift 3
  [ -f "$out" ] || vse-eval "$@" --protocol full --correct "$method" --bank "$bank" --bootstrap 200 --out "$out"
}
of_ladder() { # COMBINATION: the embeddings of each seed
  echo "$LADDER/runs/f8k_$1"/seed-*/test.h5
}
for method in csls nnn inverted-softmax qb-norm; do
  for bank in train test; do
    correct cca_tfidf "$method" "$bank" $(of_ladder cca_effnet@f8k_corrected+tfidf+effnet)
  done
  for head in cca infonce_minilm twobranch; do
    correct "${head}_minilm" "$method" test $(of_ladder "${head}_effnet@f8k_corrected+minilm+effnet")
  done
  for head in scan maxsim_both; do
    rate=$(sed -n "s/^$head,\(.*\),.*,yes$/\1/p" results/late_interaction/validation.csv)
    correct "$head" "$method" test runs/late_interaction/"$head-$rate"/seed-*/bank/test.h5
  done
done
vse-table summary "$results"/banks/*.json --transductive --out "$results/banks.csv"
