#!/bin/sh
# Repeat the results of this folder in the current folder.
#
#   sh commands.sh SOURCE
#
# SOURCE holds Karpathy's dataset_flickr8k.json and the folder images. The folder VSE_WEIGHTS_DIR holds tf_efficientnet_lite2.pth and
# all-MiniLM-L6-v2/.
set -eu
results=results/quickstart
python - "$1" <<'END'
import csv, json, random, shutil, sys
from pathlib import Path

source = Path(sys.argv[1])
images = json.loads((source / "dataset_flickr8k.json").read_text())["images"]
Path("photos").mkdir(exist_ok=True)
with open("captions.csv", "w", newline="") as stream:
    table = csv.writer(stream)
    table.writerow(["file", "caption"])
    for image in random.Random(1).sample(images, 300):
        shutil.copy(source / "images" / image["filename"], "photos")
        table.writerow([image["filename"], image["sentences"][0]["raw"]])
END
vse quickstart photos captions.csv
for k in 0 1 2 3 4; do
  for name in few_pairs few_pairs_preset; do
    case $name in
    few_pairs) set -- --set 'solver.regularization=[0.1, 0.3, 1, 3, 10, 30]' ;;
    *) set -- ;;
    esac
    vse-train --features features/photos_effnet2.h5 --captions data/photos_folds/fold-$k.json --caption-features features/photos_minilm.h5 \
      --experiment cca_effnet+minilm+effnet2 --name $name --out runs/photos_$name/seed-$k "$@"
    vse-embed runs/photos_$name/seed-$k
  done
done
for name in few_pairs few_pairs_preset; do
  vse-eval runs/photos_$name/seed-*/test.h5 --out $results/$name.json
done
vse-table summary $results/few_pairs.json $results/few_pairs_preset.json --out $results/summary.csv
vse-table cards $results/few_pairs.json $results/few_pairs_preset.json --out $results/cards.csv
