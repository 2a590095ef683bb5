#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE
#
# SOURCE is a folder for `vse-data prepare f8k`. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite0.pth and
# all-MiniLM-L6-v2/.
set -eu
results=results/late_interaction
runs=runs/late_interaction
heads="mean maxsim_words maxsim_both scan"
learning_rates="2e-4 5e-4 1e-3"

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
[ -f features/f8k_effnet_grid.h5 ] ||
  vse-extract cnn --dataset data/f8k/dataset.json --feature effnet_grid --set grid=4 --set precision=fp32
[ -f features/f8k_minilm.h5 ] || vse-extract text --dataset data/f8k/dataset.json --feature minilm --set precision=fp32
[ -f features/f8k_minilm_tokens.h5 ] ||
  vse-extract text --dataset data/f8k/dataset.json --feature minilm_tokens --set precision=fp32

train() { # HEAD SEED LEARNING_RATE
  head=$1 seed=$2 folder=$runs/$1-$3/seed-$2 words=minilm_tokens
  grep -qs '"state": "finished"' "$folder/run.json" && return
  linear="--set model.image_encoder=linear --set model.caption_encoder=linear"
  case $head in
    mean) # MiniLM's sentence vector is the mean of its token vectors
      words=minilm options="--set model.similarity=cosine --set model.image_encoder=pooled --set model.caption_encoder=linear"
      ;;
    scan) options="$linear" ;;
    *) options="--set model.similarity=maxsim --set model.similarity.queries=${head#maxsim_} $linear" ;;
  esac
  vse-train --features features/f8k_effnet_grid.h5 --caption-features "features/f8k_$words.h5" \
    --experiment scan_t2i_avg_effnet --set loss.name=infonce --set loss.learned=true --set loss.same_image=positive \
    --set model.dim=256 --set train.epochs=6 --set train.decay_after=4 --set train.batch_size=128 --set train.clip=null \
    --set train.precision=fp32 --set train.on_collapse=warn --set train.learning_rate="$3" $options \
    --seed "$seed" --name "$head" --out "$folder" --threads 1 --resume --overwrite
}

best_rsum() { # RUN: the highest rsum on the validation split
  sed -n 's/.*"best_rsum": \([0-9.]*\).*/\1/p' "$1/run.json"
}

best_rate() { # HEAD: the learning rate with the highest rsum of seed 0 on the validation split
  for learning_rate in $learning_rates; do
    echo "$(best_rsum "$runs/$1-$learning_rate/seed-0") $learning_rate"
  done | sort -n | tail -1 | cut -d ' ' -f 2
}

for head in $heads; do
  for learning_rate in $learning_rates; do train "$head" 0 "$learning_rate"; done
done
{
  echo head,learning_rate,rsum_val,selected
  for head in $heads; do
    for learning_rate in $learning_rates; do
      selected=no
      [ "$(best_rate "$head")" = "$learning_rate" ] && selected=yes
      printf '%s,%s,%.2f,%s\n' "$head" "$learning_rate" "$(best_rsum "$runs/$head-$learning_rate/seed-0")" "$selected"
    done
  done
} > "$results/validation.csv"

embed() { # RUN FACTOR, where 1 keeps all regions
  if [ "$2" = 1 ]; then
    [ -f "$1/test.h5" ] || vse-embed "$1" --threads 1
  else
    [ -f "$1/test_pooled_$2.h5" ] || vse-embed "$1" --threads 1 --pool-regions "$2"
  fi
}
evaluate() { # OUT FILE ...
  out=$results/$1.json
  shift
  [ -f "$out" ] || vse-eval "$@" --protocol full --out "$out"
}
for head in $heads; do
  run=$runs/$head-$(best_rate "$head")
  for seed in 0 1 2; do
    train "$head" "$seed" "$(best_rate "$head")"
    embed "$run/seed-$seed" 1
  done
  evaluate "$head" "$run"/seed-*/test.h5
done
for head in maxsim_words maxsim_both; do
  run=$runs/$head-$(best_rate "$head")
  for factor in 2 3; do
    for seed in 0 1 2; do embed "$run/seed-$seed" "$factor"; done
    evaluate "${head}_pooled_$factor" "$run"/seed-*/test_pooled_$factor.h5
  done
  [ -f "$results/${head}_reranked.json" ] ||
    vse-eval "$run"/seed-0/test.h5 --protocol full --rerank 50 --rerank 100 --out "$results/${head}_reranked.json"
done
for pair in "maxsim_words mean" "maxsim_both mean" "scan mean" "scan maxsim_words" "scan maxsim_both"; do
  set -- $pair
  [ -f "$results/$1_vs_$2.json" ] || vse-eval --compare "$runs/$1-$(best_rate "$1")"/seed-*/test.h5 \
    "$runs/$2-$(best_rate "$2")"/seed-*/test.h5 --protocol full --out "$results/$1_vs_$2.json"
done
for table in summary cards; do
  ls "$results"/*.json | grep -v -e _vs_ -e reranked | xargs vse-table "$table" --out "$results/$table.csv"
done
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
