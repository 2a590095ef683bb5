# Evaluate embeddings, and write tables and reports of the results.


localrules:
    ladder,
    published_table,


rule evaluate:
    input:
        embeddings=test_embeddings,
        validation=validation_embeddings,
    output:
        report(
            "results/{dataset}_{experiment}.json",
            caption="captions/result.rst",
            category="{dataset}",
            subcategory="Results",
            labels={"experiment": "{experiment}", "file": "metrics (JSON)"},
        ),
    log:
        "logs/eval_{dataset}_{experiment}.log",
    params:
        options=evaluation_options,
    shell:
        "vse-eval {input.embeddings} {params.options} --device cpu --out {output} 2>&1 | tee {log}"


# Evaluate with a correction of hubs. The queries of the training split are the bank that the correction is fitted on.
rule evaluate_corrected:
    input:
        embeddings=test_embeddings,
        bank=bank_embeddings,
    output:
        "results/corrected/{dataset}_{experiment}_{correction}.json",
    log:
        "logs/eval_{dataset}_{experiment}_{correction}.log",
    wildcard_constraints:
        correction="|".join(CORRECTIONS),
    shell:
        "vse-eval {input.embeddings} --correct {wildcards.correction} --device cpu --out {output} 2>&1 | tee {log}"


# An HTML page with metrics, training curves, and the images and captions that queries find.
rule report:
    input:
        result="results/{dataset}_{experiment}.json",
        embeddings=test_embeddings,
        parts=report_files,
    output:
        report(
            "results/{dataset}_{experiment}.html",
            caption="captions/report.rst",
            category="{dataset}",
            subcategory="Results",
            labels={"experiment": "{experiment}", "file": "page"},
        ),
    log:
        "logs/report_{dataset}_{experiment}.log",
    shell:
        "vse-report {input.result} --out {output} 2>&1 | tee {log}"


rule summary:
    input:
        lambda wildcards: [f"results/{wildcards.dataset}_{e}.json" for e in SETTINGS.experiments],
    output:
        report(
            "results/tables/summary_{dataset}.csv",
            caption="captions/table.rst",
            category="Tables",
            labels={"table": "summary of {dataset}", "file": "CSV"},
        ),
    log:
        "logs/summary_{dataset}.log",
    shell:
        "vse-table summary {input} --out {output} 2>&1 | tee {log}"


# A table and a chart of a ladder (config/ladders): image features x caption features x experiments x seeds, with their costs.
rule ladder:
    input:
        ladder_results,
    output:
        table=report(
            "results/tables/ladder_{dataset}.csv",
            caption="captions/table.rst",
            category="Tables",
            labels={"table": "ladder of {dataset}", "file": "CSV"},
        ),
        picture=report(
            "results/tables/ladder_{dataset}.svg",
            caption="captions/table.rst",
            category="Tables",
            labels={"table": "ladder of {dataset}", "file": "chart"},
        ),
    log:
        "logs/ladder_{dataset}.log",
    shell:
        "(vse-table ladder {input} --out {output.table} && vse-table ladder {input} --out {output.picture}) 2>&1 | tee {log}"


# A published table with our metrics next to the printed ones, e.g. results/tables/vsepp_4.csv.
rule published_table:
    input:
        published_table_results,
    output:
        report(
            "results/tables/{table}.{suffix}",
            caption="captions/table.rst",
            category="Tables",
            labels={"table": "{table}", "file": "{suffix}"},
        ),
    log:
        "logs/table_{table}_{suffix}.log",
    wildcard_constraints:
        table="|".join(published_table_names()),
        suffix="csv|tex",
    params:
        dataset=f"--dataset {SETTINGS.dataset}" if SETTINGS.dataset else "",
    shell:
        "vse-table {wildcards.table} {input} {params.dataset} --out {output} 2>&1 | tee {log}"
