#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE JUDGEMENTS
#
# SOURCE is a folder for `vse-data prepare f8k`. JUDGEMENTS holds ExpertAnnotations.txt and CrowdFlowerAnnotations.txt of
# Flickr8k. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite0.pth and all-MiniLM-L6-v2/.
set -eu
results=results/judged
judgements=$2

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
[ -f features/f8k_effnet.h5 ] || vse-extract cnn --dataset data/f8k/dataset.json --feature effnet --set precision=fp32
[ -f features/f8k_effnet_grid.h5 ] ||
  vse-extract cnn --dataset data/f8k/dataset.json --feature effnet_grid --set grid=4 --set precision=fp32
[ -f features/f8k_minilm.h5 ] || vse-extract text --dataset data/f8k/dataset.json --feature minilm --set precision=fp32

train() { # NAME SEED EXPERIMENT [OPTION ...]
  name=$1 seed=$2 experiment=$3 run=runs/f8k_$1/seed-$2
  shift 3
  [ -f "$run/test.h5" ] && return
  vse-train --features features/f8k_effnet.h5 --experiment "$experiment" --name "$name" --seed "$seed" --out "$run" --threads 1 \
    --resume --overwrite --set train.on_collapse=warn --set caption_feature=minilm --set train.precision=fp32 "$@"
  vse-embed "$run" --threads 1
}

epochs="--set train.epochs=12 --set train.decay_after=8 --set model.dim=512"
linear="--set model.caption_encoder=linear --set train.learning_rate=5e-4"
widths="--set model.image_encoder.widths=[1024,512] --set model.caption_encoder.widths=[1024,512]"
train cca 0 cca_effnet # CCA has no random numbers
for seed in 0 1 2; do
  train infonce "$seed" infonce_minilm_effnet $epochs
  train vsepp "$seed" vsepp_effnet $epochs $linear --set loss.name=max --set warmup.loss=sum --set warmup.epochs=1
  train vse0 "$seed" vse0_effnet $epochs $linear
  train twobranch "$seed" twobranch_effnet $widths --set train.epochs=12
done

# SCAN compares cells of the photograph with words, and reads other features.
for seed in 0 1 2; do
  run=runs/f8k_scan/seed-$seed
  [ -f "$run/test.h5" ] && continue
  vse-train --features features/f8k_effnet_grid.h5 --experiment scan_i2t_avg_effnet --name scan --seed "$seed" --out "$run" \
    --threads 1 --resume --overwrite --set train.on_collapse=warn --set model.dim=256 --set train.epochs=12 \
    --set train.decay_after=8 --set train.learning_rate=5e-4 --set warmup.loss=sum --set warmup.epochs=1
  vse-embed "$run" --threads 1
done

judged() { # OPTIONS of vse-eval
  vse-eval "$@" --protocol full --judgements "expert=$judgements/ExpertAnnotations.txt" \
    --judgements "crowd=$judgements/CrowdFlowerAnnotations.txt"
}

names="cca infonce vsepp vse0 twobranch scan"
for name in $names; do judged runs/f8k_"$name"/seed-*/test.h5 --out "$results/$name.json"; done
for pair in "infonce twobranch" "infonce vsepp" "twobranch vsepp" "vsepp vse0"; do
  set -- $pair
  judged --compare runs/f8k_"$1"/seed-*/test.h5 runs/f8k_"$2"/seed-*/test.h5 --out "$results/$1_vs_$2.json"
done
# One seed each, because CCA has no random numbers.
judged --compare runs/f8k_cca/seed-0/test.h5 runs/f8k_infonce/seed-0/test.h5 --out "$results/cca_vs_infonce_one_seed.json"
for table in summary cards; do
  for name in $names; do echo "$results/$name.json"; done | xargs vse-table "$table" --out "$results/$table.csv"
done
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
