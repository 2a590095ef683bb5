# From embeddings to results, and from results to tables.


localrules:
    published_table,


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


# A published table with our figures beside the printed ones: results/tables/vsepp_4.csv, say.
rule published_table:
    input:
        results_of_table,
    output:
        "results/tables/{table}.{suffix}",
    log:
        "logs/table_{table}_{suffix}.log",
    wildcard_constraints:
        table="|".join(published.published_tables()),
        suffix="csv|tex",
    params:
        dataset=f"--dataset {SETTINGS.dataset}" if SETTINGS.dataset else "",
    shell:
        "vse-table {wildcards.table} {input} {params.dataset} --out {output} 2>&1 | tee {log}"
