"""LoRA (Hu et al., 2022) by PEFT: low-rank updates of the layers' linear modules and the head are trained, the rest is
frozen. An adapter is saved with the parameter names of transformers' models, so that PEFT can open it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fasttfm._atomic_files import atomic_write, write_json
from fasttfm.inference.opening import stack_of
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.train.settings import at_least

TARGETS = ("qkv", "out", "up", "down")  # the linear modules of a layer
ADAPTER = "adapter"  # the adapter's directory, in the directory of the merged model
_NAME = "default"  # PEFT's default name of an adapter
_A, _B = (f".lora_{part}.{_NAME}.weight" for part in "AB")


def _peft() -> Any:
    try:
        import peft
    except ImportError:
        raise ImportError("LoRA needs PEFT: pip install peft") from None
    return peft


class Lora:
    """LoRA of all layers of a model.

    Args:
        model: The model, which is changed: all parameters but the head's are frozen, and the layers' linear modules get
            low-rank updates.
        rank: The rank of the updates.
        alpha: Updates are multiplied by ``alpha / rank``; twice the rank by default.
    """

    def __init__(self, model: PretrainedModel, rank: int, alpha: float | None = None) -> None:
        at_least("lora", rank, 1)
        self.model = model
        self.heads = [name for name, _ in model.named_parameters() if model._head(name)]
        self.config = _peft().LoraConfig(
            r=rank, lora_alpha=2 * rank if alpha is None else alpha, target_modules=list(TARGETS)
        )
        _peft().inject_adapter_in_model(self.config, stack_of(model).encoder, _NAME)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(name in self.heads or name.endswith((_A, _B)))

    def adapter(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The adapter's tensors and configuration for transformers' model. The update of our ``qkv`` becomes three
        updates, of queries, keys and values, with the same A and a third of the rows of B each."""
        model, tensors = self.model, {}
        parameters = {name: each.detach().cpu().contiguous() for name, each in model.named_parameters()}
        modules: list[str] = []
        for name, a in parameters.items():
            if not name.endswith(_A):
                continue
            own = name.removesuffix(_A)
            theirs, _ = model.names.find(model._full(f"{own}.weight"))
            rows = parameters[own + _B].chunk(len(theirs))
            for target, b in zip((each.removesuffix(".weight") for each in theirs), rows, strict=True):
                modules.append(target)
                tensors[f"{target}.lora_A.weight"], tensors[f"{target}.lora_B.weight"] = a.clone(), b.clone()
        tensors |= model.checkpoint_tensors({name: parameters[name] for name in self.heads})
        config = self.config.to_dict()
        config |= {
            "target_modules": sorted(set(modules)),
            "modules_to_save": sorted({model._head(name) for name in self.heads}) or None,
            "fan_in_fan_out": any(rule.transpose for rule in model.names.rules),
            "inference_mode": True,
        }
        values = {name: sorted(value) if isinstance(value, set) else value for name, value in config.items()}
        return {f"base_model.model.{name}": value for name, value in tensors.items()}, values

    def save(self, directory: Path) -> None:
        """Writes the adapter in PEFT's format."""
        from safetensors.torch import save_file

        tensors, config = self.adapter()
        (directory / ADAPTER).mkdir(parents=True, exist_ok=True)
        with atomic_write(directory / ADAPTER / "adapter_model.safetensors") as partial:
            save_file(tensors, partial, metadata={"format": "pt"})
        write_json(directory / ADAPTER / "adapter_config.json", config)

    @torch.no_grad()
    def merge(self) -> None:
        """Adds the updates to the weights and removes LoRA's modules."""
        from peft.tuners.tuners_utils import BaseTunerLayer

        for parent in list(stack_of(self.model).encoder.modules()):
            for name, child in list(parent.named_children()):
                if isinstance(child, BaseTunerLayer):
                    child.merge()
                    setattr(parent, name, child.get_base_layer())
