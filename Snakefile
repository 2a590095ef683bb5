# data set -> feature cache -> run -> embeddings -> result -> table, report
# For example: snakemake --cores all results/demo_vsepp.html
from snakemake.utils import min_version

min_version("9.0")


include: "pipeline/rules/storage.smk"
include: "pipeline/rules/common.smk"
include: "pipeline/rules/data.smk"
include: "pipeline/rules/features.smk"
include: "pipeline/rules/train.smk"
include: "pipeline/rules/eval.smk"


# On a cluster these rules run where snakemake runs. All others are jobs of the cluster.
localrules:
    all,
    demo,
    prepare,
    merge,
    summary,


rule all:
    default_target: True
    input:
        "results/demo_vsepp.html",
