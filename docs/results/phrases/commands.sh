#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE BOXES
#
# SOURCE is a folder for `vse-data prepare f8k_entities`, and BOXES a JSON file of candidate boxes (docs/formats.md). The boxes of
# the committed results are from the detector NanoDet-g. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite0.pth and
# all-MiniLM-L6-v2/. Two trainings run at a time, each on one core.
set -eu
dataset=f8k_entities
results=results/phrases

extract() { # EXTRACTOR FEATURE [OPTION ...]
  kind=$1 feature=$2
  shift 2
  [ -f "features/${dataset}_$feature.h5" ] || vse-extract "$kind" --dataset "data/$dataset/dataset.json" --feature "$feature" "$@"
}

train() { # NAME SEED EXPERIMENT [OPTION ...]
  name=$1 seed=$2 experiment=$3 run=runs/${dataset}_$1${suffix:-}/seed-$2
  shift 3
  [ -f "$run/test.h5" ] && return
  vse-train --features "features/${dataset}_${boxes:-boxes_effnet_levels}.h5" --experiment "$experiment" \
    --set "train.precision=${precision:-fp32}" --truth-features "features/${dataset}_boxes_effnet_levels_truth.h5" \
    --caption-features "features/${dataset}_minilm_phrases.h5" \
    --name "$name" --seed "$seed" --out "$run" --threads 1 --resume --overwrite "$@"
  vse-embed "$run" --threads 1
}

evaluate() { # NAME
  vse-eval runs/${dataset}_"$1"/seed-*/test.h5 --out "$results/$1.json"
}

compare() { # NAME NAME
  vse-eval --compare runs/${dataset}_"$1"/seed-*/test.h5 runs/${dataset}_"$2"/seed-*/test.h5 --out "$results/$1_vs_$2.json"
}

if [ "$1" = train ]; then # one line of the list below
  shift
  train "$@"
  exit
fi

[ -f "data/$dataset/dataset.json" ] || vse-data prepare "$dataset" --source "$1"
extract boxes boxes_effnet_levels --set "boxes=$2" --set precision=fp32
extract boxes boxes_effnet_levels_truth --set precision=fp32
extract text minilm_phrases

# NAME, EXPERIMENT and options; each line is trained with three seeds. CCA has no random numbers.
list="network phrase_network_effnet
network_truth phrase_network_truth_effnet
network_linear phrase_network_linear_effnet
network_coordinates phrase_network_effnet --set solver.coordinates=appended
embedding phrase_embedding_effnet"
{
  echo "cca 0 phrase_cca_effnet"
  echo "$list" | while read -r name experiment; do
    for seed in 0 1 2; do echo "$name $seed $experiment"; done
  done
} | xargs -P 2 -I {} sh -c "sh '$0' train {}"

# The number of proposals alone: 36 or 200 EdgeBoxes, features and training in bf16
for number in 36 200; do
  out=features/${dataset}_boxes_$number.h5
  [ -f "$out" ] || vse-extract boxes --dataset "data/$dataset/dataset.json" --feature boxes_effnet_levels \
    --set "n_boxes=$number" --set thin_edges=true --set precision=bf16 --out "$out"
  for seed in 0 1 2; do
    boxes=boxes_$number precision=bf16 train "edge_boxes_$number" "$seed" phrase_network_effnet
  done
done

# Variants of the embedding network: features and training in bf16; and of the similarity network: features in bf16, training in fp32
out=features/${dataset}_boxes_bf16.h5
[ -f "$out" ] || vse-extract boxes --dataset "data/$dataset/dataset.json" --feature boxes_effnet_levels --set "boxes=$2" \
  --set precision=bf16 --out "$out"
for seed in 0 1 2; do
  boxes=boxes_bf16 precision=bf16 suffix=_bf16 train sampling "$seed" phrase_embedding_sampling_effnet
  boxes=boxes_bf16 precision=bf16 suffix=_bf16 train embedding "$seed" phrase_embedding_effnet
  boxes=boxes_bf16 precision=bf16 suffix=_bf16 train embedding_truth "$seed" phrase_embedding_truth_effnet
  boxes=boxes_bf16 precision=bf16 suffix=_bf16 train embedding_truth_single "$seed" phrase_embedding_truth_single_effnet
  boxes=boxes_bf16 precision=bf16 suffix=_bf16 train embedding_linear_truth_single "$seed" phrase_embedding_linear_truth_single_effnet
  boxes=boxes_bf16 suffix=_bf16 train network "$seed" phrase_network_effnet
  boxes=boxes_bf16 train network_after_first "$seed" phrase_network_effnet \
    --set model.image_encoder.batch_norm=after_first --set model.caption_encoder.batch_norm=after_first
done
bf16_names="sampling embedding_truth embedding_truth_single embedding_linear_truth_single"
for name in $bf16_names; do
  vse-eval runs/${dataset}_${name}_bf16/seed-*/test.h5 --out "$results/$name.json"
done
vse-eval runs/${dataset}_embedding_bf16/seed-*/test.h5 --out "$results/embedding_bf16.json" # for its card alone
while read -r one other; do
  vse-eval --compare runs/${dataset}_"$one"_bf16/seed-*/test.h5 runs/${dataset}_"$other"_bf16/seed-*/test.h5 \
    --out "$results/${one}_vs_$other.json"
done <<END
sampling embedding
embedding embedding_truth
embedding_truth embedding_truth_single
embedding_truth_single embedding_linear_truth_single
END

names="edge_boxes_36 edge_boxes_200 cca $(echo "$list" | cut -d ' ' -f 1 | tr '\n' ' ') network_after_first"
for name in $names; do evaluate "$name"; done
compare network embedding
compare network network_truth
compare network network_linear
compare network_coordinates network
# The committed comparison names the second run f8k_entities_network, because its folder had no suffix then. It is the one on bf16 features.
vse-eval --compare runs/${dataset}_network_after_first/seed-*/test.h5 runs/${dataset}_network_bf16/seed-*/test.h5 \
  --out "$results/network_after_first_vs_network.json"
compare edge_boxes_200 edge_boxes_36
for table in summary cards; do
  for name in $names $bf16_names $([ $table = summary ] || echo embedding_bf16); do echo "$results/$name.json"; done | xargs vse-table "$table" --out "$results/$table.csv"
done
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
