# Train runs on feature caches, and write the embeddings of trained runs.


rule train:
    input:
        features=training_caches,
        caption_features=caption_cache,
        truth_features=truth_cache,
        dataset=dataset_file,
        base=base_run,
        parts=cache_parts(training_caches, caption_cache, truth_cache),
    # Without a storage, only the record is declared as an output. Snakemake deletes the outputs of a job before it starts and
    # when it fails, but the checkpoint must survive both. At the end vse-train writes "finished" into the record.
    output:
        *run_files("runs/{dataset}_{experiment}/seed-{seed}"),
        *map(touch, transformer_files("runs/{dataset}_{experiment}/seed-{seed}")),
    log:
        "logs/train_{dataset}_{experiment}_seed-{seed}.log",
    threads: SETTINGS.threads
    resources:
        **gpu_resources("train"),
        mem_mb=4000,
    params:
        settings=experiment_settings,
    shell:
        "vse-train --features {input.features[0]} --captions {input.dataset} --experiment {wildcards.experiment} "
        "--seed {wildcards.seed} --out runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} "
        "--resume --overwrite --threads {threads} 2>&1 | tee {log}"


rule embed:
    input:
        features=evaluation_cache,
        caption_features=caption_cache,
        dataset=dataset_file,
        record=rules.train.output,
        parts=cache_parts(evaluation_cache, caption_cache),
    output:
        "runs/{dataset}_{experiment}/seed-{seed}/{split}.h5",
    log:
        "logs/embed_{dataset}_{experiment}_seed-{seed}_{split}.log",
    wildcard_constraints:
        split="train|val|test|restval",
    threads: SETTINGS.threads
    resources:
        **gpu_resources("embed"),
        mem_mb=4000,
    shell:
        "vse-embed runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} --split {wildcards.split} "
        "--features {input.features} --captions {input.dataset} --out {output} "
        "--threads {threads} 2>&1 | tee {log}"


# The scores of images by the phrases of captions, for a run that localises phrases. An ensemble combines them with an
# image-sentence model.
rule embed_sentences:
    input:
        features=evaluation_cache,
        caption_features=caption_cache,
        dataset=dataset_file,
        record=rules.train.output,
        parts=cache_parts(evaluation_cache, caption_cache),
    output:
        "runs/{dataset}_{experiment}/seed-{seed}/{split}_sentences.h5",
    log:
        "logs/embed_{dataset}_{experiment}_seed-{seed}_{split}_sentences.log",
    wildcard_constraints:
        split="train|val|test|restval",
    threads: SETTINGS.threads
    resources:
        **gpu_resources("embed_sentences"),
        mem_mb=8000,
    shell:
        "vse-embed runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} --sentences "
        "--split {wildcards.split} --features {input.features} --captions {input.dataset} --out {output} "
        "--threads {threads} 2>&1 | tee {log}"


# The embeddings of a run as features. An experiment trains on them if its preset has the run's experiment as its backbone.
rule embed_as_features:
    input:
        features=evaluation_cache,
        caption_features=caption_cache,
        dataset=dataset_file,
        record=rules.train.output,
        parts=cache_parts(evaluation_cache, caption_cache),
    output:
        images="features/{dataset}_{experiment}-{seed}_images.h5",
        captions="features/{dataset}_{experiment}-{seed}_captions.h5",
        shards=[
            directory(folder)
            for name in ("images", "captions")
            for folder in stored(f"features/{{dataset}}_{{experiment}}-{{seed}}_{name}.shards")
        ],
    log:
        "logs/embed_{dataset}_{experiment}_seed-{seed}_as_features.log",
    threads: SETTINGS.threads
    resources:
        **gpu_resources("embed_as_features"),
        mem_mb=8000,
    shell:
        "vse-embed runs/{wildcards.dataset}_{wildcards.experiment}/seed-{wildcards.seed} "
        "--as-features features/{wildcards.dataset}_{wildcards.experiment}-{wildcards.seed} "
        "--features {input.features} --captions {input.dataset} --threads {threads} 2>&1 | tee {log}"
