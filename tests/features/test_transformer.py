"""Transformers from a folder: tokens and outputs as the library's own, and one clear line for what cannot be read."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import safetensors.torch
import torch
import transformers

from tests.transformers_made import BERT, POSITIONS, make_bert, make_transformer, word_pieces
from vse.features.backbones.transformer import build_tiny_transformer, find_embeddings_and_layers, read_transformer
from vse.pipeline.errors import UserError

TEXTS = ["A red disc on the grass.", "zebra", "", "two (2) blue squares under a green triangle " * 20]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_bert(tmp_path / "bert")


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_tokens_are_those_of_the_library_whatever_padding_the_file_asks_for(folder: Path) -> None:
    theirs = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for longest in (None, 7):
        ours = read_transformer(str(folder), max_length=longest).tokenizer
        for text in TEXTS:
            expected = theirs(text, truncation=True, max_length=longest or POSITIONS, padding=False)
            assert ours.encode(text).ids == expected["input_ids"]


def test_outputs_are_those_of_the_library(folder: Path) -> None:
    theirs = transformers.BertModel.from_pretrained(folder).eval()
    ours = read_transformer(str(folder)).load_network().eval()
    tokens, mask = torch.tensor([[2, 60, 61, 3, 0], [2, 5, 40, 41, 3]]), torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    given = {"input_ids": tokens, "attention_mask": mask}
    torch.testing.assert_close(ours(**given).last_hidden_state, theirs(**given).last_hidden_state, rtol=0, atol=0)
    assert not any("pooler" in name for name, _ in ours.named_parameters()), "nothing would train it"


def test_weights_in_parts_and_in_half_precision_become_one_network_in_float32(folder: Path, tmp_path: Path) -> None:
    whole = transformers.BertModel.from_pretrained(folder).half()
    whole.save_pretrained(tmp_path / "parts", max_shard_size="20KB")
    (tmp_path / "parts" / "tokenizer.json").write_text((folder / "tokenizer.json").read_text())
    parts = read_transformer(str(tmp_path / "parts"))
    assert len(parts.weight_files) > 3
    network = parts.load_network()
    for name, weight in network.state_dict().items():
        assert weight.dtype == torch.float32
        assert torch.equal(weight, whole.state_dict()[name].float()), name
    assert parts.weights_sha256 != read_transformer(str(folder)).weights_sha256


def test_weights_that_are_read_draw_no_numbers_and_those_that_are_not_depend_on_the_seed(folder: Path) -> None:
    before = torch.random.get_rng_state()
    read_transformer(str(folder)).load_network()
    assert torch.equal(before, torch.random.get_rng_state())
    drawn = []
    for seed in (0, 0, 1):
        torch.manual_seed(seed)
        drawn.append(build_tiny_transformer(["disc"]).load_network().embeddings.word_embeddings.weight)
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


def test_a_folder_of_the_short_name_stands_in_for_a_download(tmp_path: Path) -> None:
    made = make_bert(tmp_path / "weights" / "some-bert")
    found = read_transformer("somebody/some-bert", tmp_path / "weights")
    assert found.weight_files[0].path == made / "model.safetensors"
    with pytest.raises(UserError, match="cannot get somebody/other-bert .*a folder other-bert and name"):
        read_transformer("somebody/other-bert", tmp_path / "weights")


CONFIGS: dict[str, Callable[[], Any]] = {
    "roberta": lambda: transformers.RobertaConfig(**BERT),
    "mpnet": lambda: transformers.MPNetConfig(**BERT),
    "electra": lambda: transformers.ElectraConfig(**BERT, embedding_size=16),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=BERT["vocab_size"], dim=32, n_layers=2, n_heads=2, hidden_dim=64, max_position_embeddings=POSITIONS
    ),
}


@pytest.mark.parametrize("family", CONFIGS)
def test_other_families_read_as_many_tokens_as_they_have_positions_whatever_the_padding(family: str, tmp_path: Path) -> None:
    transformer = read_transformer(str(make_transformer(tmp_path / family, CONFIGS[family]())))
    network = transformer.load_network().eval()
    _, layers = find_embeddings_and_layers(network, family)
    assert len(layers) == 2
    longest = transformer.tokenizer.encode("disc " * POSITIONS).ids
    assert len(longest) == transformer.n_positions == POSITIONS - 2 * (family in ("roberta", "mpnet"))
    short = transformer.tokenizer.encode("a red disc").ids
    padded = short + [transformer.pad_index] * (len(longest) - len(short))
    mask = torch.arange(len(longest)) < torch.tensor([[len(short)], [len(longest)]])
    both = network(input_ids=torch.tensor([padded, longest]), attention_mask=mask.long()).last_hidden_state
    alone = network(input_ids=torch.tensor([short]), attention_mask=torch.ones(1, len(short)).long()).last_hidden_state
    torch.testing.assert_close(both[0, : len(short)], alone[0])


def test_what_a_tokenizer_does_not_know_is_named(folder: Path) -> None:
    assert read_transformer(str(folder)).find_unknown_words("a red ☂ and ☂☂ disc") == ["☂", "☂☂"]
    assert read_transformer(str(folder)).tokenize("Red zoo") == ["[CLS]", "red", "z", "##o", "##o", "[SEP]"]


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors"])
def test_a_file_that_is_something_else_or_lacks_is_named(name: str, folder: Path) -> None:
    (folder / name).write_text("junk")

    def load() -> None:
        transformer = read_transformer(str(folder))
        assert transformer.tokenizer
        transformer.load_network()

    with pytest.raises(UserError, match=f"^{folder}.*: not "):
        load()
    (folder / name).unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=rf"{folder}: no {name}"):
        load()


def edited(folder: Path, **changes: Any) -> str:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return str(folder)


def test_a_configuration_that_does_not_fit_its_weights_is_refused(folder: Path) -> None:
    with pytest.raises(UserError, match="do not fit the network"):
        read_transformer(edited(folder, num_hidden_layers=3)).load_network()
    with pytest.raises(UserError, match="weights"):
        read_transformer(edited(folder, num_hidden_layers=2, intermediate_size=60)).load_network()
    with pytest.raises(UserError, match="lacks model_type"):
        read_transformer(edited(folder, model_type=None))
    with pytest.raises(UserError, match="not a transformer that the library knows"):
        read_transformer(edited(folder, model_type="no such")).load_network()


def test_a_tokenizer_that_does_not_fit_is_refused(folder: Path) -> None:
    n = BERT["vocab_size"]
    for longest in (1, 2, POSITIONS + 1):
        with pytest.raises(UserError, match=f"max_length {longest} .* {POSITIONS} positions"):
            read_transformer(str(folder), max_length=longest).tokenizer  # noqa: B018
    word_pieces("umbrella").save(str(folder / "tokenizer.json"))
    with pytest.raises(UserError, match=rf"up to {n}, .* {n} tokens"):
        read_transformer(str(folder)).tokenizer  # noqa: B018
    for junk in ("junk", "[]"):
        (folder / "tokenizer_config.json").write_text(junk)
        with pytest.raises(UserError, match=r"tokenizer_config\.json: not "):
            read_transformer(str(folder))


def test_what_is_no_encoder_is_refused(tmp_path: Path) -> None:
    config = transformers.GPT2Config(vocab_size=BERT["vocab_size"], n_embd=8, n_layer=2, n_head=2, n_positions=POSITIONS)
    network = read_transformer(str(make_transformer(tmp_path / "gpt", config))).load_network()
    with pytest.raises(UserError, match="gpt: not a text encoder like BERT"):
        find_embeddings_and_layers(network, "gpt")


def test_weights_that_are_replaced_meanwhile_are_refused(folder: Path) -> None:
    transformer = read_transformer(str(folder))
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt", "more": "bytes"})
    with pytest.raises(UserError, match="was replaced or written to while it was read"):
        transformer.load_network()


@pytest.mark.parametrize(("module", "name"), [("tokenizers", "Tokenizers"), ("transformers", "Transformers")])
def test_a_missing_library_is_named(module: str, name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformer = read_transformer(str(folder))
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=f"needs {name}: pip install"):
        (transformer.tokenizer if module == "tokenizers" else transformer.load_network)()


@pytest.mark.parametrize("lower", [True, False, None], ids=["lower case", "capitals", "no normalizer"])
@pytest.mark.parametrize(
    "said", [{"do_lower_case": True}, {"do_lower_case": False}, {"do_lower_case": True, "strip_accents": False}]
)
def test_words_are_normalised_as_tokenizer_config_json_says(lower: bool | None, said: dict[str, bool], folder: Path) -> None:
    text = "A Red disc on ÉTÉ grass"
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None if lower is None else {**tokenizer["normalizer"], "lowercase": lower}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "BertTokenizer", **said}))
    if lower is None and said["do_lower_case"]:
        with pytest.raises(UserError, match=r"tokenizer_config\.json: do_lower_case is true, but the normalizer in tokenizer"):
            read_transformer(str(folder))
        return
    theirs = transformers.AutoTokenizer.from_pretrained(folder).tokenize(text)
    assert read_transformer(str(folder)).tokenize(text)[1:-1] == theirs


def test_a_tokenizer_that_agrees_with_its_settings_stays_byte_for_byte(folder: Path) -> None:
    (folder / "tokenizer_config.json").write_text(json.dumps({"do_lower_case": True}))
    assert read_transformer(str(folder)).tokenizer_json == (folder / "tokenizer.json").read_text()
