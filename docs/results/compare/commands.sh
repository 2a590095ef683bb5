#!/bin/sh
# Repeat the results of this folder, after ../judged/commands.sh, in the same current folder.
set -eu
for name in cca infonce vsepp vse0 twobranch; do echo "results/judged/$name.json"; done |
  xargs vse-table compare --out results/compare/compare.csv
