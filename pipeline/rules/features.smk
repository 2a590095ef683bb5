# Write features/<dataset>_<feature>.h5 from images or captions: fit an encoder of captions if needed, extract each shard in a
# job of its own, and merge the shards.


rule fit:
    input:
        dataset=whole_dataset_file,
        words=word_file,
    output:
        "features/{dataset}_{feature}.encoder.safetensors",
        *stored("features/{dataset}_{feature}.encoder.json"),
    log:
        "logs/fit_{dataset}_{feature}.log",
    threads: SETTINGS.threads
    resources:
        **gpu_resources("fit"),
        mem_mb=8000,
    params:
        settings=feature_settings,
    shell:
        "vse-extract fit --dataset {input.dataset} --feature {wildcards.feature} "
        "--out features/{wildcards.dataset}_{wildcards.feature}.h5 --threads {threads} 2>&1 | tee {log}"


rule extract:
    input:
        dataset=whole_dataset_file,
        encoder=encoder_file,
        files=input_files,
        photos=photo_folder,
    output:
        shard="features/{dataset}_{feature}.shards/shard-{shard}-of-{shards}.h5",
        record="features/{dataset}_{feature}.shards/shard-{shard}-of-{shards}.json",
    log:
        "logs/extract_{dataset}_{feature}_{shard}-of-{shards}.log",
    threads: SETTINGS.threads
    resources:
        **gpu_resources("extract"),
        mem_mb=lambda wildcards: feature_preset(wildcards).memory_mb,
    params:
        extractor=lambda wildcards: feature_preset(wildcards).extractor_name(),
        settings=feature_settings,
        images=changed_photos,
        shard=lambda wildcards: int(wildcards.shard),
        shards=lambda wildcards: int(wildcards.shards),
    shell:
        "vse-extract {params.extractor} --dataset {input.dataset} --feature {wildcards.feature} "
        "--out features/{wildcards.dataset}_{wildcards.feature}.h5 --shards {params.shards} --shard {params.shard} "
        "--threads {threads} 2>&1 | tee {log}"


rule merge:
    input:
        dataset=whole_dataset_file,
        shards=feature_shards,
        durations=fit_duration,
    output:
        cache="features/{dataset}_{feature}.h5",
        manifest="features/{dataset}_{feature}.shards/manifest.json",
    log:
        "logs/merge_{dataset}_{feature}.log",
    wildcard_constraints:
        feature=rf"(?!(?:{IMPORTED_FEATURES})\.)(?![^/.]*-\d+_(?:images|captions)\.)[^/.]+",
    params:
        shards=lambda wildcards: load_or_stop(presets.load_dataset_preset, wildcards.dataset).shards,
    shell:
        "vse-extract merge --dataset {input.dataset} --out {output.cache} --shards {params.shards} 2>&1 | tee {log}"


# The cache of a feature that the user imported. It has no inputs, so it is never written again.
rule imported:
    input:
        require_imported_cache,
    output:
        "features/{dataset}_{feature}.h5",
        *map(directory, stored("features/{dataset}_{feature}.shards")),
    log:
        "logs/imported_{dataset}_{feature}.log",
    wildcard_constraints:
        feature=IMPORTED_FEATURES,
    shell:
        "vse-extract cnn --dataset data/{wildcards.dataset}/dataset.json --feature {wildcards.feature} 2>&1 | tee {log}"
