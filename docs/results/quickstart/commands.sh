#!/bin/sh
# Repeat the results of this folder in the current folder. Finished steps are not run again.
#
#   sh commands.sh SOURCE
#
# SOURCE holds Karpathy's dataset_flickr8k.json and the folder images. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite2.pth and
# all-MiniLM-L6-v2/.
set -eu
results=results/quickstart

choose_photos() { # SOURCE COUNT: copy photographs into photos_COUNT, and write their first captions
  python - "$1" "$2" <<'END'
import csv, json, random, shutil, sys
from pathlib import Path

source, count = Path(sys.argv[1]), int(sys.argv[2])
images = json.loads((source / "dataset_flickr8k.json").read_text())["images"]
folder = Path(f"photos_{count}")
folder.mkdir(exist_ok=True)
with open(f"captions_{count}.csv", "w", newline="") as stream:
    table = csv.writer(stream)
    table.writerow(["file", "caption"])
    for image in random.Random(1).sample(images, count):
        shutil.copy(source / "images" / image["filename"], folder)
        table.writerow([image["filename"], image["sentences"][0]["raw"]])
END
}

for count in 300 1500; do
  data=data/photos_$count images=features/photos_${count}_effnet2.h5 captions=features/photos_${count}_minilm.h5
  if [ ! -f "$data/dataset.json" ]; then
    choose_photos "$1" "$count"
    vse-data import "photos_$count" --captions "captions_$count.csv" --out "$data"
    vse-data folds "$data/dataset.json" --out "${data}_folds" --count 5
  fi
  [ -f "$images" ] || vse-extract cnn --dataset "$data/dataset.json" --feature effnet2 --out "$images"
  [ -f "$captions" ] || vse-extract text --dataset "$data/dataset.json" --feature minilm --out "$captions"
  for head in cca cca_preset infonce; do
    case $head in
      cca) set -- "$1" cca_effnet+minilm+effnet2 --set 'solver.regularization=[0.1, 0.3, 1, 3, 10, 30]' ;;
      cca_preset) set -- "$1" cca_effnet+minilm+effnet2 ;;
      infonce) set -- "$1" infonce_minilm_effnet+minilm+effnet2 ;;
    esac
    source=$1
    shift
    for k in 0 1 2 3 4; do
      run=runs/${head}_$count/seed-$k
      [ -f "$run/train.h5" ] && continue
      vse-train --features "$images" --captions "${data}_folds/fold-$k.json" --caption-features "$captions" \
        --threads 1 --name "${head}_$count" --out "$run" --experiment "$@" --resume
      for split in test val train; do vse-embed "$run" --split $split --threads 1; done
    done
    set -- "$source"
    vse-eval "runs/${head}_$count"/seed-*/test.h5 --out "$results/${head}_$count.json"
    vse-eval "runs/${head}_$count"/seed-*/test.h5 --correct inverted-softmax --out "$results/${head}_${count}_corrected.json"
  done
done
for table in summary cards; do vse-table $table "$results"/*.json --out "$results/$table.csv"; done
