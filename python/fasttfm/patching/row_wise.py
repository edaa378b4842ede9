"""Which modules compute each token's row by itself, so that they may be called with packed rows.

transformers calls the modules inside a model with a padded batch [B, S, C]. Hooks, and modules that have replaced
transformers' own, may depend on the sequences: a gate for each of them, a probe of the first column, PEFT's
``adapter_names``. So only modules that are known and that nothing watches get another layout than transformers'.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.modules import container
from transformers import activations

from fasttfm.nn.plain import is_plain, is_watched

# Attributes of transformers' modules with an activation: a module, or a function of the configuration.
ACTIVATIONS = ("intermediate_act_fn", "transform_act_fn", "activation", "act")
_ALWAYS = (container.__name__, activations.__name__)  # transformers' activations are functions of single elements


def are_row_wise(model: nn.Module, *modules: nn.Module) -> bool:
    """Whether these parts of a model, and all modules inside them, may be called with packed rows: they are known, and
    nothing watches them."""
    return all(not is_watched(each) and is_known(model, each) for module in modules for each in module.modules())


def is_known(model: nn.Module, module: nn.Module) -> bool:
    """Whether a module of a model is one that the ops replace, transformers' own of the model's family, patched or not,
    or PEFT's LoRA of a linear layer. Hooks do not matter."""
    kind = type(module)
    if is_plain(module) or kind.__module__ in _ALWAYS:
        return True
    if kind.__module__ == "peft.tuners.lora.layer":
        # All rows get the active adapters: ``adapter_names`` come by hooks. Variants may read positions.
        return kind.__name__ == "Linear" and not getattr(module, "lora_variant", None)
    # The files that define the patched class of the model and its bases.
    return kind.__module__ in {base.__module__ for base in type(model).__mro__} and not _has_function(module)


def _has_function(module: Any) -> bool:
    """Whether a module's activation is a function, which may be replaced without a trace in the tree of modules."""
    return any(name in module.__dict__ for name in ACTIVATIONS)
