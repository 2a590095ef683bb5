"""Each number on a page of results is the one in the committed file that its comment names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean

import pandas as pd
import pytest

from tests.docs.numbers import PageNumber, page_numbers, unmarked_intervals
from tests.docs.pages import ROOT
from vse.eval.tables.significance import build_printed_pairwise_table
from vse.eval.tables.table import format_text_table

_PAGE_NAMES = "choices compression flickr8k hubness judged ladder languages late_interaction noise phrases quickstart"
PAGES = [f"docs/{name}.md" for name in _PAGE_NAMES.split()]
CURVES = ROOT / "docs/results/flickr8k"
NUMBERS = [number for page in sorted(ROOT.glob("docs/**/*.md")) for number in page_numbers(page)]


@pytest.mark.parametrize("number", NUMBERS, ids=lambda number: f"{number.file.parent.name}-{number.row}-{number.column}")
def test_a_number_is_that_of_its_file(number: PageNumber) -> None:
    assert number.recompute() == number.text


@pytest.mark.parametrize("page", PAGES)
def test_every_interval_names_its_comparison(page: str) -> None:
    assert page_numbers(ROOT / page)
    assert unmarked_intervals(ROOT / page) == []


def render_judged(results: Path) -> str:
    """Return the table of the page on judgements: a row per method, and a column per protocol and metric."""
    table = pd.read_csv(results / "summary.csv")
    columns = {
        "rsum": ("full", "rsum"),
        "own R@1, i2t / t2i": ("judged-expert", "r1_own"),
        "experts: R@1": ("judged-expert", "r1"),
        "experts: nDCG@10": ("judged-expert", "ndcg10"),
        "experts: bpref": ("judged-expert", "bpref"),
        "experts: tau-c": ("judged-expert", "pairs_tau_c"),
        "crowd: R@1": ("judged-crowd", "r1"),
        "crowd: nDCG@10": ("judged-crowd", "ndcg10"),
        "crowd: tau-b": ("judged-crowd", "pairs_tau_b"),
    }
    order = table[table["protocol"] == "full"].sort_values("rsum", ascending=False)["experiment"]
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for experiment in order:
        cells = [f"`{experiment}`"]
        for protocol, metric in columns.values():
            row = table[(table["experiment"] == experiment) & (table["protocol"] == protocol)].iloc[0]
            names = [metric] if metric in table else [f"i2t_{metric}", f"t2i_{metric}"]
            cells.append(" / ".join(f"{row[name]:.1f}" for name in names))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_of_judged_metrics_is_the_committed_file() -> None:
    page = (ROOT / "docs/judged.md").read_text(encoding="utf-8")
    assert render_judged(ROOT / "docs/results/judged") in page


def render_simulation(results: Path) -> str:
    table = pd.read_csv(results / "simulation.csv")
    return "\n".join(
        f"| {row.seeds} | {row.r1_std:.1f} | {row.coverage:.1f}% | {row.false_tables:.1f}% |" for row in table.itertuples()
    )


def render_comparison(results: Path) -> str:
    lines, _, *notes = format_text_table(build_printed_pairwise_table(pd.read_csv(results / "compare.csv"))).partition("\n\n")
    return lines + "\n\n" + "".join(notes)


def test_the_tables_on_comparisons_are_the_committed_files() -> None:
    page, results = (ROOT / "docs/compare.md").read_text(encoding="utf-8"), ROOT / "docs/results/compare"
    assert render_simulation(results) in page
    assert render_comparison(results) in page


def render_hubness(summary: Path, methods: Sequence[str]) -> str:
    """Return a table of the page on hubs: rsum of each method, plain and with each correction."""
    table = pd.read_csv(summary).set_index("method")
    train = ["mean", "csls", "nnn", "inverted-softmax", "qb-norm"]
    columns = {"plain": "", **{f"`{name}`": f" + {name} (bank train)" for name in train}}
    columns["`inverted-softmax`, test bank"] = " + inverted-softmax (bank test, transductive)"
    lines = [f"| method | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for method in methods:
        rows = [table.loc[f"{method}{suffix}"] for suffix in columns.values()]
        cells = [mean_and_deviation(row["rsum"], row["rsum_std"]) for row in rows]
        lines.append(f"| {' | '.join([f'`{method}`', *cells])} |")
    return "\n".join(lines)


def test_the_table_on_hubs_is_the_committed_file() -> None:
    page, results = (ROOT / "docs/hubness.md").read_text(encoding="utf-8"), ROOT / "docs/results/hubness"
    assert render_hubness(results / "summary.csv", ["cca", "infonce", "twobranch", "vse0", "vsepp"]) in page
    assert render_hubness(results / "pairs.csv", ["scan", "maxsim_both"]) in page
    assert render_banks(results) in page
    before, after = (
        json.loads((results / f"cca{ending}.json").read_text(encoding="utf-8"))["hubness"]["i2t"]
        for ending in ("", "_inverted-softmax")
    )
    assert f"falls from {before['skewness']:.1f} to {after['skewness']:.1f}" in page
    assert f"from {before['never']:.1f}% to {after['never']:.1f}%" in page


def render_banks(results: Path) -> str:
    """Return the table of the page on hubs that compares the two banks: rsum of each model, by correction and bank."""
    own, pairs, banks = (pd.read_csv(results / f"{name}.csv") for name in ("summary", "pairs", "banks"))
    of_banks = banks.set_index(["method", "feature"])
    models = {
        "`cca` on TF-IDF": ("CCA", "effnet + tfidf", None),
        "`cca`": ("CCA", "effnet + minilm", "cca"),
        "`infonce`": ("InfoNCE", "effnet + minilm", "infonce"),
        "`twobranch`": ("two-branch", "effnet + minilm", "twobranch"),
        "`scan`": ("scan", "effnet_grid + minilm_tokens", "scan"),
        "`maxsim_both`": ("maxsim_both", "effnet_grid + minilm_tokens", "maxsim_both"),
    }
    methods = ("csls", "nnn", "inverted-softmax")
    titles = [f"`{method}`, {bank}" for method in methods for bank in ("train", "test")]
    lines = [f"| method | {' | '.join(titles)} |", "|---" * (1 + len(titles)) + "|"]
    trained = pd.concat([own, pairs]).set_index("method")
    for title, (name, feature, train_name) in models.items():
        cells = [title]
        for method in methods:
            for bank in ("train", "test, transductive"):
                suffix = f" + {method} (bank {bank})"
                same_run = train_name is not None and f"{train_name}{suffix}" in trained.index
                row = trained.loc[f"{train_name}{suffix}"] if same_run else of_banks.loc[(f"{name}{suffix}", feature)]
                cells.append(mean_and_deviation(row["rsum"], row["rsum_std"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def render_corrected_ladder(table: pd.DataFrame) -> str:
    """Return the table of the page on ladders with plain and corrected rows: a row per combination, the best ones starred."""
    table = table.assign(head=table["method"].str.partition(" + ")[0], correction=table["correction"].fillna("plain"))
    lines = ["| head | captions | plain | corrected | seconds, plain | seconds, corrected |", "|---|---|---|---|---|---|"]
    corrected = table[table["correction"] == "inverted-softmax"]
    for row in corrected.sort_values("rsum", ascending=False).itertuples():
        pair = table[(table["head"] == row.head) & (table["captions"] == row.captions)].set_index("correction")
        both = [pair.loc[name] for name in ("plain", "inverted-softmax")]
        cells = [mean_and_deviation(one["rsum"], one["rsum_std"]) + (" *" if one["best"] == "yes" else "") for one in both]
        cells += [f"{one['total_s']:.0f}" for one in both]
        lines.append(f"| {row.head} | `{row.captions}` | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_of_the_corrected_ladder_is_the_committed_file() -> None:
    page, results = (ROOT / "docs/ladder.md").read_text(encoding="utf-8"), ROOT / "docs/results/ladder"
    assert render_corrected_ladder(pd.read_csv(results / "corrected.csv")) in page
    pairs = pd.read_csv(results / "corrected_compare.csv").set_index(["a", "b"])
    assert f"{len(pairs)} comparisons" in page
    cca, infonce = (f"f8k_{head}@f8k_corrected+minilm+effnet" for head in ("cca_effnet", "infonce_minilm_effnet"))
    for ending, p in (("", "0.26"), ("_inverted-softmax", "0.67")):
        assert f"{pairs.loc[(f'{cca}{ending}', f'{infonce}{ending}'), 'p_corrected']:.2f}" == p
        assert f"p {p}" in page


def render_late_interaction(results: Path) -> str:
    """Return the table of the page on late interaction: a row per head, with the bytes of an image and the seconds."""
    table = pd.read_csv(results / "summary.csv")
    rows = table[table["protocol"] == "full"].set_index("experiment")
    lines = ["| head | vectors | bytes | i2t R@1 | t2i R@1 | rsum | training | all scores |", "|---" * 8 + "|"]
    names = [f"{head}{pooled}" for head in ("maxsim_both", "maxsim_words") for pooled in ("", "_pooled_2", "_pooled_3")]
    for name in ("mean", "scan", *names):
        row = rows.loc[name.replace("_pooled_", ", pool_regions=")]
        provenance = json.loads((results / f"{name}.json").read_text(encoding="utf-8"))["provenance"]
        regions = provenance.get("regions", {"per_image": 1, "bytes_per_image": 1024})
        cells = [f"`{name}`", f"{regions['per_image']:.0f}", f"{regions['bytes_per_image']:,.0f}"]
        cells += [mean_and_deviation(row[key], row[f"{key}_std"]) for key in ("i2t_r1", "t2i_r1", "rsum")]
        cells += [f"{mean(cost[key] for cost in provenance['costs']):.0f} s" for key in ("train_s", "embed_s")]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_on_late_interaction_is_the_committed_file() -> None:
    page, results = (ROOT / "docs/late_interaction.md").read_text(encoding="utf-8"), ROOT / "docs/results/late_interaction"
    assert render_late_interaction(results) in page
    for head, sentence in (
        ("maxsim_both", "it is {found:.1f}, instead of {exact:.1f}"),
        ("maxsim_words", "is {found:.1f}, instead of {exact:.1f}"),
    ):
        two_stages = json.loads((results / f"{head}_reranked.json").read_text(encoding="utf-8"))["rerank"][0]
        assert sentence.format(found=two_stages["rsum"], exact=two_stages["exact"]["rsum"]) in page
    rates = pd.read_csv(results / "validation.csv").set_index(["head", "learning_rate"])["rsum_val"]
    for head, of_head in rates.groupby(level=0):
        cells = [f"{of_head[head, rate]:.1f}" for rate in (2e-4, 5e-4, 1e-3)]
        assert f"| `{head}` | {' | '.join(cells)} |" in page


def render_choices(results: Path) -> str:
    """Return the table of the page on choices: a row per head, and what is right of each kind, also without the image."""
    table = pd.read_csv(results / "summary.csv").set_index(["experiment", "protocol"])
    protocols = {"all": "choices", "same type": "choices-same_type", "other type": "choices-other_type"}
    lines = ["| head | all | same type | other type | without the image |", "|---|---|---|---|---|"]
    for head in ("mean", "scan", "maxsim_words", "maxsim_both"):
        cells = [table.loc[(head, protocol)] for protocol in protocols.values()]
        texts = [mean_and_deviation(row["i2t_r1"], row["i2t_r1_std"]) for row in cells]
        alone = mean_and_deviation(cells[0]["i2t_text_alone"], cells[0]["i2t_text_alone_std"])
        lines.append(f"| {' | '.join([f'`{head}`', *texts, alone])} |")
    texts = [f"{table.loc[('mean', protocol), 'i2t_text_model']:.1f}" for protocol in protocols.values()]
    lines.append(f"| {' | '.join(['text model', *texts, ''])} |".replace("|  |", "| |"))
    return "\n".join([*lines, "| chance | 50.0 | 50.0 | 50.0 | |"])


def test_the_table_on_choices_is_the_committed_file() -> None:
    assert render_choices(ROOT / "docs/results/choices") in (ROOT / "docs/choices.md").read_text(encoding="utf-8")


def render_compression(results: Path) -> str:
    """Return the table of the page on compression: a row per codec, and rsum with and without nested training."""
    table = pd.read_csv(results / "codecs.csv")
    lines = ["| codec | bytes | plain | plain, rescored | nested | nested, rescored |", "|---|---|---|---|---|---|"]
    for (size, codec), rows in sorted(table.groupby(["bytes", "codec"]), reverse=True):
        cells = [f"`{codec}`", f"{size:,}"]
        for method in ("plain", "nested"):
            for rescored in (0, 100):
                chosen = rows[(rows["method"] == method) & (rows["rescored"] == rescored)]
                cells.append(" ".join(f"{row.rsum:.1f} ± {row.rsum_std:.1f}" for row in chosen.itertuples()))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_on_compression_is_the_committed_file() -> None:
    assert render_compression(ROOT / "docs/results/compression") in (ROOT / "docs/compression.md").read_text(encoding="utf-8")


def render_noise(table: pd.DataFrame, heads: Sequence[str], suffix: str = "") -> str:
    """Return a table of the page on noise: a row per head, and rsum at each share of wrong pairs."""
    rows = table[table["protocol"] == "full"].set_index("experiment")
    lines = ["| head | 0% | 20% | 40% | 60% |", "|---|---|---|---|---|"]
    for head in heads:
        cells = [rows.loc[f"{head}, {rate}{suffix}"] for rate in ("clean", "0.2", "0.4", "0.6")]
        lines.append(f"| `{head}` | {' | '.join(mean_and_deviation(row['rsum'], row['rsum_std']) for row in cells)} |")
    return "\n".join(lines)


def mean_and_deviation(mean: float, deviation: float) -> str:
    return f"{mean:.1f}" + ("" if pd.isna(deviation) else f" ± {deviation:.1f}")


TRAINED_HEADS = ["gce", "infonce", "sigmoid", "mh", "sh"]


def test_the_tables_on_noise_are_the_committed_files() -> None:
    page, results = (ROOT / "docs/noise.md").read_text(encoding="utf-8"), ROOT / "docs/results/noise"
    assert render_noise(pd.read_csv(results / "summary.csv"), [*TRAINED_HEADS, "cca_minilm", "cca_tfidf"]) in page
    assert render_noise(pd.read_csv(results / "last.csv"), TRAINED_HEADS, ", epoch=last") in page


def test_the_control_of_the_page_on_noise_is_the_committed_file() -> None:
    page, results = " ".join((ROOT / "docs/noise.md").read_text(encoding="utf-8").split()), ROOT / "docs/results/noise"
    control, validation = (pd.read_csv(results / f"{name}.csv") for name in ("control", "validation"))
    best = control.groupby("noise")["rsum_val"].max()
    assert f"The control reaches {best['0.4-0']:.1f} at 40% and {best['0.6-0']:.1f} at 60%" in page
    infonce = validation[validation["head"] == "infonce"]
    chosen = infonce.groupby("noise")["rsum_val"].max()
    assert f"InfoNCE reaches {chosen['0.4-0']:.1f} at 40% and {chosen['0.6-0']:.1f} at 60%" in page
    same = infonce[infonce["learning_rate"].isin(control["learning_rate"])].groupby("noise")["rsum_val"].max()
    assert f"InfoNCE reaches {same['0.4-0']:.1f} and {same['0.6-0']:.1f}" in page
    chosen = validation.query("head == 'gce' and selected == 'yes'").set_index("noise")["rsum_val"]
    assert f"with q = 0.4 reaches {chosen['0.4-0']:.1f} and {chosen['0.6-0']:.1f}" in page


def render_languages(results: Path) -> str:
    """Return the table of the page on languages: a row per training, and its metrics in each language and between them."""
    summary, pairs = (pd.read_csv(results / f"{name}.csv") for name in ("summary", "pairs"))
    trained_on = {"en": "English", "de": "German", "both": "both", "shuffled": "German, shuffled"}
    lines = ["| trained on | captions | English | German | en:de | de:en |", "|---|---|---|---|---|---|"]
    for name in ("en", "de", "both", "shuffled", "en_tfidf", "de_tfidf"):
        rows = [summary[summary["experiment"] == f"{name} ({language})"].iloc[0] for language in ("en", "de")]
        cells = [mean_and_deviation(row["rsum"], row["rsum_std"]) for row in rows]
        of_pairs = pairs[pairs["experiment"] == name].set_index("protocol")
        for protocol in ("en:de", "de:en"):
            cells.append(mean_and_deviation(of_pairs.loc[protocol, "t2t_r1"], of_pairs.loc[protocol, "t2t_r1_std"]))
        title, feature = trained_on[name.removesuffix("_tfidf")], "TF-IDF" if name.endswith("_tfidf") else "e5"
        lines.append(f"| {title} | {feature} | {' | '.join(cells)} |")
    return "\n".join(lines)


def test_the_table_on_languages_is_the_committed_file() -> None:
    page, results = (ROOT / "docs/languages.md").read_text(encoding="utf-8"), ROOT / "docs/results/languages"
    assert render_languages(results) in page
    pairs = pd.read_csv(results / "pairs.csv").set_index(["experiment", "protocol"])["t2t_r1"]
    assert f"{pairs['both', 'en:de']:.1f}% of the cases, instead of {pairs['en', 'en:de']:.1f}% after training" in page


def test_the_best_epochs_of_flickr8k_are_those_of_the_curves() -> None:
    curves, best = (pd.read_csv(CURVES / f"{name}.csv", dtype={"seeds": str}) for name in ("curves", "validation"))
    assert len(best)
    for row in best.itertuples():
        runs = curves[(curves["experiment"] == row.experiment.removesuffix(" fold 0")) & (curves["dataset"] == row.dataset)]
        of_seeds = [runs[runs["seed"] == int(seed)] for seed in row.seeds.split()]
        assert row.epochs_run == " ".join(str(one["epoch"].max()) for one in of_seeds)
        assert row.rsum == pytest.approx(sum(one["rsum"].max() for one in of_seeds) / len(of_seeds), abs=0.0051)


@pytest.mark.parametrize("page", ["bert", "dsve", "ladder", "order", "scan", "todnet", "training"])
def test_other_pages_have_no_interval_in_a_sentence(page: str) -> None:
    path = ROOT / f"docs/{page}.md"
    assert not path.exists() or [one for one in unmarked_intervals(path) if "." in one] == []


def test_a_wrong_number_and_an_interval_without_a_place_are_found(tmp_path: Path) -> None:
    (tmp_path / "results/page").mkdir(parents=True)
    header = "comparison,direction,metric,difference,low,high"
    (tmp_path / "results/page/c.csv").write_text(f"{header}\na_vs_b,i2t,R@1,1.25,-0.51,3.0\na_vs_b,,rsum,-12.0,-20.0,-4.0\n")
    (tmp_path / "results/page/r.csv").write_text("experiment,rsum,rsum_low,rsum_high\nvse,1234.56,1200.0,1260.0\n")
    place = "<!-- number: c.csv row a_vs_b column i2t R@1 -->"
    page = tmp_path / "page.md"
    page.write_text(
        f"by 1.2 [-0.5, 3.0]{place}, or 1.3 {place}\n| 1 | 2 [1, 3] |\n"
        "-12 [-20, -4]<!-- number: c.csv row a_vs_b column rsum -->"
        ", from 1,234.6<!-- number: r.csv row vse column rsum --> and 5 [4, 6]\n"
    )
    assert [(number.text, number.recompute()) for number in page_numbers(page)] == [
        ("1.2 [-0.5, 3.0]", "1.2 [-0.5, 3.0]"),
        ("1.3", "1.2"),
        ("-12 [-20, -4]", "-12 [-20, -4]"),
        ("1,234.6", "1,234.6"),
    ]
    assert unmarked_intervals(page) == ["[4, 6]"]
