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

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
[ -f features/f8k_effnet_grid.h5 ] ||
  vse-extract cnn --dataset data/f8k/dataset.json --feature effnet_grid --set grid=4 --set precision=fp32
[ -f features/f8k_minilm.h5 ] || vse-extract text --dataset data/f8k/dataset.json --feature minilm --set precision=fp32
[ -f features/f8k_minilm_tokens.h5 ] ||
  vse-extract text --dataset data/f8k/dataset.json --feature minilm_tokens --set precision=fp32

train() { # NAME SEED
  name=$1 seed=$2 run=$runs/$1/seed-$2 words=minilm_tokens
  [ -f "$run/test.h5" ] && return
  linear="--set model.image_encoder=linear --set model.caption_encoder=linear"
  case $name in
    mean) # MiniLM's sentence vector is the mean of its token vectors
      words=minilm options="--set model.similarity=cosine --set model.image_encoder=pooled --set model.caption_encoder=linear"
      ;;
    scan) options="$linear" ;;
    *) options="--set model.similarity=maxsim --set model.similarity.queries=${name#maxsim_} $linear" ;;
  esac
  vse-train --features features/f8k_effnet_grid.h5 --caption-features "features/f8k_$words.h5" \
    --experiment scan_t2i_avg_effnet --set loss.name=infonce --set loss.learned=true --set loss.same_image=positive \
    --set model.dim=256 --set train.epochs=6 --set train.decay_after=4 --set train.batch_size=128 --set train.clip=null \
    --set train.precision=fp32 --set train.on_collapse=warn --set train.learning_rate=5e-4 $options \
    --seed "$seed" --name "$name" --out "$run" --threads 1 --resume --overwrite
  vse-embed "$run" --threads 1
}

names="mean maxsim_words scan"
for name in $names; do
  for seed in 0 1 2; do train "$name" "$seed"; done
done
for seed in 0 1 2; do
  for factor in 2 3; do
    [ -f "$runs/maxsim_words/seed-$seed/test_pooled_$factor.h5" ] ||
      vse-embed "$runs/maxsim_words/seed-$seed" --threads 1 --pool-regions "$factor"
  done
done

for name in $names; do vse-eval "$runs/$name"/seed-*/test.h5 --protocol full --out "$results/$name.json"; done
for factor in 2 3; do
  vse-eval "$runs"/maxsim_words/seed-*/test_pooled_$factor.h5 --protocol full --out "$results/maxsim_words_pooled_$factor.json"
done
vse-eval "$runs"/maxsim_words/seed-0/test.h5 --protocol full --rerank 50 --rerank 100 --out "$results/maxsim_words_reranked.json"
for pair in "maxsim_words mean" "scan mean" "scan maxsim_words"; do
  set -- $pair
  vse-eval --compare "$runs/$1"/seed-*/test.h5 "$runs/$2"/seed-*/test.h5 --protocol full --out "$results/$1_vs_$2.json"
done
for table in summary cards; do
  for name in $names maxsim_words_pooled_2 maxsim_words_pooled_3; do echo "$results/$name.json"; done |
    xargs vse-table "$table" --out "$results/$table.csv"
done
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
