# From a feature cache to a run, and from a run to the embeddings of the test split.


rule train:
    input:
        features=training_features,
        caption_features=caption_features,
        truth_features=truth_features,
        dataset="data/{dataset}/dataset.json",
        base=base_run,
    # The record alone is declared, because Snakemake deletes the outputs of a job before it starts and when it fails:
    # the checkpoint must outlive both. vse-train writes state = finished into it last.
    output:
        "runs/{dataset}_{experiment}/seed-{seed}/run.json",
    log:
        "logs/train_{dataset}_{experiment}_seed-{seed}.log",
    threads: SETTINGS.threads
    resources:
        **gpus("train"),
        mem_mb=4000,
    params:
        settings=experiment_settings,
    shell:
        "vse-train --features {input.features[0]} --captions {input.dataset} --experiment {wildcards.experiment} "
        "--seed {wildcards.seed} --out runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} "
        "--resume --overwrite --threads {threads} 2>&1 | tee {log}"


rule embed:
    input:
        features=evaluation_features,
        caption_features=caption_features,
        dataset="data/{dataset}/dataset.json",
        record=rules.train.output,
    output:
        "runs/{dataset}_{experiment}/seed-{seed}/{split}.h5",
    log:
        "logs/embed_{dataset}_{experiment}_seed-{seed}_{split}.log",
    wildcard_constraints:
        split="train|val|test|restval",
    threads: SETTINGS.threads
    resources:
        **gpus("embed"),
        mem_mb=4000,
    shell:
        "vse-embed runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} --split {wildcards.split} "
        "--features {input.features} --captions {input.dataset} --out {output} "
        "--threads {threads} 2>&1 | tee {log}"


# How captions score images by their phrases, of a run that localises these, to be combined with an image-sentence model.
rule embed_sentences:
    input:
        features=evaluation_features,
        caption_features=caption_features,
        dataset="data/{dataset}/dataset.json",
        record=rules.train.output,
    output:
        "runs/{dataset}_{experiment}/seed-{seed}/{split}_sentences.h5",
    log:
        "logs/embed_{dataset}_{experiment}_seed-{seed}_{split}_sentences.log",
    wildcard_constraints:
        split="train|val|test|restval",
    threads: SETTINGS.threads
    resources:
        **gpus("embed_sentences"),
        mem_mb=8000,
    shell:
        "vse-embed runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} --sentences "
        "--split {wildcards.split} --features {input.features} --captions {input.dataset} --out {output} "
        "--threads {threads} 2>&1 | tee {log}"


# The embeddings of a run as features, on which an experiment trains whose preset names the run's as its backbone.
rule embed_as_features:
    input:
        features=evaluation_features,
        caption_features=caption_features,
        dataset="data/{dataset}/dataset.json",
        record=rules.train.output,
    output:
        images="features/{dataset}_{experiment}-{seed}_images.h5",
        captions="features/{dataset}_{experiment}-{seed}_captions.h5",
    log:
        "logs/embed_{dataset}_{experiment}_seed-{seed}_as_features.log",
    threads: SETTINGS.threads
    resources:
        **gpus("embed_as_features"),
        mem_mb=8000,
    shell:
        "vse-embed runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} "
        "--as-features features/{wildcards.dataset}_{wildcards.experiment}-{wildcards.seed} "
        "--features {input.features} --captions {input.dataset} --threads {threads} 2>&1 | tee {log}"
