# Write data/<dataset>/dataset.json: draw the demo, or prepare published files.


rule demo:
    output:
        "data/demo/dataset.json",
        *map(directory, stored("data/demo/images")),
    log:
        "logs/data_demo.log",
    params:
        images=load_or_stop(presets.load_dataset_preset, "demo").n_images,
        seed=load_or_stop(presets.load_dataset_preset, "demo").seed,
    shell:
        "vse-data demo --out data/demo --images {params.images} --seed {params.seed} 2>&1 | tee {log}"


rule prepare:
    input:
        require_published_files,
    output:
        "data/{dataset}/dataset.json",
        *map(directory, stored("data/{dataset}/images")),
    log:
        "logs/data_{dataset}.log",
    wildcard_constraints:
        dataset=rf"(?!demo/)(?:{build_dataset_pattern()})",
    shell:
        "vse-data prepare {wildcards.dataset} 2>&1 | tee {log}"


# A fold of a cross-validation.
rule fold:
    input:
        lambda wildcards: find_dataset_file(Path("data", dataset_preset(wildcards).folds_of)).as_posix(),
    output:
        "data/{dataset}/fold-{number}.json",
    log:
        "logs/data_{dataset}_fold-{number}.log",
    wildcard_constraints:
        number=r"\d+",
    params:
        n_folds=lambda wildcards: dataset_preset(wildcards).folds,
        seed=lambda wildcards: dataset_preset(wildcards).seed,
    shell:
        "vse-data folds {input} --out data/{wildcards.dataset} --count {params.n_folds} --seed {params.seed} "
        "--only {wildcards.number} 2>&1 | tee {log}"
