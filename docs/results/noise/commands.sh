#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE
#
# SOURCE is a folder for `vse-data prepare f8k`. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite0.pth and
# all-MiniLM-L6-v2/. Two trainings run at a time, each on one core.
set -eu
results=results/noise
runs=runs/noise
heads="mh sh infonce sigmoid gce"
rates="0.2 0.4 0.6"
learning_rates="1e-4 2e-4 5e-4 1e-3 2e-3"

train() { # HEAD NOISE SEED LEARNING_RATE, where NOISE is clean or the name of a noise file
  head=$1 noise=$2 seed=$3 learning_rate=$4 run=$runs/$1-$2-$4/seed-$3
  [ -f "$run/run.json" ] && grep -q '"state": "finished"' "$run/run.json" && return
  case $head in
    mh) experiment=vsepp_effnet options="--set warmup.loss=sum --set warmup.epochs=1 --set train.on_collapse=warn" ;;
    sh) experiment=vse0_effnet options="" ;;
    *) experiment=${head}_minilm_effnet options="" ;;
  esac
  [ "$noise" = clean ] || options="$options --noise noise/$noise.json"
  vse-train --features features/f8k_effnet.h5 --experiment "$experiment" --set model.caption_encoder=linear \
    --set caption_feature=minilm --set model.dim=512 --set train.epochs=8 --set train.decay_after=6 --set train.batch_size=256 \
    --set train.clip=null --set train.precision=fp32 --set train.learning_rate="$learning_rate" $options --seed "$seed" \
    --name "$head, ${noise%-?}" --out "$run" --threads 1 --resume --overwrite
}

best_rsum() { # RUN: the highest rsum on the validation split
  sed -n 's/.*"best_rsum": \([0-9.]*\).*/\1/p' "$1/run.json"
}

best_rate() { # HEAD NOISE: the learning rate with the highest rsum of seed 0 on the validation split
  for learning_rate in $learning_rates; do
    echo "$(best_rsum "$runs/$1-$2-$learning_rate/seed-0") $learning_rate"
  done | sort -n | tail -1 | cut -d ' ' -f 2
}

embed() { # RUN
  [ -f "$1/test.h5" ] || vse-embed "$1" --threads 1
  [ -f "$1/test_last.h5" ] || vse-embed "$1" --threads 1 --last-epoch
}

final() { # HEAD RATE FILE SEED: train with the learning rate that was selected on file 0, and embed
  noise=$2-$3
  [ "$2" = 0 ] && noise=clean
  run=$runs/$1-$noise-$(best_rate "$1" "$(echo "$noise" | sed 's/-1$/-0/')")/seed-$4
  train "$1" "$noise" "$4" "$(best_rate "$1" "$(echo "$noise" | sed 's/-1$/-0/')")"
  embed "$run"
}

if [ "$1" = train ] || [ "$1" = final ]; then # one line of the lists below
  "$@"
  exit
fi

[ -f data/f8k/dataset.json ] || vse-data prepare f8k --source "$1"
[ -f features/f8k_effnet.h5 ] || vse-extract cnn --dataset data/f8k/dataset.json --feature effnet --set precision=fp32
[ -f features/f8k_minilm.h5 ] || vse-extract text --dataset data/f8k/dataset.json --feature minilm --set precision=fp32
[ -f features/f8k_tfidf.h5 ] || vse-extract tfidf --dataset data/f8k/dataset.json --feature tfidf
mkdir -p noise
for rate in $rates; do
  for file in 0 1; do
    [ -f "noise/$rate-$file.json" ] || vse-data noise data/f8k/dataset.json --rate "$rate" --seed "$file" --out "noise/$rate-$file.json"
  done
done

# Select the learning rate of each head at each rate of noise.
for head in $heads; do
  for noise in clean 0.2-0 0.4-0 0.6-0; do
    for learning_rate in $learning_rates; do echo "$head $noise 0 $learning_rate"; done
  done
done | xargs -P 2 -I {} sh -c "sh '$0' train {}"
{
  echo head,noise,learning_rate,rsum_val,selected
  for head in $heads; do
    for noise in clean 0.2-0 0.4-0 0.6-0; do
      for learning_rate in $learning_rates; do
        selected=no
        [ "$(best_rate "$head" "$noise")" = "$learning_rate" ] && selected=yes
        echo "$head,$noise,$learning_rate,$(best_rsum "$runs/$head-$noise-$learning_rate/seed-0"),$selected"
      done
    done
  done
} > "$results/validation.csv"

# A control: gce with q near 0 is InfoNCE with the temperature and the masks of gce.
{
  echo noise,q,learning_rate,rsum_val
  for noise in 0.4-0 0.6-0; do
    for learning_rate in 2e-4 5e-4; do
      run=$runs/control-$noise-$learning_rate/seed-0
      [ -f "$run/run.json" ] || vse-train --features features/f8k_effnet.h5 --experiment gce_minilm_effnet --set loss.q=0.001 \
        --set model.caption_encoder=linear --set caption_feature=minilm --set model.dim=512 --set train.epochs=8 \
        --set train.decay_after=6 --set train.batch_size=256 --set train.clip=null --set train.precision=fp32 \
        --set train.learning_rate="$learning_rate" --noise "noise/$noise.json" --out "$run" --threads 1 > /dev/null
      echo "$noise,0.001,$learning_rate,$(best_rsum "$run")"
    done
  done
} > "$results/control.csv"

# Three seeds for each noise file: 0 to 2 for file 0, 3 to 5 for file 1. CCA has no random numbers and no learning rate.
for head in $heads; do
  for seed in 0 1 2; do
    echo "$head 0 0 $seed"
    for rate in $rates; do
      echo "$head $rate 0 $seed"
      echo "$head $rate 1 $((seed + 3))"
    done
  done
done | xargs -P 2 -I {} sh -c "sh '$0' final {}"

cca() { # FEATURE NOISE SEED, where NOISE is clean or the name of a noise file
  run=$runs/cca_$1-$2/seed-$3 options=""
  [ -f "$run/test.h5" ] && return
  [ "$2" = clean ] || options="--noise noise/$2.json"
  vse-train --features features/f8k_effnet.h5 --caption-features "features/f8k_$1.h5" --experiment cca_minilm_effnet $options \
    --seed "$3" --name "cca_$1, ${2%-?}" --out "$run" --threads 1 --resume --overwrite
  vse-embed "$run" --threads 1
}
for feature in minilm tfidf; do
  cca "$feature" clean 0
  for rate in $rates; do
    for file in 0 1; do cca "$feature" "$rate-$file" "$file"; done
  done
done

evaluate() { # OUT FILE ...
  out=$results/$1.json
  shift
  [ -f "$out" ] || vse-eval "$@" --protocol full --out "$out"
}
for head in $heads; do
  chosen=$runs/$head-clean-$(best_rate "$head" clean)
  evaluate "$head-clean" "$chosen"/seed-*/test.h5
  evaluate "$head-clean-last" "$chosen"/seed-*/test_last.h5
  for rate in $rates; do
    learning_rate=$(best_rate "$head" "$rate-0")
    first=$runs/$head-$rate-0-$learning_rate second=$runs/$head-$rate-1-$learning_rate
    evaluate "$head-$rate" "$second"/seed-[3-5]/test.h5 "$first"/seed-[0-2]/test.h5
    evaluate "$head-$rate-last" "$second"/seed-[3-5]/test_last.h5 "$first"/seed-[0-2]/test_last.h5
  done
done
for feature in minilm tfidf; do
  evaluate "cca_$feature-clean" "$runs/cca_$feature-clean/seed-0/test.h5"
  for rate in $rates; do
    evaluate "cca_$feature-$rate" "$runs/cca_$feature-$rate-0/seed-0/test.h5" "$runs/cca_$feature-$rate-1/seed-1/test.h5"
  done
done
for rate in 0.4 0.6; do
  learning_rate=$(best_rate gce "$rate-0") other=$(best_rate infonce "$rate-0")
  [ -f "$results/gce_vs_infonce-$rate.json" ] || vse-eval --compare \
    "$runs/gce-$rate-1-$learning_rate"/seed-[3-5]/test.h5 "$runs/gce-$rate-0-$learning_rate"/seed-[0-2]/test.h5 \
    "$runs/infonce-$rate-1-$other"/seed-[3-5]/test.h5 "$runs/infonce-$rate-0-$other"/seed-[0-2]/test.h5 \
    --protocol full --out "$results/gce_vs_infonce-$rate.json"
done
[ -f "$results/gce_vs_infonce-clean.json" ] || vse-eval --compare \
  "$runs/gce-clean-$(best_rate gce clean)"/seed-*/test.h5 "$runs/infonce-clean-$(best_rate infonce clean)"/seed-*/test.h5 \
  --protocol full --out "$results/gce_vs_infonce-clean.json"
ls "$results"/*.json | grep -v last.json | xargs vse-table summary --out "$results/summary.csv"
ls "$results"/*-last.json | xargs vse-table summary --out "$results/last.csv"
ls "$results"/*.json | grep -v last.json | xargs vse-table cards --out "$results/cards.csv"
vse-table significance "$results"/*_vs_*.json --out "$results/comparisons.csv"
python "$(dirname "$0")/curves.py"
