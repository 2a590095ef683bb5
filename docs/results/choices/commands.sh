#!/bin/sh
# Repeat the results of this folder, after ../late_interaction/commands.sh, in the same current folder.
#
#   sh commands.sh ENTITIES
#
# ENTITIES is the folder of Flickr30K Entities, with Annotations/ and Sentences/. The folder VSE_WEIGHTS_DIR holds
# all-MiniLM-L6-v2/.
set -eu
results=results/choices
mkdir -p "$results"
[ -f data/f8k_phrases/dataset.json ] || vse-data add-phrases data/f8k/dataset.json --entities "$1" --out data/f8k_phrases
[ -f data/f8k_swapped/choices.json ] || vse-data swap-phrases data/f8k_phrases/dataset.json --out data/f8k_swapped
for feature in minilm minilm_tokens; do
  [ -f "features/f8k_swapped_$feature.h5" ] ||
    vse-extract text --dataset data/f8k_swapped/dataset.json --feature "$feature" --set precision=fp32
done

files() { # HEAD: the embeddings of each seed
  rate=$(sed -n "s/^$1,\(.*\),.*,yes$/\1/p" results/late_interaction/validation.csv)
  echo runs/late_interaction/"$1-$rate"/seed-*/f8k_swapped_test.h5
}
for head in mean maxsim_words maxsim_both scan; do
  words=minilm_tokens
  [ "$head" = mean ] && words=minilm
  rate=$(sed -n "s/^$head,\(.*\),.*,yes$/\1/p" results/late_interaction/validation.csv)
  for run in runs/late_interaction/"$head-$rate"/seed-*; do
    [ -f "$run/f8k_swapped_test.h5" ] || vse-embed "$run" --captions data/f8k_swapped/dataset.json \
      --caption-features "features/f8k_swapped_$words.h5" --threads 1
  done
  vse-eval $(files "$head") --choices data/f8k_swapped/choices.json --out "$results/$head.json"
done
for head in maxsim_words maxsim_both scan; do
  vse-eval --compare $(files "$head") $(files mean) --choices data/f8k_swapped/choices.json --out "$results/${head}_vs_mean.json"
done
ls "$results"/*.json | grep -v _vs_ | xargs vse-table summary --out "$results/summary.csv"
ls "$results"/*.json | grep -v _vs_ | xargs vse-table cards --out "$results/cards.csv"
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
