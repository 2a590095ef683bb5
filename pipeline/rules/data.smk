# From nothing (the demo) or from published files to data/<dataset>/dataset.json.


rule demo:
    output:
        "data/demo/dataset.json",
    params:
        images=presets.load_dataset("demo").n_images,
        seed=presets.load_dataset("demo").seed,
    log:
        "logs/data_demo.log",
    shell:
        "vse-data demo --out data/demo --images {params.images} --seed {params.seed} 2>&1 | tee {log}"


rule prepare:
    output:
        "data/{dataset}/dataset.json",
    wildcard_constraints:
        dataset=r"(?!demo$)[^_/]+",
    params:
        source=source_folder,
    log:
        "logs/data_{dataset}.log",
    shell:
        "vse-data prepare {wildcards.dataset} --source {params.source:q} 2>&1 | tee {log}"
