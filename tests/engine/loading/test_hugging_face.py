"""Hugging Face directories, with transformers as the reference."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.errors import ModelError, ModelFileError, UnsupportedModelError
from engine.loading.checkpoint import open_checkpoint
from engine.models.config import RopeConfig
from tests.tiny_models import TEMPLATE, TOKENS, edit_json, write_hugging_face

if TYPE_CHECKING:
    from pathlib import Path

LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
CHAT = [{"role": "user", "content": "hello <|im_end|> wörld"}, {"role": "assistant", "content": "Hi"}]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One checkpoint in one file and one in several, made once."""
    path = tmp_path_factory.mktemp("saved")
    write_hugging_face(path / "single")
    write_hugging_face(path / "sharded", shard_size="60KB")
    return path


@pytest.fixture
def single(saved: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return shutil.copytree(saved / "single", tmp_path / "single")


@pytest.fixture
def sharded(saved: Path, tmp_path: Path) -> Path:
    """A copy in several files that a test may damage."""
    path: Path = shutil.copytree(saved / "sharded", tmp_path / "sharded")
    assert len(list(path.glob("*.safetensors"))) > 2
    return path


@pytest.mark.parametrize("shard_size", ["50GB", "60KB"])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tensors_are_those_of_transformers(tmp_path: Path, shard_size: str, tied: bool, dtype: str) -> None:
    """Names, values and types, in one file or in several, with a head of its own or without."""
    model = write_hugging_face(tmp_path / "tiny", shard_size=shard_size, dtype=dtype, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(tmp_path / "tiny")
    assert (checkpoint.name, checkpoint.weights_kind) == ("tiny", dtype)
    loaded = dict(checkpoint.tensors())
    expected = {name: values for name, values in model.state_dict().items() if not (tied and "lm_head" in name)}
    assert loaded.keys() == expected.keys()
    assert all(
        torch.equal(loaded[name], values) and loaded[name].dtype == values.dtype for name, values in expected.items()
    )


def test_a_tied_head_may_be_stored_all_the_same(single: Path) -> None:
    """The copy is not handed out; old rotary buffers neither."""
    edit_json(single / "config.json", tie_word_embeddings=True)
    tensors = load_file(single / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(8)
    save_file(tensors, single / "model.safetensors")
    names = {name for name, _ in open_checkpoint(single).tensors()}
    assert "model.embed_tokens.weight" in names
    assert not names & {"lm_head.weight", "model.layers.0.self_attn.rotary_emb.inv_freq"}


def test_text_rules_are_those_of_transformers(single: Path) -> None:
    """Ids and text of strings and chats."""
    from transformers import AutoTokenizer

    theirs, checkpoint = AutoTokenizer.from_pretrained(single), open_checkpoint(single)
    tokenizer, template = checkpoint.tokenizer, checkpoint.chat_template
    for text in ("hello world", " é漢 12 <|im_end|>\n", "👩\u200d🚀"):
        ids = theirs(text)["input_ids"]
        assert tokenizer.encode(text, parse_control=True) == ids
        assert tokenizer.decode(ids) == theirs.decode(ids)
        plain = [token_id for token_id in ids if not tokenizer.is_control(token_id)]
        assert tokenizer.decode(plain) == theirs.decode(ids, skip_special_tokens=True)
    assert template is not None
    assert template.render(CHAT) == theirs.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    harmless = [{"role": "user", "content": "hello wörld"}]
    ids = theirs.apply_chat_template(harmless, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert template.encode(harmless, tokenizer) == ids
    assert template.encode(CHAT, tokenizer).count(2) == 2
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.stop_token_ids) == (1, 2, {2})


def test_every_end_that_the_files_name_stops(single: Path) -> None:
    """generation_config.json may list several; each is a control token from then on."""
    edit_json(single / "generation_config.json", eos_token_id=[0, 2, TOKENS.index("hello")])
    tokenizer = open_checkpoint(single).tokenizer
    assert tokenizer.stop_token_ids == {0, 2, TOKENS.index("hello")}
    assert tokenizer.is_control(TOKENS.index("hello"))
    assert not tokenizer.stop_token_ids & set(tokenizer.encode("hello", parse_control=False))


def test_a_bos_that_the_post_processor_adds(single: Path) -> None:
    """As in Llama 3: plain text gets it, a chat has it from the template."""
    bos = {"SpecialToken": {"id": "<|endoftext|>", "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    known = {"<|endoftext|>": {"id": "<|endoftext|>", "ids": [0], "tokens": ["<|endoftext|>"]}}
    rule = {"type": "TemplateProcessing", "single": [bos, text], "pair": [bos, text], "special_tokens": known}
    edit_json(single / "tokenizer.json", post_processor=rule)
    edit_json(single / "tokenizer_config.json", bos_token={"content": "<|endoftext|>"})
    (single / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0]['content'] }}")
    checkpoint = open_checkpoint(single)
    assert checkpoint.tokenizer.adds_bos
    assert checkpoint.tokenizer.encode("hello", parse_control=True) == [0, TOKENS.index("hello")]
    assert checkpoint.chat_template is not None
    assert checkpoint.chat_template.encode(CHAT, checkpoint.tokenizer).count(0) == 1


@pytest.mark.parametrize(
    ("value", "expected"), [("{{ 1 }}", "{{ 1 }}"), ([{"name": "default", "template": "x"}], "x"), (None, None)]
)
def test_where_the_chat_template_may_stand(single: Path, value: Any, expected: str | None) -> None:
    """Its own file (the other tests), a key of tokenizer_config.json, a list with names, nowhere."""
    (single / "chat_template.jinja").unlink()
    edit_json(single / "tokenizer_config.json", chat_template=value)
    template = open_checkpoint(single).chat_template
    assert (template and template.source) == expected


def test_the_template_file_comes_first(single: Path) -> None:
    """As transformers writes it today."""
    template = open_checkpoint(single).chat_template
    assert template is not None
    assert template.source == TEMPLATE


def test_the_hub_cache_gives_the_name(single: Path, tmp_path: Path) -> None:
    """A snapshot's folder is a revision; the model is named above it."""
    snapshot = tmp_path / "models--org--tiny-llama" / "snapshots" / "abc123"
    shutil.copytree(single, snapshot)
    assert open_checkpoint(snapshot).name == "org/tiny-llama"
    assert open_checkpoint(snapshot, name="mine").name == "mine"


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, RopeConfig(10000.0)),
        ({"rope_scaling": None, "rope_theta": 5e5}, RopeConfig(5e5)),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, RopeConfig(10000.0, "linear", 2.0)),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2}}, RopeConfig(10000.0, "linear", 2.0)),
        (
            {"rope_scaling": {"rope_type": "llama3", **LLAMA3}, "rope_theta": 5e5},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        ),
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3}},
            RopeConfig(5e5, "llama3", 8.0, 1.0, 4.0, 64),
        ),
    ],
)
def test_rope_in_every_spelling(single: Path, changes: dict[str, Any], expected: RopeConfig) -> None:
    """Old files say `type`, newer ones `rope_type`, the newest keep theta in the same object."""
    edit_json(single / "config.json", rope_parameters=None, rope_theta=None)
    edit_json(single / "config.json", **changes)
    assert open_checkpoint(single).config.rope == expected


def test_sizes_that_are_left_out(single: Path) -> None:
    """Key/value heads as many as heads, a head's size from the width, `null` as if absent."""
    write_hugging_face(single, num_key_value_heads=4)
    edit_json(single / "config.json", num_key_value_heads=None, head_dim=None, rms_norm_eps=None)
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps({**config, "head_dim": None}))
    loaded = open_checkpoint(single).config
    assert (loaded.num_kv_heads, loaded.head_size, loaded.rms_norm_eps) == (4, 16, 1e-6)


@pytest.mark.parametrize(
    ("changes", "cause"),
    [
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "'Qwen2ForCausalLM'"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "'LlamaForSequenceClassification'"),
        ({"architectures": None, "model_type": "gpt2"}, "'gpt2'"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "RoPE kind 'yarn'"),
        ({"attention_bias": True}, "attention_bias"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"hidden_act": "gelu"}, "activation 'gelu'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization 'gptq'"),
    ],
)
def test_what_is_not_supported_is_named(single: Path, changes: dict[str, Any], cause: str) -> None:
    """Before any weight is read."""
    edit_json(single / "config.json", **changes)
    with pytest.raises(UnsupportedModelError, match=cause):
        open_checkpoint(single)


def test_a_tensor_of_another_architecture(single: Path) -> None:
    """A bias that the configuration did not mention; a type that is not known."""
    tensors = load_file(single / "model.safetensors")
    save_file({**tensors, "model.layers.0.self_attn.q_proj.bias": torch.ones(64)}, single / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"q_proj\.bias is not part"):
        open_checkpoint(single)
    save_file({**tensors, "model.norm.weight": torch.ones(64, dtype=torch.int8)}, single / "model.safetensors")
    with pytest.raises(UnsupportedModelError, match=r"model\.norm\.weight has type I8"):
        open_checkpoint(single)


def test_a_shard_that_is_missing_or_cut(sharded: Path) -> None:
    """The message names the file."""
    shard = sorted(sharded.glob("*.safetensors"))[1]
    data = shard.read_bytes()
    for size in (len(data) - 1, len(data) // 2, 100, 4):
        shard.write_bytes(data[:size])
        with pytest.raises(ModelFileError, match=rf"{shard.name} is truncated"):
            open_checkpoint(sharded)
    shard.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n")
    with pytest.raises(ModelFileError, match=rf"{shard.name} is a Git LFS pointer"):
        open_checkpoint(sharded)
    shard.unlink()
    with pytest.raises(ModelFileError, match=rf"{shard.name} is missing"):
        open_checkpoint(sharded)


def test_an_index_that_is_wrong(sharded: Path) -> None:
    """A tensor in no shard, and a shard outside the directory."""
    index = sharded / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    shard = weight_map["model.norm.weight"]
    edit_json(index, weight_map={**weight_map, "model.extra.weight": shard})
    with pytest.raises(ModelFileError, match=r"model\.extra\.weight is missing"):
        open_checkpoint(sharded)
    edit_json(index, weight_map={name: file for name, file in weight_map.items() if name != "model.norm.weight"})
    with pytest.raises(ModelFileError, match=r"model\.norm\.weight is missing"):
        open_checkpoint(sharded)
    edit_json(index, weight_map={**weight_map, "model.norm.weight": "../secret.safetensors"})
    with pytest.raises(ModelFileError, match="outside its directory"):
        open_checkpoint(sharded)


@pytest.mark.parametrize(
    ("name", "content", "cause"),
    [
        ("config.json", None, "config.json is missing"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "[]", "does not hold a JSON object"),
        ("model.safetensors", None, "has no model.safetensors"),
        ("tokenizer.json", None, "tokenizer.json is missing"),
        ("tokenizer.json", "{}", "tokenizer.json is not a tokenizer"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "Git LFS pointer"),
    ],
)
def test_files_that_are_missing_or_damaged(single: Path, name: str, content: str | None, cause: str) -> None:
    """One line that names the file."""
    (single / name).unlink()
    if content is not None:
        (single / name).write_text(content)
    with pytest.raises(ModelFileError, match=cause) as caught:
        open_checkpoint(single)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", ["64", None, 64.5, True])
def test_sizes_of_a_wrong_type(single: Path, value: Any) -> None:
    """Never a traceback from arithmetic."""
    edit_json(single / "config.json", hidden_size=value)
    with pytest.raises(ModelError, match="hidden_size"):
        open_checkpoint(single)


def test_a_token_added_to_the_tokenizer_alone_is_lost_and_padding_stands_for_nothing(single: Path) -> None:
    """The rows of the embedding bound the ids, whichever of the two is larger."""
    edit = json.loads((single / "tokenizer.json").read_text(encoding="utf-8"))
    for token_id, text in ((len(TOKENS), "[PAD]"), (len(TOKENS) + 1, "<more>")):
        fields = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        edit["added_tokens"].append({"id": token_id, "content": text, "special": text == "[PAD]", **fields})
    (single / "tokenizer.json").write_text(json.dumps(edit), encoding="utf-8")
    tokenizer = open_checkpoint(single).tokenizer
    assert tokenizer.vocab_size == len(TOKENS)
    assert tokenizer.lost_tokens == {len(TOKENS): "[PAD]", len(TOKENS) + 1: "<more>"}
    tensors = load_file(single / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        if name in tensors:
            tensors[name] = torch.cat((tensors[name], torch.zeros(8, 64)))
    save_file(tensors, single / "model.safetensors")
    edit_json(single / "config.json", vocab_size=len(TOKENS) + 8)
    tokenizer = open_checkpoint(single).tokenizer
    assert not tokenizer.lost_tokens
    assert tokenizer.vocab_size == len(TOKENS) + 2
    assert tokenizer.silent_ids == tuple(range(len(TOKENS) + 2, len(TOKENS) + 8))
