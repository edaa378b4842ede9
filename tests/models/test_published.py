"""Configurations of published models, with small sizes: the outputs are those of transformers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from fasttfm.inference.opening import open_with_stated_head
from fasttfm.models import CheckpointError
from fasttfm.testing import compare
from fasttfm.testing.tolerance import OUTPUT_FACTOR

transformers = pytest.importorskip("transformers")

_BERT: dict[str, Any] = {
    "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1,
    "classifier_dropout": None,
    "gradient_checkpointing": False,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-12,
    "max_position_embeddings": 512,
    "model_type": "bert",
    "pad_token_id": 0,
    "position_embedding_type": "absolute",
    "torch_dtype": "float32",
    "transformers_version": "4.28.1",
    "type_vocab_size": 2,
    "use_cache": True,
}
_XLM_ROBERTA = _BERT | {
    "architectures": ["XLMRobertaModel"],
    "bos_token_id": 0,
    "eos_token_id": 2,
    "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514,
    "model_type": "xlm-roberta",
    "output_past": True,
    "pad_token_id": 1,
    "type_vocab_size": 1,
}
_MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-5,
    "local_attention": 128,
    "local_rope_theta": 160000.0,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-5,
    "position_embedding_type": "sans_pos",
    "sparse_pred_ignore_index": -100,
    "sparse_prediction": False,
    "torch_dtype": "float32",
}
_DEBERTA: dict[str, Any] = {
    "architectures": ["DebertaV2Model"],
    "attention_probs_dropout_prob": 0.1,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-7,
    "max_position_embeddings": 512,
    "max_relative_positions": -1,
    "model_type": "deberta-v2",
    "norm_rel_ebd": "layer_norm",
    "pos_att_type": "p2c|c2p",
    "position_biased_input": False,
    "position_buckets": 256,
    "relative_attention": True,
    "share_att_key": True,
    "type_vocab_size": 0,
}
_SMALL_HEADS = {"head_dim": 16, "num_key_value_heads": 1}
_QWEN3: dict[str, Any] = _SMALL_HEADS | {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151643,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "max_window_layers": 28,
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
    "use_sliding_window": False,
}
_LLAMA: dict[str, Any] = _SMALL_HEADS | {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "use_cache": True,
}
_GEMMA3: dict[str, Any] = _SMALL_HEADS | {
    "_sliding_window_pattern": 6,
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "final_logit_softcapping": None,
    "hidden_activation": "gelu_pytorch_tanh",
    "initializer_range": 0.02,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-6,
    "rope_local_base_freq": 10000.0,
    "rope_scaling": None,
    "rope_theta": 1000000.0,
    "sliding_window": 512,
    "use_bidirectional_attention": False,
    "use_cache": True,
}
_ONE_LABEL = {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}}
PUBLISHED: dict[str, dict[str, Any]] = {
    "multilingual-e5-large": _XLM_ROBERTA,
    "multilingual-e5-small": _BERT | {"tokenizer_class": "XLMRobertaTokenizer"},
    "bge-base-en-v1.5": _BERT | _ONE_LABEL,
    "bge-m3": _XLM_ROBERTA | {"max_position_embeddings": 8194},
    "bge-reranker-v2-m3": _XLM_ROBERTA
    | _ONE_LABEL
    | {"architectures": ["XLMRobertaForSequenceClassification"], "max_position_embeddings": 8194},
    "gte-base": _BERT | {"torch_dtype": "float16"},
    "all-MiniLM-L6-v2": {
        key: value for key, value in _BERT.items() if key not in ("classifier_dropout", "torch_dtype")
    },
    "ms-marco-MiniLM-L6-v2": _BERT
    | _ONE_LABEL
    | {
        "architectures": ["BertForSequenceClassification"],
        "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity", "version": "4.1.0.dev0"},
    },
    "snowflake-arctic-embed-m": _BERT | {"transformers_version": "4.36.1"},
    "camembert-base": _XLM_ROBERTA | {"architectures": ["CamembertForMaskedLM"], "model_type": "camembert"},
    "all-mpnet-base-v2": {
        "architectures": ["MPNetForMaskedLM"],
        "attention_probs_dropout_prob": 0.1,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "hidden_act": "gelu",
        "hidden_dropout_prob": 0.1,
        "initializer_range": 0.02,
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 514,
        "model_type": "mpnet",
        "pad_token_id": 1,
        "relative_attention_num_buckets": 32,
    },
    "deberta-v3-base": _DEBERTA,
    "deberta-v2-xlarge": _DEBERTA | {"attention_head_size": 16, "conv_act": "gelu", "conv_kernel_size": 3},
    "mmBERT-base": _MODERNBERT
    | {"bos_token_id": 2, "cls_token_id": 1, "eos_token_id": 1, "mask_token_id": 4, "pad_token_id": 0}
    | {"max_position_embeddings": 8192, "sep_token_id": 1},
    "ettin-encoder-150m": _MODERNBERT
    | {"bos_token_id": 95, "cls_token_id": 95, "eos_token_id": 96, "pad_token_id": 97, "sep_token_id": 96}
    | {"causal_mask": False, "is_causal": False, "max_position_embeddings": 7999, "tie_word_embeddings": True},
    "Qwen3-Embedding-0.6B": _QWEN3,
    "Llama-3.2-1B": _LLAMA,
    "gemma-3-270m": _GEMMA3,
    "embeddinggemma-300m": _GEMMA3
    | {"architectures": ["Gemma3TextModel"], "max_position_embeddings": 2048, "use_bidirectional_attention": True},
}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2, "num_hidden_layers": 4, "vocab_size": 99}
IDS = torch.randint(5, 90, (16, 100), generator=torch.Generator().manual_seed(0))
MASK = (torch.arange(100) < torch.arange(100, 20, -5)[:, None]).long()


def save(directory: Path, fields: dict[str, Any]) -> Any:
    """Writes the configuration as it is, and random parameters under transformers' names; returns its model."""
    (directory / "config.json").write_text(json.dumps(fields | SMALL))
    config = transformers.AutoConfig.from_pretrained(directory)
    torch.manual_seed(0)
    theirs = getattr(transformers, fields["architectures"][0])(config).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    tied = {name for names in (theirs._tied_weights_keys or {},) for name in names}
    save_file({name: each.clone() for name, each in theirs.state_dict().items() if name not in tied},
              directory / "model.safetensors")  # fmt: skip
    return theirs


@pytest.mark.parametrize("name", PUBLISHED)
def test_outputs_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    theirs = save(tmp_path, PUBLISHED[name])
    ours = open_with_stated_head(tmp_path)
    assert type(ours).__name__ == PUBLISHED[name]["architectures"][0]
    key = "logits" if hasattr(ours.config, "num_labels") and "For" in type(ours).__name__ else "last_hidden_state"
    with torch.no_grad():
        found = getattr(ours(IDS, MASK), key)
        naive = getattr(theirs(IDS, attention_mask=MASK), key)
        exact = getattr(theirs.double()(IDS, attention_mask=MASK), key)
    if found.shape[:2] == IDS.shape:
        found, naive, exact = (each[MASK.bool()] for each in (found, naive, exact))
    comparison = compare(name, found, naive, exact, OUTPUT_FACTOR)
    assert comparison.ok, comparison


@pytest.mark.parametrize("kind", ["new", "deberta", "bart"])
def test_others_are_refused_with_the_list(kind: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "architectures": ["NewModel"]}))
    known = r"bert, roberta, xlm-roberta, camembert, mpnet, albert, .*modernbert, .*gpt2, .*"
    with pytest.raises(CheckpointError, match=rf"config.json: model_type: expected one of {known}, got '{kind}'"):
        open_with_stated_head(tmp_path)
