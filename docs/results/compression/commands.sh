#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE
#
# SOURCE is a folder for `vse-data prepare f8k`. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite0.pth and
# all-MiniLM-L6-v2/.
set -eu
results=results/compression
runs=runs/compression

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
[ -f features/f8k_effnet.h5 ] || vse-extract cnn --dataset data/f8k/dataset.json --feature effnet --set precision=fp32
[ -f features/f8k_minilm.h5 ] || vse-extract text --dataset data/f8k/dataset.json --feature minilm --set precision=fp32

train() { # NAME SEED [OPTION ...]
  name=$1 seed=$2 run=$runs/$1/seed-$2
  shift 2
  [ -f "$run/test.h5" ] && return
  vse-train --features features/f8k_effnet.h5 --experiment infonce_minilm_effnet --set model.dim=512 --set train.epochs=8 \
    --set train.decay_after=6 --set train.batch_size=256 --set train.learning_rate=5e-4 --set train.precision=fp32 "$@" \
    --seed "$seed" --name "$name" --out "$run" --threads 1 --resume --overwrite
  vse-embed "$run" --threads 1
  vse-embed "$run" --threads 1 --split train
}

for seed in 0 1 2; do
  train plain "$seed"
  train nested "$seed" --set "loss.nested=[32, 64, 128, 256]"
done
for name in plain nested; do
  [ -f "$results/$name.json" ] || vse-eval "$runs/$name"/seed-*/test.h5 --protocol full --rescore 100 \
    --compress "dims=256,128,64,32 int8 binary pq64 pq32 pq16" --out "$results/$name.json"
done
vse-table summary "$results"/*.json --out "$results/summary.csv"
vse-table cards "$results"/*.json --out "$results/cards.csv"
vse-table compression "$results"/*.json --out "$results/codecs.csv"
vse-table compression "$results"/*.json --out "$results/codecs.svg"
