#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE [BOXES]
#
# SOURCE is a folder for `vse-data prepare f8k`. BOXES is a JSON file of candidate boxes (docs/formats.md); without it, the runs
# on boxes are left out. The boxes of the committed results are from the detector NanoDet-g. The folder VSE_WEIGHTS_DIR holds
# tf_efficientnet_lite0.pth and all-MiniLM-L6-v2/. Two trainings run at a time, each on one core.
# The rows whose card names an NVIDIA H200 were trained on this GPU; on a processor they take hours.
set -eu
results=results/flickr8k

extract() { # EXTRACTOR FEATURE [OPTION ...]
  kind=$1 feature=$2
  shift 2
  [ -f "features/f8k_$feature.h5" ] ||
    vse-extract "$kind" --dataset data/f8k/dataset.json --feature "$feature" --set precision=fp32 "$@"
}

train() { # NAME DATASET SEED FEATURE EXPERIMENT [OPTION ...]
  name=$1 dataset=$2 seed=$3 feature=$4 experiment=$5 run=runs/$2_$1/seed-$3
  shift 5
  [ -f "$run/test.h5" ] && return
  captions=data/f8k/dataset.json
  [ "$dataset" = f8k ] || captions=data/$dataset/fold-$seed.json
  features=features/f8k_$feature.h5
  case $feature in
  backbone:*) # the embeddings of a run, for TOD-Net
    backbone=${feature#backbone:}
    features=features/${dataset}_$backbone-${seed}
    [ -f "${features}_images.h5" ] || vse-embed "runs/${dataset}_$backbone/seed-$seed" --as-features "$features"
    features=${features}_images.h5
    ;;
  esac
  vse-train --features "$features" --captions "$captions" --experiment "$experiment" --name "$name" --seed "$seed" \
    --out "$run" --threads 1 --resume --overwrite --set train.on_collapse=warn "$@"
  vse-embed "$run" --threads 1
}

if [ "$1" = train ]; then # one line of the list below
  shift
  train "$@"
  exit
fi

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
[ -f data/f8k_folds/fold-4.json ] || vse-data folds data/f8k/dataset.json --out data/f8k_folds
extract cnn effnet
extract cnn effnet_grid --set grid=4
extract cnn effnet_rc
extract text minilm
[ $# -lt 2 ] || {
  extract boxes boxes_effnet_levels --set "boxes=$2"
  # Our photographs had 224 x 224 pixels. The network reads them at this size, without a crop. It reads the same layer as
  # effnet_grid.
  extract boxes boxes_effnet_map --set "boxes=$2" --set n_boxes=36 --set thin_edges=false --set shorter=224 --set longer=448
}

small="--set model.dim=256"
order="--set train.learning_rate=1e-3 --set model.similarity.form"
warm="--set loss.name=max --set warmup.loss=sum --set warmup.epochs=1"
schedule() { # EPOCHS EPOCHS_BEFORE_DECAY
  echo "$small --set train.epochs=$1 --set train.decay_after=$2 --set train.precision=auto"
}
grid() { # EPOCHS EPOCHS_BEFORE_DECAY WARM_UP_EPOCHS
  echo "$(schedule "$1" "$2") --set train.learning_rate=5e-4 --set warmup.loss=sum --set warmup.epochs=$3"
}

ace="ace_effnet $(schedule 12 8) --set caption_feature=minilm --set model.caption_encoder=linear"
ace_recipes="preset
self_critical --set adversary.baseline=self_critical
entropy --set adversary.entropy_weight=0.1 --set adversary.entropy_of=100
score --set adversary.reward=score
score_4 --set adversary.reward=score --set adversary.samples=4
scale_10 --set adversary.scale=10
alone --set adversary.in_batch=0 --set adversary.scale=20
share_09 --set adversary.in_batch=0.9
rate --set adversary.learning_rate=2e-3
pretrained --set adversary.pretraining_epochs=4
all --set adversary.reward=score --set adversary.baseline=self_critical --set adversary.samples=4 --set adversary.pretraining_epochs=4 --set adversary.learning_rate=1e-3 --set adversary.scale=20
own_20 --set adversary.architecture=none --set adversary.scale=20
own_40 --set adversary.architecture=none --set adversary.scale=40
own_20_4 --set adversary.architecture=none --set adversary.scale=20 --set adversary.samples=4"

# NAME DATASET SEED FEATURE EXPERIMENT OPTIONS; in f8k_folds, the seed is the number of the fold.
{
  for seed in 0 1 2 3 4; do
    echo "vse0 f8k_folds $seed effnet vse0_effnet $(schedule 30 15)"
    echo "vsepp f8k_folds $seed effnet vsepp_effnet $(schedule 30 15)"
    echo "vse0_12 f8k_folds $seed effnet vse0_effnet $(schedule 12 8)"
    echo "vsepp_12 f8k_folds $seed effnet vsepp_effnet $(schedule 12 8)"
    echo "order0 f8k_folds $seed effnet order0 $(schedule 20 15) $order=squared"
    echo "orderpp f8k_folds $seed effnet order0 $(schedule 20 15) $order=squared $warm"
    echo "vsepp_grid_12_1 f8k_folds $seed effnet_grid vsepp_grid_effnet $(grid 12 8 1)"
    echo "scan_grid_12_2 f8k_folds $seed effnet_grid scan_i2t_avg_effnet $(grid 12 8 2)"
  done
  for seed in 0 1 2 3 4; do
    echo "vsepp_minilm f8k_folds $seed effnet vsepp_minilm_effnet $(schedule 12 8)"
    echo "ace_own_10_minilm f8k_folds $seed effnet $ace --set adversary.architecture=none --set adversary.scale=10"
  done
  # Runs of one fold, for validation.csv
  echo "$ace_recipes" | while read -r name options; do echo "ace_${name}_minilm f8k_folds 0 effnet $ace $options"; done
  for form in norm squared; do
    for rate in 1e-3 2e-4; do
      echo "order_sum_${form}_$rate f8k_folds 0 effnet order0 $(schedule 30 15) $order=$form --set train.learning_rate=$rate"
      echo "order_max_${form}_$rate f8k_folds 0 effnet order0 $(schedule 30 15) $order=$form --set train.learning_rate=$rate $warm"
    done
  done
  echo "scan_grid_6_1 f8k_folds 0 effnet_grid scan_i2t_avg_effnet $(grid 6 4 1)"
  echo "scan_grid_12_1 f8k_folds 0 effnet_grid scan_i2t_avg_effnet $(grid 12 8 1)"
  echo "vsepp_grid_6_1 f8k_folds 0 effnet_grid vsepp_grid_effnet $(grid 6 4 1)"
  echo "vsepp_grid_12_2 f8k_folds 0 effnet_grid vsepp_grid_effnet $(grid 12 8 2)"
  echo "vsepp_grid_12_4 f8k_folds 0 effnet_grid vsepp_grid_effnet $(grid 12 8 4)"
  echo "vsepp_grid_24_4 f8k_folds 0 effnet_grid vsepp_grid_effnet $(grid 24 16 4)"
  for seed in 0 1 2; do
    echo "vsepp_centre_36 f8k $seed effnet vsepp_effnet $(schedule 36 24)"
    echo "vsepp_crops_36 f8k $seed effnet_rc vsepp_effnet_rc $(schedule 36 24) --eval-features features/f8k_effnet.h5"
    fewer="$(grid 6 4 1 | sed 's/precision=auto/precision=fp32/') --set train.validate_every=2"
    echo "scan_cells f8k $seed effnet_grid scan_i2t_avg_effnet $fewer"
    [ $# -lt 2 ] || echo "scan_boxes f8k $seed boxes_effnet_map scan_i2t_avg_effnet $fewer"
    [ $# -lt 2 ] || echo "vsepp_boxes f8k $seed boxes_effnet_levels vsepp_grid_effnet $(grid 12 8 1)"
    echo "scan_adversary_cells f8k $seed effnet_grid scan_adversary_effnet $fewer"
    [ $# -lt 2 ] || echo "scan_adversary_boxes f8k $seed boxes_effnet_map scan_adversary_effnet $fewer"
  done
} | xargs -P 2 -I {} sh -c "sh '$0' train {}"
todnet="todnet_effnet --set train.validate_images=null"
while read -r name options; do
  train "$name" f8k_folds 0 backbone:vsepp_12 $todnet $options
done <<END
todnet_preset
todnet_long --set train.epochs=20 --set train.decay_after=14
todnet_tanh --set model.similarity.scale=exp_tanh
todnet_fast --set train.learning_rate=1e-3
todnet_wide --set model.similarity.width=1024
END

# TOD-Net on the finished backbone vsepp_minilm of its fold. A run takes 20 minutes on a busy core, half of it for the scores.
for seed in 0 1 2 3 4; do
  train todnet_minilm f8k_folds "$seed" backbone:vsepp_minilm todnet_effnet --set train.validate_images=500
done
{
  echo experiment,loss,rsum,deformation # of each epoch, rsum on the first 500 validation images
  for seed in 0 1 2 3 4; do
    tail -n +2 "runs/f8k_folds_todnet_minilm/seed-$seed/metrics.csv" |
      awk -F, -v fold="$seed" '{ printf "fold %s epoch %s,%.4f,%.2f,%.4f\n", fold, $1, $3, $10, $11 }'
  done
} > "$results/todnet.csv"

evaluate() { # DATASET NAME
  vse-eval runs/"$1_$2"/seed-*/test.h5 --out "$results/$2.json"
}

compare() { # DATASET NAME NAME
  vse-eval --compare runs/"$1_$2"/seed-*/test.h5 runs/"$1_$3"/seed-*/test.h5 --out "$results/$2_vs_$3.json"
}

names="vse0 vsepp order0 orderpp vsepp_grid_12_1 scan_grid_12_2 vsepp_minilm ace_own_10_minilm todnet_minilm"
for name in $names vse0_12 vsepp_12; do evaluate f8k_folds "$name"; done
[ $# -lt 2 ] || for name in vsepp_boxes scan_boxes scan_adversary_boxes; do evaluate f8k $name && names="$names $name"; done
for name in vsepp_centre_36 vsepp_crops_36 scan_cells scan_adversary_cells; do evaluate f8k $name && names="$names $name"; done
compare f8k vsepp_crops_36 vsepp_centre_36
compare f8k scan_adversary_cells scan_cells
[ $# -lt 2 ] || {
  compare f8k scan_boxes scan_cells
  compare f8k scan_adversary_boxes scan_boxes
}
compare f8k_folds vsepp vse0
compare f8k_folds vsepp_12 vse0_12
compare f8k_folds orderpp order0
compare f8k_folds ace_own_10_minilm vsepp_minilm
compare f8k_folds todnet_minilm vsepp_minilm
vse-eval --compare runs/f8k_folds_vsepp/seed-0/test.h5 runs/f8k_folds_vse0/seed-0/test.h5 \
  --out "$results/vsepp_vs_vse0_one_fold.json"
compare f8k_folds scan_grid_12_2 vsepp_grid_12_1
for table in summary cards; do
  for name in $names; do echo "$results/$name.json"; done | xargs vse-table "$table" --out "$results/$table.csv"
done
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
