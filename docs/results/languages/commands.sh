#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE CAPTIONS
#
# SOURCE is a folder for `vse-data prepare f8k`, and CAPTIONS a JSON object from file names to German captions (Multi30k,
# task 2, restricted to the photographs of Flickr8k). The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite0.pth.
set -eu
results=results/languages
folder=$(dirname "$0")
dataset=data/f8k_de/dataset.json

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
[ -f features/f8k_effnet.h5 ] || vse-extract cnn --dataset data/f8k/dataset.json --feature effnet --set precision=fp32
[ -f "$dataset" ] || vse-data add-captions data/f8k/dataset.json --language de --file "$2"
[ -f e5.npz ] || python "$folder/encode.py" "$dataset" e5.npz
[ -f features/f8k_de_e5.h5 ] ||
  vse-data import-npy e5.npz --dataset "$dataset" --out-features features/f8k_de_e5.h5 --kind text
[ -f features/f8k_de_tfidf.h5 ] || vse-extract tfidf --dataset "$dataset" --feature tfidf --out features/f8k_de_tfidf.h5
[ -f shuffled.json ] || vse-data noise "$dataset" --rate 1 --out shuffled.json

runs=runs/languages
learning_rates="1e-4 2e-4 5e-4 1e-3"

train() { # NAME SEED LEARNING_RATE
  name=$1 seed=$2 learning_rate=$3 run=$runs/$1-$3/seed-$2 feature=e5 options=""
  [ -f "$run/test.h5" ] && return
  case $name in
    *_tfidf) languages=${name%_tfidf} feature=tfidf ;;
    both) languages=en,de ;;
    shuffled) languages=de options="--noise shuffled.json --set train.on_collapse=warn" ;;
    *) languages=$name ;;
  esac
  vse-train --features features/f8k_effnet.h5 --captions "$dataset" --caption-features "features/f8k_de_$feature.h5" \
    --experiment infonce_minilm_effnet --set model.dim=512 --set train.epochs=8 --set train.decay_after=6 \
    --set train.batch_size=256 --set train.learning_rate="$learning_rate" --set train.precision=fp32 --languages "$languages" \
    --name "$name" --seed "$seed" --out "$run" --threads 1 --resume --overwrite $options
  vse-embed "$run" --threads 1
}

best_rsum() { # RUN: the highest rsum on the validation split
  sed -n 's/.*"best_rsum": \([0-9.]*\).*/\1/p' "$1/run.json"
}

best_rate() { # NAME: the learning rate with the highest rsum of seed 0 on the validation split
  for learning_rate in $learning_rates; do
    echo "$(best_rsum "$runs/$1-$learning_rate/seed-0") $learning_rate"
  done | sort -n | tail -1 | cut -d ' ' -f 2
}

tests() { # NAME: the test embeddings of all seeds
  echo "$runs/$1-$(best_rate "$1")"/seed-*/test.h5
}

names="en de both shuffled en_tfidf de_tfidf"
for name in $names; do
  for learning_rate in $learning_rates; do train "$name" 0 "$learning_rate"; done
  for seed in 1 2; do train "$name" "$seed" "$(best_rate "$name")"; done
done
{
  echo name,learning_rate,rsum_val,selected
  for name in $names; do
    for learning_rate in $learning_rates; do
      selected=no
      [ "$(best_rate "$name")" = "$learning_rate" ] && selected=yes
      echo "$name,$learning_rate,$(best_rsum "$runs/$name-$learning_rate/seed-0"),$selected"
    done
  done
} > "$results/validation.csv"

for name in $names; do
  for language in en de; do
    vse-eval $(tests "$name") --protocol full --language "$language" --out "$results/${name}_on_$language.json"
  done
  vse-eval $(tests "$name") --pairs en:de --out "$results/${name}_pairs.json"
done
compare() { # NAME NAME LANGUAGE
  vse-eval --compare $(tests "$1") $(tests "$2") --protocol full --language "$3" \
    --out "$results/$1_vs_$2_on_$3.json"
}
compare de en de
compare both de de
compare both en en
vse-eval --compare $(tests both) $(tests en) --pairs en:de --out "$results/both_vs_en_pairs.json"
for table in summary cards; do
  for name in $names; do echo "$results/${name}_on_en.json" "$results/${name}_on_de.json"; done | xargs vse-table "$table" --out "$results/$table.csv"
done
for name in $names; do echo "$results/${name}_pairs.json"; done | xargs vse-table summary --out "$results/pairs.csv"
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
