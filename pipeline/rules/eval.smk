# From embeddings to results, and from results to tables.


rule evaluate:
    input:
        embeddings_of_seeds,
    output:
        "results/{dataset}_{experiment}.json",
    log:
        "logs/eval_{dataset}_{experiment}.log",
    params:
        protocols=protocols,
    shell:
        "vse-eval {input} {params.protocols} --out {output} 2>&1 | tee {log}"


rule summary:
    input:
        lambda wildcards: [f"results/{wildcards.dataset}_{e}.json" for e in SETTINGS.experiments],
    output:
        "results/tables/summary_{dataset}.csv",
    log:
        "logs/summary_{dataset}.log",
    shell:
        "vse-table summary {input} --out {output} 2>&1 | tee {log}"
