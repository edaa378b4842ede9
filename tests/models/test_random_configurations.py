"""Models with random configurations against transformers: states, losses and gradients of random batches."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import config_of
from torch import Tensor

from fasttfm import models

transformers = pytest.importorskip("transformers")

SEEDS = range(4)


def sizes_of(draw: random.Random) -> dict[str, Any]:
    """Sizes by BERT's names."""
    heads, head_dim = draw.choice([1, 2, 3, 4]), draw.choice([8, 16, 24])
    return {
        "vocab_size": draw.randint(30, 90),
        "hidden_size": heads * head_dim,
        "num_attention_heads": heads,
        "num_hidden_layers": draw.randint(1, 4),
        "intermediate_size": draw.choice([16, 40, 72]),
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    }


def grouped(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    """Heads of keys and values, and their columns, which need not be the width's."""
    heads = sizes["num_attention_heads"]
    divisors = [count for count in range(1, heads + 1) if heads % count == 0]
    return {"num_key_value_heads": draw.choice(divisors), "head_dim": draw.choice([8, 16, 32])}


def rope(draw: random.Random) -> dict[str, Any]:
    kinds: list[dict[str, Any]] = [
        {"rope_type": "default"},
        {"rope_type": "linear", "factor": draw.uniform(1.5, 8)},
        {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 0.5, "high_freq_factor": 3.0},
        {"rope_type": "yarn", "factor": draw.uniform(1.5, 8), "beta_fast": 4, "beta_slow": 0.5},
    ]
    chosen = draw.choice(kinds)
    if chosen["rope_type"] in ("llama3", "yarn"):
        chosen["original_max_position_embeddings"] = draw.choice([8, 16, 40])
    return {"rope_theta": draw.choice([100.0, 1e4, 1e6]), **chosen}


def flip(draw: random.Random, *names: str) -> dict[str, bool]:
    return {name: draw.random() < 0.5 for name in names}


def llama(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    biases = flip(draw, "attention_bias", "mlp_bias", "tie_word_embeddings")
    acts = {"hidden_act": draw.choice(["silu", "gelu", "gelu_pytorch_tanh"])}
    return {**grouped(draw, sizes), **biases, **acts, "rms_norm_eps": 1e-5, "rope_parameters": rope(draw)}


def qwen3(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    return {
        **grouped(draw, sizes),
        **flip(draw, "attention_bias", "tie_word_embeddings"),
        "rope_parameters": rope(draw),
    }


def gemma3(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    of_kinds = {"full_attention": rope(draw), "sliding_attention": rope(draw)}
    both = flip(draw, "attention_bias", "use_bidirectional_attention")
    windows = {"sliding_window": draw.randint(2, 9), "sliding_window_pattern": draw.randint(1, 3)}
    scale = {"query_pre_attn_scalar": draw.choice([8, 20, 100])}
    return {**grouped(draw, sizes), **both, **windows, **scale, "rope_parameters": of_kinds}


def modernbert(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    biases = flip(draw, "norm_bias", "attention_bias", "mlp_bias", "classifier_bias", "decoder_bias")
    of_kinds = {"full_attention": rope(draw), "sliding_attention": rope(draw)}
    windows = {"local_attention": draw.choice([2, 4, 8]), "global_attn_every_n_layers": draw.randint(1, 3)}
    return {**biases, **windows, "rope_parameters": of_kinds}


def t5(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    act = draw.choice(["relu", "gated-gelu", "gated-silu", "gelu"])
    buckets = {"relative_attention_num_buckets": draw.choice([8, 32]), "relative_attention_max_distance": 20}
    return {"feed_forward_proj": act, "head_dim": draw.choice([8, 16]), **buckets}


def bert(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    acts = {"hidden_act": draw.choice(["gelu", "silu", "relu"]), "type_vocab_size": draw.randint(1, 3)}
    return {**acts, "rope_parameters": rope(draw), "layer_norm_eps": draw.choice([1e-12, 1e-5])}


def xlnet(draw: random.Random, sizes: dict[str, Any]) -> dict[str, Any]:
    acts = {"ff_activation": draw.choice(["gelu", "relu", "silu", "gelu_new"])}
    return {**acts, "clamp_len": draw.choice([-1, 3, 20]), "layer_norm_eps": draw.choice([1e-12, 1e-5])}


FAMILIES = {
    "LlamaForCausalLM": llama,
    "EuroBertForMaskedLM": llama,
    "Qwen3ForCausalLM": qwen3,
    "Gemma3ForCausalLM": gemma3,
    "ModernBertDecoderForCausalLM": modernbert,
    "ModernBertModel": modernbert,
    "T5EncoderModel": t5,
    "MT5EncoderModel": t5,
    "GteForMaskedLM": bert,
    "JinaEmbeddingsV3ForMaskedLM": bert,
    "NomicBertModel": bert,
    "XLNetModel": xlnet,
    "XLNetLMHeadModel": xlnet,
}


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("seed", SEEDS)
def test_random_configurations(name: str, seed: int, tmp_path: Path) -> None:
    draw = random.Random(f"{name} {seed}")
    sizes = sizes_of(draw)
    theirs = made(name, {**sizes, **FAMILIES[name](draw, sizes)}, seed)
    theirs.save_pretrained(tmp_path)
    ours = getattr(models, name).from_pretrained(tmp_path)
    ids, mask, labels = batch(draw, sizes["vocab_size"])
    given = {"labels": labels} if "For" in name or "LMHead" in name else {}
    found = ours(ids, mask, **given, **({"output_logits": True} if given else {}))
    expected = theirs(ids, attention_mask=mask, **given)
    for key in ("loss", "logits") if given else ("last_hidden_state",):
        got, true = found[key], expected[key]
        there = mask.bool() if got.dim() else ...
        torch.testing.assert_close(got[there], true[there], rtol=2e-4, atol=2e-4)
    if given:
        found.loss.backward()
        expected.loss.backward()
        total = sum(float(each.grad.double().square().sum()) for each in theirs.parameters() if each.grad is not None)
        own = sum(float(each.grad.double().square().sum()) for each in ours.parameters() if each.grad is not None)
        assert own == pytest.approx(total, rel=1e-3)


def made(name: str, fields: dict[str, Any], seed: int) -> Any:
    """transformers' model with random parameters."""
    torch.manual_seed(seed)
    theirs = getattr(transformers, name)(config_of(transformers, name, fields)).eval()
    for parameter in theirs.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return theirs


def batch(draw: random.Random, vocabulary: int) -> tuple[Tensor, Tensor, Tensor]:
    """Ids, a mask with padding at the end, and labels of all tokens."""
    length = draw.randint(2, 30)
    lengths = torch.tensor([length, draw.randint(1, length), draw.randint(1, length)])
    mask = (torch.arange(length) < lengths[:, None]).long()
    generator = torch.Generator().manual_seed(draw.randint(0, 10**6))
    ids = torch.randint(5, vocabulary, (3, length), generator=generator)
    return ids, mask, ids.where(mask.bool(), -100)
