"""``PretrainedModel``: the base class of all models: initialisation, tied weights, loading and saving of
checkpoints."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from fasttfm.models.checkpoint_files import (
    CONFIG,
    SHARD_BYTES,
    CheckpointError,
    CheckpointReader,
    write_tensors,
)
from fasttfm.models.checkpoint_names import Names, checkpoint_shapes, from_checkpoint, to_checkpoint
from fasttfm.models.config import ModelConfig
from fasttfm.models.directories import checkpoint_directory
from fasttfm.nn import PackedTransformer
from fasttfm.nn.lora import AdaptedLinear

COLBERT = "HF_ColBERT"  # the architecture of checkpoints whose projection is next to the encoder's weights
COLBERT_PROJECTION = "linear.weight"

Model = TypeVar("Model", bound="PretrainedModel")


class PretrainedModel(nn.Module):
    """A model that reads and writes checkpoint directories of transformers.

    A subclass defines its configuration class and the names of its parameters in checkpoints. ``base`` is true for a
    family's model without a head; models with a head contain one as ``names.prefix``.
    """

    config_class: ClassVar[type[ModelConfig]]
    names: Names
    base: ClassVar[bool] = False
    accepts_loss_kwargs: ClassVar[bool] = False  # read by transformers' Trainer: losses are means over the batch
    new_heads: tuple[str, ...] = ()  # the heads that ``from_pretrained`` has randomly initialized

    def __init__(self, config: Any) -> None:
        super().__init__()
        config.check()
        self.config = config

    def extra_repr(self) -> str:
        """The first line of what ``print`` shows."""
        first = next(self.parameters(), None)
        if first is None:
            return self.config.model_type
        count = sum(parameter.numel() for parameter in self.parameters())
        return f"{self.config.model_type}, {count:,} parameters, {str(first.dtype)[6:]} on {first.device}"

    def generate(self, *_: Any, **__: Any) -> Any:
        """Models have no such method: ``fasttfm.generate`` continues texts."""
        causal = "a causal model such as GPT2LMHeadModel"
        raise TypeError(
            f"{type(self).__name__}.generate: expected fasttfm.generate(model, input_ids, ...) with {causal}"
        )

    # ---- parameters --------------------------------------------------------------------------------------------------

    def finish(self) -> None:
        """Initializes and ties the parameters; a model's constructor calls this at its end."""
        self.apply(self.initialise)
        self.tie_weights()

    def initialise(self, module: nn.Module) -> None:
        """Initializes a module's parameters: normal weights, zero biases, identity LayerNorms. In a pre-LN model the
        blocks' outputs add up, so the weights of their last layers are divided by the square root of their number."""
        if isinstance(module, (nn.Linear, nn.Embedding, nn.Conv1d)):
            nn.init.normal_(module.weight, std=self.config.initializer_range)
        if isinstance(module, (nn.Linear, nn.Conv1d)) and module.bias is not None:
            nn.init.zeros_(module.bias)
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            with torch.no_grad():
                module.weight[module.padding_idx].zero_()
        if isinstance(module, PackedTransformer) and module.final_norm is not None:
            layers = module.in_order()
            for product in (product for layer in layers for product in (layer.out, layer.down)):
                nn.init.normal_(product.weight, std=self.config.initializer_range / math.sqrt(2 * len(layers)))

    def tied(self) -> dict[str, str]:
        """Tied parameters by name; by default the decoder is tied to the word table."""
        if "lm_head" not in self._modules or not self.config.tie_word_embeddings:
            return {}
        return {"lm_head.decoder.weight": f"{self.names.prefix}.embeddings.word.weight"}

    def repeated(self) -> dict[str, str]:
        """The parameters of ``tied()`` of which checkpoints nevertheless contain copies."""
        return {}

    def tie_weights(self) -> None:
        for name, source in self.tied().items():
            module, _, attribute = name.rpartition(".")
            setattr(self.get_submodule(module), attribute, self.get_parameter(source))

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """Each tied parameter has only one name, because safetensors does not allow shared tensors."""
        state: dict[str, Any] = super().state_dict(*args, **kwargs)
        for name in self.tied():
            state.pop(kwargs.get("prefix", "") + name, None)
        return state

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *others: Any) -> None:
        for name, source in self.tied().items():
            if prefix + source in state_dict:
                state_dict.setdefault(prefix + name, state_dict[prefix + source])
        super()._load_from_state_dict(state_dict, prefix, *others)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Mapping[str, Any] | None = None, **options: Any
    ) -> None:
        """Makes layers save only their inputs for the backward, and run again there: a third more work for less memory.

        Arguments are those of transformers, of which only the values ``use_reentrant=False``, ``every_n_layers=1`` and
        ``offload=False`` are supported.
        """
        so = {"use_reentrant": False, "every_n_layers": 1, "offload": False}
        for name, value in {**options, **(gradient_checkpointing_kwargs or {})}.items():
            if name not in so or value != so[name]:
                where = f"{type(self).__name__}.gradient_checkpointing_enable: {name}"
                raise ValueError(f"{where}: expected {so.get(name, 'no such argument')}, got {value}")
        self._checkpoint_layers(True)

    def gradient_checkpointing_disable(self) -> None:
        self._checkpoint_layers(False)

    def _checkpoint_layers(self, enabled: bool) -> None:
        for module in self.modules():
            if isinstance(module, PackedTransformer):
                module.checkpointing = enabled

    # ---- checkpoints -------------------------------------------------------------------------------------------------

    @classmethod
    def from_pretrained(
        cls: type[Model],
        directory: str | Path,
        *,
        dtype: torch.dtype | None = None,
        device: torch.device | str | None = None,
        new_head: str | None = None,
        revision: str | None = None,
        token: str | bool | None = None,
        **changes: Any,
    ) -> Model:
        """Reads a directory in transformers' format: ``config.json`` and ``model.safetensors`` or
        ``pytorch_model.bin``, possibly sharded. A string that is not a directory is a hub id, such as
        ``"bert-base-uncased"`` (``model_directory``). Of a training run it reads the newest checkpoint, of a
        sentence-transformers folder the transformer.

        The checkpoint may be of another model of the family: a head that it lacks is randomly initialized, with a
        warning, and listed in ``new_heads``; heads that only the checkpoint has are ignored. Any other parameter that
        is missing, has another shape or an unknown name raises ``CheckpointError`` with key and file.

        Args:
            dtype: The dtype of the parameters; as stored by default.
            device: The device of the parameters; the CPU by default.
            new_head: If given, the checkpoint's head is randomly initialized too, and this clause is the reason in the
                warning. Poolers and language model heads are kept.
            revision: For a hub id: a branch, tag or commit.
            token: For a hub id: an access token for private models; by default that of the user's login.
            changes: Fields of the configuration to override, for example ``num_labels``.

        Returns:
            The model in evaluation mode, as in transformers.
        """
        path = checkpoint_directory(directory, revision=revision, token=token)
        config = cls.config_class.from_pretrained(path)
        for name, value in changes.items():
            if not hasattr(config, name):
                raise ValueError(f"{cls.__name__}.from_pretrained: {name}: expected a field of {type(config).__name__}")
            setattr(config, name, value)
        try:
            with torch.device("meta"):
                model = cls(config)
        except ValueError as error:
            if changes:
                raise
            raise CheckpointError(f"{path / CONFIG}: {error}") from error
        state, new = model._read(path, new_head)
        model.load_state_dict(state, strict=False, assign=True)
        model._draw(new, dtype or next(iter(state.values())).dtype)
        model.tie_weights()
        return model.to(device=device, dtype=dtype).eval()

    def save_pretrained(self, directory: str | Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        """Writes a directory that ``from_pretrained``, here and in transformers, reads with the same bits. An existing
        checkpoint is replaced when the new one is complete; if the save fails, it is unchanged."""
        self._check_tied()
        if any(isinstance(module, AdaptedLinear) for module in self.modules()):
            expected = "a model without an adapter (models.save_adapter, models.merge_added_adapter)"
            raise ValueError(f"save_pretrained: expected {expected}, got one")
        tensors = self.checkpoint_tensors(dict(self.state_dict()))
        self._describe()
        write_tensors(Path(directory), tensors, shard_bytes, config=self.config.to_dict())

    def save_config(self, directory: str | Path) -> None:
        """Writes the configuration of ``save_pretrained`` without the weights."""
        self._describe()
        self.config.save_pretrained(directory)

    def _describe(self) -> None:
        """Adds the class and the dtype to the configuration."""
        self.config.extra["architectures"] = [type(self).__name__]
        self.config.extra["dtype"] = str(next(self.parameters()).dtype).removeprefix("torch.")

    def checkpoint_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts tensors with our parameters' names, such as gradients, to the names of a checkpoint of this
        model."""
        tied, repeated = self.tied(), self.repeated()
        untied = {name: value for name, value in tensors.items() if name not in tied}
        untied.update((name, tensors[source]) for name, source in repeated.items() if source in tensors)
        converted = to_checkpoint(self.names, {self._full(name): value for name, value in untied.items()})
        prefix = f"{self.names.prefix}."
        return {name.removeprefix(prefix): value for name, value in converted.items()} if self.base else converted

    def own_tensors(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Converts tensors with the names of a checkpoint of this model to our parameters' names."""
        prefix = f"{self.names.prefix}." if self.base else ""
        full = {prefix + name: value for name, value in tensors.items()}
        for tied in self.tied().items():  # tensors have one of the two names
            one, other = (self.names.find(self._full(name))[0][0] for name in tied)
            if one in full:
                full.setdefault(other, full[one])
        names = [name for name, _ in self.named_parameters()]
        return {name: from_checkpoint(self.names, self._full(name), full.__getitem__) for name in names}

    def _check_tied(self) -> None:
        """A checkpoint has one of two tied parameters: the other one's values would be lost if they differ."""
        parameters = dict(self.named_parameters(remove_duplicate=False))
        for name, source in self.tied().items():
            one, other = parameters.get(name), parameters.get(source)
            if one is None or other is None or one is other:
                continue
            if one.shape != other.shape or not torch.equal(one, other):
                expected = f"the values of {source}, to which it is tied (config.tie_word_embeddings)"
                raise CheckpointError(f"save_pretrained: {name}: expected {expected}, got others")

    def _full(self, name: str) -> str:
        """A parameter's name in a model with a head."""
        return f"{self.names.prefix}.{name}" if self.base else name

    def _read(self, directory: Path, new_head: str | None) -> tuple[dict[str, Tensor], list[str]]:
        """The checkpoint's tensors by our names, and the names of parameters that are randomly initialized. All keys
        and shapes are checked before any tensor is read."""
        reader = CheckpointReader(directory)
        keys = {name: key for name, key in self._full_names(reader) if not self.names.is_ignored(name)}
        for name, key in keys.items():
            if not self.names.known(name):
                raise CheckpointError(f"{reader.files[key]}: {key}: no model of this family has such a parameter")
        repeated = self.repeated()
        aliases = {name: source for name, source in self.tied().items() if name not in repeated}
        for alias, source in aliases.items():  # a file has one of the two names, most often the source's
            (other,), (main,) = (self.names.find(name)[0] for name in (alias, source))
            if main not in keys and other in keys:
                keys[main] = keys[other]
        shapes = {name: value.shape for name, value in self.state_dict().items() if name not in self.tied()}
        self._check_nothing_left(reader, keys, [*shapes, *self.tied()])
        new = self._heads_to_draw(shapes, keys, directory, new_head)
        for name, shape in shapes.items():
            if name in new:
                continue
            for theirs, expected in checkpoint_shapes(self.names, self._full(name), shape).items():
                shape_in_file = reader.shape(keys[theirs])
                if shape_in_file != expected:
                    where = f"{reader.files[keys[theirs]]}: {keys[theirs]}"
                    raise CheckpointError(f"{where}: expected shape {expected}, got {shape_in_file}")
        self._check_repeated(reader, keys)
        state = {
            name: from_checkpoint(self.names, self._full(name), lambda theirs: reader.tensor(keys[theirs]))
            for name in shapes
            if name not in new
        }
        return state, new

    def _check_nothing_left(self, reader: CheckpointReader, keys: dict[str, str], ours: list[str]) -> None:
        """Raises if the checkpoint has parameters of the base model that this model lacks, except for optional
        parts."""
        used = {theirs for name in ours for theirs in self.names.find(self._full(name))[0]}
        prefix = f"{self.names.prefix}."
        left = [name for name in keys if name.startswith(prefix) and name not in used]
        left = [name for name in left if self._optional_part(name.removeprefix(prefix)) is None]
        if left:
            more = f" and {len(left) - 1} more" if len(left) > 1 else ""
            raise CheckpointError(
                f"{reader.files[keys[left[0]]]}: {keys[left[0]]}{more}: expected only parameters of the model that "
                f"{CONFIG} describes, with {len(self._layers())} layers"
            )

    def _layers(self) -> list[nn.Module]:
        return [
            layer for module in self.modules() if isinstance(module, PackedTransformer) for layer in module.in_order()
        ]

    def _check_repeated(self, reader: CheckpointReader, keys: dict[str, str]) -> None:
        """Raises if the checkpoint's copies of a shared parameter are not equal."""
        for name, source in self.repeated().items():
            copies, originals = (self.names.find(self._full(parameter))[0] for parameter in (name, source))
            for copy, original in zip(copies, originals, strict=True):
                if copy not in keys:
                    raise CheckpointError(f"{reader.files[keys[original]]}: {copy}: missing")
                if not torch.equal(reader.tensor(keys[copy]), reader.tensor(keys[original])):
                    where = f"{reader.files[keys[copy]]}: {keys[copy]}"
                    raise CheckpointError(f"{where}: expected the values of {keys[original]}, which is shared")

    def _full_names(self, reader: CheckpointReader) -> Iterator[tuple[str, str]]:
        """Yields each key of the checkpoint and its name in a model with a head. Old files call LayerNorm's weight
        gamma."""
        prefix = f"{self.names.prefix}."
        whole = any(key.startswith(prefix) for key in reader.files)
        former = f"{self.names.former_prefix}."
        older = self.names.former_prefix != "" and any(key.startswith(former) for key in reader.files)
        is_colbert = COLBERT in (self.config.extra.get("architectures") or ())
        for key in reader.files:
            if is_colbert and key == COLBERT_PROJECTION:  # inference reads it
                continue
            name = key if whole or older else prefix + key
            if older and key.startswith(former):
                name = prefix + key.removeprefix(former)
            if name.endswith((".gamma", ".beta")):
                name = name.removesuffix(".gamma") + ".weight" if name.endswith("gamma") else name[:-4] + "bias"
            yield name, key

    def _heads_to_draw(
        self, shapes: dict[str, torch.Size], keys: dict[str, str], directory: Path, new_head: str | None
    ) -> list[str]:
        """The parameters of heads that the checkpoint lacks, and with ``new_head`` also of those that it has. Raises if
        anything else is missing."""
        missing: dict[str, list[str]] = {}
        present = set()
        for name in shapes:
            head = self._head(name)
            absent = [theirs for theirs in self.names.find(self._full(name))[0] if theirs not in keys]
            if absent:
                missing.setdefault(head, []).extend(absent)
            else:
                present.add(head)
        for head, absent in missing.items():
            if head == "" or head in present:
                raise CheckpointError(f"{directory}: {', '.join(sorted(absent))}: missing")
        if missing:
            heads = ", ".join(missing)
            warnings.warn(
                f"{directory} has no trained head ({heads}): randomly initialized, to be trained", stacklevel=4
            )
        replaced = present - {"", *self.names.optional, "lm_head"} if new_head is not None else set()
        if replaced:
            warnings.warn(f"{directory}: {new_head}: the head is randomly initialized, to be trained", stacklevel=4)
        self.new_heads = (*missing, *sorted(replaced))
        return [name for name in shapes if self._head(name) in self.new_heads]

    def _head(self, name: str) -> str:
        """The head, or optional part of the base model, that a parameter belongs to; empty for the rest of the base
        model."""
        inner = self._full(name).removeprefix(f"{self.names.prefix}.")
        if inner != self._full(name):
            return self._optional_part(inner) or ""
        return name.partition(".")[0]

    def _optional_part(self, name: str) -> str | None:
        """The optional part of the base model that a parameter of it belongs to."""
        return next((part for part in self.names.optional if f"{name}.".startswith(f"{part}.")), None)

    def _draw(self, new: list[str], dtype: torch.dtype) -> None:
        """Allocates and initializes new parameters."""
        modules = dict.fromkeys(name.rpartition(".")[0] for name in new)
        for name in modules:
            module = self.get_submodule(name)
            module.to_empty(device="cpu", recurse=False).to(dtype)
            if isinstance(module, nn.LayerNorm):
                module.reset_parameters()
            self.initialise(module)
