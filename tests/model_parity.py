"""Shared by the tests of model families: a batch, models of transformers, and the comparison with ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fasttfm import models
from fasttfm.testing.modules import check_modules

B, S, V, LABELS = 3, 9, 61, 3
PAD = V - 1  # GPT's, in no batch
SIZES = {
    "vocab_size": V,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 56,
    "max_position_embeddings": 21,
    "num_labels": LABELS,
}
GPT_SIZES = {
    "vocab_size": V,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 21,
    "num_labels": LABELS,
    "pad_token_id": PAD,
}
DISTILBERT = {
    "hidden_dropout_prob": "dropout",
    "attention_probs_dropout_prob": "attention_dropout",
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "intermediate_size": "hidden_dim",
}
T5 = {
    "hidden_size": "d_model",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "intermediate_size": "d_ff",
    "max_position_embeddings": "n_positions",
    "head_dim": "d_kv",
}
XLNET = {
    "hidden_size": "d_model",
    "num_hidden_layers": "n_layer",
    "num_attention_heads": "n_head",
    "intermediate_size": "d_inner",
    "max_position_embeddings": "",  # it has none
}
FIELDS = {"DistilBert": DISTILBERT, "T5": T5, "MT5": T5, "XLNet": XLNET}  # the names of a family's fields, by BERT's
FAMILIES = (
    "Bert",
    "Roberta",
    "XLMRoberta",
    "Camembert",
    "MPNet",
    "Albert",
    "Electra",
    "DistilBert",
    "ModernBertDecoder",  # before its prefix
    "ModernBert",
    "EuroBert",
    "NomicBert",
    "DebertaV2",
    "XLNet",
    "Qwen3",
    "Llama",
    "T5",
    "MT5",
    "Gte",
    "JinaEmbeddingsV3",
    "Gemma3Text",
    "ErnieKnowledge",
    "ViT",
    "GPT2",
    "GPT3",
    "OpenAIGPT",
)
ROBERTAS = ("Roberta", "XLMRoberta", "Camembert")  # positions start after the padding token's id
MASKS = {
    "full": torch.ones(B, S, dtype=torch.int64),
    "right": torch.arange(S).expand(B, S) < torch.tensor([[4], [9], [1]]),
    "left": torch.arange(S).expand(B, S) >= torch.tensor([[4], [0], [8]]),
    "anywhere": torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 1, 1, 0, 0, 0, 0], [0, 1, 1, 1, 1, 1, 1, 1, 0]]),
}
generator = torch.Generator().manual_seed(0)
IDS = torch.randint(5, PAD, (B, S), generator=generator)
SEGMENTS = torch.randint(2, (B, S), generator=generator)
WORDS = torch.where(torch.rand(B, S, generator=generator) < 0.3, IDS, -100)


def family_of(name: str) -> str:
    """The family of a class name."""
    return "Gemma3Text" if name.startswith("Gemma3") else next(each for each in FAMILIES if name.startswith(each))


def config_of(package: Any, name: str, sizes: dict[str, Any]) -> Any:
    """The configuration of a class of ours or of transformers; sizes have the field names of BERT."""
    family = family_of(name)
    names = FIELDS.get(family, {})
    fields = {names.get(key, key): value for key, value in sizes.items()}
    return getattr(package, f"{family}Config")(**{key: value for key, value in fields.items() if key})


def theirs_of(name: str, **changes: Any) -> Any:
    """A model of transformers with random parameters, also in the padding row of the word embeddings."""
    transformers = pytest.importorskip("transformers")
    sizes = GPT_SIZES if "GPT" in name else SIZES
    config = config_of(transformers, name, {**sizes, **changes})
    torch.manual_seed(1)
    module = getattr(transformers, name)(config).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def pair(name: str, directory: Path, **changes: Any) -> tuple[Any, Any]:
    """Our model, loaded from the checkpoint of theirs, and theirs."""
    theirs = theirs_of(name, **changes)
    theirs.save_pretrained(directory)
    return getattr(models, name).from_pretrained(directory), theirs


def arguments(name: str) -> dict[str, Tensor]:
    """The arguments of a model in addition to ids and mask, from which it computes a loss."""
    if name == "ElectraForPreTraining":
        return {"labels": IDS % 2}
    if name.endswith("PreTraining"):
        pairs = "sentence_order_label" if name.startswith("Albert") else "next_sentence_label"
        return {"labels": WORDS, pairs: torch.tensor([1, 0, 1])}
    if name.endswith(("MaskedLM", "XLNetLMHeadModel")):
        return {"labels": WORDS}
    if name.endswith("CausalLM"):
        return {"labels": IDS}
    if name.endswith("TokenClassification"):
        return {"labels": WORDS.clamp(max=LABELS - 1)}
    if name.endswith(("QuestionAnswering", "QuestionAnsweringSimple")):
        return {"start_positions": torch.tensor([0, 1, 99]), "end_positions": torch.tensor([3, 5, 0])}
    if name.endswith(("NextSentencePrediction", "MultipleChoice")):
        return {"labels": torch.tensor([1, 0, 1])}
    return {"labels": torch.tensor([2, 0, 1])} if "For" in name else {}


def hide_padding(arguments: dict[str, Tensor], mask: Tensor) -> dict[str, Tensor]:
    """Ignores the labels of padding, as collators do."""
    return {
        name: torch.where(mask.bool(), value, -100) if value.shape == mask.shape else value
        for name, value in arguments.items()
    }


def tensors(output: Any, mask: Tensor | None = None) -> dict[str, Tensor]:
    """The tensors of an output; hidden states and token logits without the rows of padding."""
    found: dict[str, Tensor] = {}
    for name in output.keys():  # noqa: SIM118 - theirs is no mapping of ours
        if name in ("past_key_values", "mems"):
            continue
        value = output[name]
        for index, each in enumerate(value if isinstance(value, tuple) else [value]):
            by_token = mask is not None and each.shape[: mask.dim()] == mask.shape
            found[f"{name}.{index}"] = each[mask.bool()] if by_token else each
    return found


def wide(loss: Tensor) -> Tensor:
    """A 16-bit loss as fp32: transformers rounds a loss to the model's type, ours is fp32."""
    return loss.to(torch.promote_types(loss.dtype, torch.float32))


def same_tensors(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Names, types and bits."""
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) and a[name].dtype == b[name].dtype for name in a)


def positions_of(name: str) -> Tensor:
    """The positions of the tokens of ``IDS``; for packed tokens whose mask had gaps they are unknown."""
    return (IDS != 1).cumsum(1) + 1 if name.startswith(ROBERTAS) else torch.arange(S).expand(B, S)


def check_layout(
    name: str, ours: Any, theirs: Any, kind: str, *, packed: bool, segments: bool = True, translate: Any = None
) -> None:
    """Outputs, hidden states and gradients of a batch with padding of a ``kind``, padded or packed here. ``translate``
    converts their gradients to ours, by default with the names of checkpoints."""
    mask = MASKS[kind]
    given = hide_padding(arguments(name), mask)
    if segments:
        given["token_type_ids"] = SEGMENTS

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        if module is not ours:
            output = module(IDS, attention_mask=mask.long(), **given, output_hidden_states=True)
            return tensors(output, mask)
        options: dict[str, Any] = {"output_hidden_states": True}
        if hasattr(module, "lm_head"):
            options["output_logits"] = True
        if not packed:
            return tensors(module(IDS, mask, **given, **options), mask)
        there = mask.bool()
        lengths = there.sum(1)
        cu_seqlens = torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int()
        own = {key: value[there] if value.shape == mask.shape else value for key, value in given.items()}
        if kind == "anywhere":
            own["position_ids"] = positions_of(name)[there]
        output = module(IDS[there], cu_seqlens=cu_seqlens, max_seqlen=int(lengths.max()), **own, **options)
        return tensors(output)

    check_modules(ours, theirs, call, {}, translate=translate or ours.own_tensors)


def check_multiple_choice(ours: Any, theirs: Any) -> None:
    ids = IDS[:2].unsqueeze(0).repeat(2, 1, 1)
    ids[1] = ids[1].flip(-1)
    mask = MASKS["right"].long()[:2].repeat(2, 1, 1)
    labels = torch.tensor([1, 0])

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors(module(ids, attention_mask=mask, labels=labels))

    check_modules(ours, theirs, call, {}, translate=ours.own_tensors)


def check_question_answering(ours: Any, theirs: Any, *, translate: Any = None) -> None:
    """Without padding, because transformers' loss includes it."""

    def call(module: Any, _: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors(module(IDS, **arguments("QuestionAnswering")))

    check_modules(ours, theirs, call, {}, translate=translate or ours.own_tensors)
