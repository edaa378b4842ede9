"""Entry points of every family of ``fasttfm.models``, and of transformers' models that ``fasttfm.patch`` changes."""

from __future__ import annotations

import contextlib
import copy
import functools
import importlib.util
import inspect
import warnings
from dataclasses import fields, is_dataclass
from typing import Any

import torch

import fasttfm
from fasttfm.models.families import FAMILIES, family_of_type
from fasttfm.models.family import Family, Head
from fasttfm.testing.seams.entry import EntryPoint, Inputs, Tensors, tensors_of, with_gradients
from fasttfm.testing.seams.module_entries import seeded

VOCABULARY, BATCH, LENGTH = 61, 3, 9
# Small values of the fields that configurations of ours and of transformers have.
SMALL: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "dim", "n_embd", "d_model"), 32),
    **dict.fromkeys(("num_hidden_layers", "n_layers", "n_layer", "num_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "n_heads", "n_head", "num_heads"), 2),
    **dict.fromkeys(("intermediate_size", "hidden_dim", "d_ff"), 48),
    **dict.fromkeys(("max_position_embeddings", "n_positions"), 24),
    **dict.fromkeys(("hidden_dropout_prob", "attention_probs_dropout_prob", "dropout", "attention_dropout"), 0.0),
    **dict.fromkeys(("embd_pdrop", "attn_pdrop", "resid_pdrop", "summary_first_dropout", "classifier_dropout"), 0.0),
    **dict.fromkeys(("mlp_dropout", "embedding_dropout", "qa_dropout", "seq_classif_dropout", "dropout_rate"), 0.0),
    "num_key_value_heads": 1,
    **dict.fromkeys(("head_dim", "d_kv"), 16),
    "vocab_size": VOCABULARY,
    "embedding_size": 24,
    "local_attention": 4,
    "entity_hidden_size": 16,
    "entity_num_attention_heads": 2,
    "num_entities": 5,
    "image_size": 8,
    "patch_size": 4,
    "encoder_stride": 4,
}
# Fields that name a token: one that is in no batch, so that no row is treated as padding.
TOKENS = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
# The head that an entry point has: the first of these that the family has.
HEADS = (Head.REPLACED_TOKENS, Head.MASKED_LM, Head.CAUSAL_LM, Head.IMAGE_CLASSIFICATION, Head.NONE)


def small_config(config: type, **changes: Any) -> Any:
    """A configuration of ours or of transformers with small sizes, by the names of its fields."""
    names = {field.name for field in fields(config)} if is_dataclass(config) else set(vars(config()))
    values = {**SMALL, **dict.fromkeys(TOKENS, 1), **changes}
    return config(**{name: value for name, value in values.items() if name in names})


def head_of(family: Family) -> Head:
    return next(head for head in HEADS if head in family.models)


def small_model(family: Family, head: Head | None = None, **sizes: Any) -> Any:
    kind = family.models[head or head_of(family)]
    return kind(small_config(family.config, **sizes))


# ---- calls -----------------------------------------------------------------------------------------------------------


def inputs_of(head: Head, seed: int, device: torch.device) -> Inputs:
    generator = torch.Generator().manual_seed(200 + seed)
    if head is Head.IMAGE_CLASSIFICATION:
        return {"pixel_values": torch.randn(BATCH, 3, 8, 8, generator=generator).to(device)}
    ids = torch.randint(5, VOCABULARY - 1, (BATCH, LENGTH), generator=generator)
    mask = (torch.arange(LENGTH) < torch.tensor([LENGTH, 4, 6])[:, None]).long()
    inputs = {"input_ids": ids.to(device), "attention_mask": mask.to(device)}
    if head in (Head.MASKED_LM, Head.CAUSAL_LM, Head.REPLACED_TOKENS):
        labels = ids % 2 if head is Head.REPLACED_TOKENS else ids
        inputs["labels"] = torch.where(mask.bool(), labels, -100).to(device)
    return inputs


def packed_inputs(head: Head, limited: bool, seed: int, device: torch.device) -> Inputs:
    """The same tokens without padding, in arguments that need no synchronization, so that a CUDA graph can capture the
    call; ``limited`` says whether the model takes the maximum number of predictions."""
    padded = inputs_of(head, seed, torch.device("cpu"))
    if "input_ids" not in padded:
        return inputs_of(head, seed, device)
    mask = padded.pop("attention_mask").bool()
    packed: Inputs = {name: value[mask].to(device) for name, value in padded.items()}
    bounds = torch.nn.functional.pad(mask.sum(1).cumsum(0), (1, 0)).int()
    options = {"max_predictions": int(mask.sum())} if limited else {}
    return {**packed, "cu_seqlens": bounds.to(device), "max_seqlen": LENGTH, **options}


def train(model: Any, inputs: Inputs) -> Tensors:
    """Outputs and the gradients of all parameters."""
    output = model(**inputs)
    return with_gradients(_shown(output), dict(model.named_parameters()))


def evaluate(model: Any, inputs: Inputs) -> Tensors:
    with torch.no_grad():
        return {name: value.detach() for name, value in _shown(model(**inputs)).items()}


def _shown(output: Any) -> Tensors:
    """The loss if there is one; padding's rows of other outputs are not defined."""
    tensors = tensors_of(output)
    if "loss" in tensors:
        return {"loss": tensors["loss"]}
    return {name: value[:1] for name, value in tensors.items()}  # the first sequence has no padding


def _evaluated(make: Any, device: torch.device) -> Any:
    return seeded(make, device).eval()


def model_entries() -> list[EntryPoint]:
    entries = []
    for name, family in FAMILIES.items():
        head = head_of(family)
        make = functools.partial(small_model, family)
        shared: dict[str, Any] = {
            "inputs": functools.partial(inputs_of, head),
            "module": lambda model: model,
            "covers": (f"models.{name}",),
        }
        limited = "max_predictions" in inspect.signature(family.models[head].forward).parameters
        packed = {**shared, "inputs": functools.partial(packed_inputs, head, limited)}
        entries.append(EntryPoint(f"models.{name}", functools.partial(seeded, make), call=train, **packed))
        without = functools.partial(_evaluated, make)
        entries.append(EntryPoint(f"models.{name}, inference", without, call=evaluate, **shared))
    return entries


# ---- patched models of transformers ----------------------------------------------------------------------------------


def patched_families() -> dict[str, Any]:
    """The modules of ``fasttfm.patching`` for transformers' families, by transformers' model_type."""
    return {family.config.model_type: family.patching for family in FAMILIES.values() if family.patching is not None}


_DEFAULT_DEVICE = {"default device meta": "transformers 5.17 makes MPNet's positions on torch's default device"}


def patched_entries() -> list[EntryPoint]:
    if importlib.util.find_spec("transformers") is None:
        return []
    return [
        EntryPoint(
            name=f"patch.{kind}",
            covers=(f"patch.{kind}",),
            make=functools.partial(_patched, kind),
            inputs=functools.partial(inputs_of, _their_head(kind)),
            call=_train_patched,
            reference=_train_original,
            module=lambda model: model,
            rebuild=functools.partial(_rebuilt, kind),
            left_out=_DEFAULT_DEVICE if kind == "mpnet" else {},
        )
        for kind in patched_families()
    ]


def _their_head(kind: str) -> Head:
    family = family_of_type(kind)
    return Head.CAUSAL_LM if family is not None and family.causal else Head.MASKED_LM


def _original(kind: str) -> Any:
    """transformers' model of a family with a head that has a loss."""
    import transformers

    masked = _their_head(kind) is Head.MASKED_LM
    kinds = transformers.AutoModelForMaskedLM if masked else transformers.AutoModelForCausalLM
    config = type(transformers.AutoConfig.for_model(kind))
    with _quiet():
        return kinds.from_config(small_config(config))


def _patched(kind: str, device: torch.device) -> Any:
    model = seeded(functools.partial(_original, kind), device)
    fasttfm.patch(model)
    return model


def _rebuilt(kind: str, model: Any, device: torch.device) -> Any:
    from fasttfm.testing.seams.entry import copy_weights

    twin = seeded(functools.partial(_original, kind), device)
    copy_weights(model, twin)
    fasttfm.patch(twin)
    return twin


def _train_patched(model: Any, inputs: Inputs) -> Tensors:
    return with_gradients({"loss": model(**inputs).loss}, dict(model.named_parameters()))


def _train_original(model: Any, inputs: Inputs) -> Tensors:
    original = copy.deepcopy(model)
    fasttfm.unpatch(original)
    return _train_patched(original, inputs)


@contextlib.contextmanager
def _quiet() -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
