"""``PackedTransformer``: a stack of transformer layers over packed tokens."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttfm.nn.lora import SelectedLinear, adapted_modules
from fasttfm.nn.packed_layer import NO_NORM, PackedLayer, draw_seeds
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import Tree, Uncopied, is_watched, plain_parameters
from fasttfm.ops import linear
from fasttfm.ops.attention import window_bounds
from fasttfm.ops.core.backends import Explanation
from fasttfm.ops.core.library import is_plain
from fasttfm.ops.layers import stack
from fasttfm.ops.layers.explain import explain
from fasttfm.ops.layers.spec import FIELDS, Adapter, Specs
from fasttfm.ops.layers.torch_executor import Inputs

Call = tuple[Specs, Inputs, list[Tensor | None]]  # the arguments of run_stack

# If the multiply-adds of a layer's [C, C] GEMM are fewer, the ops of ``first_tokens`` take longer than the rows that it
# saves.
_SIZABLE = 2**23

NOT_WHOLE = "takes layers that are plain, without hooks, wrappers or checkpointing"


class PackedTransformer(nn.Module):
    """Layers in order, all post-LN or all pre-LN.

    Args:
        layers: The layers. The same layer may occur more than once (ALBERT).
        final_norm: The LayerNorm that ends a pre-LN model.
    """

    layer_class: ClassVar[type[PackedLayer]] = PackedLayer
    fp8: Any = None  # fp8_inference sets it
    packed: Any = None  # a session on a CPU sets it (inference.cpu_linear.PackedLayers)

    def __init__(self, layers: Sequence[PackedLayer], final_norm: nn.LayerNorm | None = None) -> None:
        super().__init__()
        pre_norm = any(layer.norm_first for layer in layers)
        if pre_norm != (final_norm is not None) or any(layer.norm_first != pre_norm for layer in layers):
            raise ValueError(
                "PackedTransformer: layers: expected all pre-LN with a final_norm, or all post-LN without, got a mix"
            )
        unique = list(dict.fromkeys(layers))
        self.layers = nn.ModuleList(unique)
        self._repeated = [unique.index(layer) for layer in layers] if len(unique) < len(layers) else None
        self.final_norm = final_norm
        self.checkpointing = (
            False  # gradient checkpointing: layers save only their inputs and run again in the backward
        )

    def forward(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        *,
        hidden_states: list[Tensor] | None = None,
        with_last: bool = False,
        **inputs: Any,
    ) -> Tensor:
        """Runs the layers over ``x`` [T, C]. ``hidden_states`` collects the stream before each layer and, with
        ``with_last``, after the last one, before the final LayerNorm of a pre-LN model. ``inputs`` are additional
        arguments of layers of other classes."""
        if self.fp8 is not None and not self.training and not torch.is_grad_enabled():
            states: Tensor = self.fp8.run(x, cu_seqlens, max_seqlen, hidden_states, with_last, **inputs)
            return states
        if self.packed is not None and hidden_states is None and not inputs:
            whole: Tensor | None = self.packed.run(x, cu_seqlens, max_seqlen)
            if whole is not None:
                return whole
        call = self.call_of(x, cu_seqlens, max_seqlen) if hidden_states is None and not inputs else None
        if call is not None:
            return stack.run_stack(*call)[0]
        modules = self._modules_in_order()
        layers = self.in_order()
        drops = self.training and any(any(layer.probabilities()) for layer in layers)
        seeds = draw_seeds(x.device, len(layers)).unbind() if drops else [None] * len(layers)
        norms = self._norms_in_front(modules, layers)
        residual: Tensor | None = None
        if layers and norms[0] is not None:
            residual, x = x, layer_norm(norms[0], x)
        for index, (module, seed) in enumerate(zip(modules, seeds, strict=True)):
            if hidden_states is not None:
                hidden_states.append(x if residual is None else residual)
            following = norms[index + 1]
            run: Callable[..., Any] = partial(module, residual=residual, next_norm=following, seeds=seed, **inputs)
            if self.checkpointing and self.training:
                # A fused layer draws no random numbers, because its seeds are given. Its modules may draw some.
                draws = module is not layers[index] or not layers[index].is_fusable(following)
                run = partial(checkpoint, run, use_reentrant=False, preserve_rng_state=draws)
            x, residual = run(x, cu_seqlens, max_seqlen)
        if hidden_states is not None and with_last:
            hidden_states.append(x if residual is None else residual)
        return x

    def call_of(
        self,
        x: Tensor,
        cu_seqlens: Tensor,
        max_seqlen: int,
        tables: Mapping[Any, tuple[Tensor, Tensor]] = MappingProxyType({}),
        positions: Tensor | None = None,
    ) -> Call | None:
        """The arguments of ``run_stack`` for all layers; None if they have to run one by one: one of them is not plain
        or has FP8 GEMMs, gradient checkpointing is on, or the call is compiled. ``tables`` and ``positions`` are for
        layers that rotate queries and keys."""
        if (self.checkpointing and self.training) or torch.compiler.is_dynamo_compiling():
            return None
        if self.training and any(isinstance(layer, PackedLayer) and layer.uses_fp8() for layer in self.layers):
            return None
        described = self.described([*tables])
        if described is None:
            return None
        specs, parameters = described
        inputs = self.inputs_of(x, cu_seqlens, max_seqlen, tables, positions)
        (x,) = linear.autocast(inputs.x)
        seeds = draw_seeds(x.device, len(specs)) if specs.drop else None
        return specs, inputs._replace(x=x, seeds=seeds), parameters

    def described(self, keys: Sequence[Any] = ()) -> tuple[Specs, list[Tensor | None]] | None:
        """The layers as data, and their parameters, the FIELDS of each in one list; None if they have to run one by
        one. ``keys`` are what the tables depend on that rotate queries and keys."""
        plain = self.plain_layers()
        parameters = None if plain is None else plain.fields()
        if plain is None or parameters is None:
            return None
        absent = [parameter is None for parameter in parameters]
        of_layers = [layer.spec_settings(layer.__dict__) for layer, _ in plain.layers]
        settings = (of_layers, absent, keys, plain.epsilons(), plain.adapters())
        known: Any = self.__dict__.get("_specs")
        if known is None or known.settings != settings:
            known = self.__dict__["_specs"] = _Specs(settings, specs_of(plain.layers, keys, absent, settings[-1]))
        return None if known.specs is None else (known.specs, parameters)

    def inputs_of(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, tables: Mapping[Any, Any], positions: Tensor | None
    ) -> Inputs:
        """The inputs of a plan of the layers that ``described`` has just found, without dropout, for the stream ``x``
        [T, C] before the first one."""
        inputs = self.unadapted_inputs_of(x, cu_seqlens, max_seqlen, tables, positions)
        plain: PlainLayers | None = self.__dict__.get("_plan")
        return plain.with_adapters(inputs) if plain is not None and plain.adapted else inputs

    def unadapted_inputs_of(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, tables: Mapping[Any, Any], positions: Tensor | None
    ) -> Inputs:
        """The same for layers without LoRA."""
        first: Any = layer_in(next(iter(self.layers)))
        residual = x if first.norm_first else None
        if residual is not None and first.norm1 is not None:
            x = layer_norm(first.norm1, x)
        first.check(x, cu_seqlens, residual, None)
        return Inputs(x, residual, cu_seqlens.contiguous(), max_seqlen, None, tuple(tables.values()), positions)

    def rotations(self) -> dict[Any, int]:
        """The head size of the layers, by what the tables that rotate their queries and keys depend on."""
        return {}

    def plain_layers(self) -> PlainLayers | None:
        """The layers with their modules; None if some of them have to be called."""
        plan: PlainLayers | None = self.__dict__.get("_plan")
        if plan is None or plan.tree.root is not self or not plan.tree.is_unchanged():
            tree = Tree(self)
            if not tree.is_unchanged():  # something watches a module
                return None
            plan = self.__dict__["_plan"] = PlainLayers(tree, self._modules_in_order(), self.final_norm)
        return plan if plan.fusable and plan.is_readable() else None

    def first_tokens(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
        """The rows of ``forward``'s result that belong to the first tokens of the sequences, ``[sequences, C]``, of a
        post-LN model without windows on a CPU: the last layer computes only keys and values of the other tokens. None
        if ``forward`` has to compute all rows, or is faster because there are few of them."""
        sizable = x.is_cpu and x.numel() * x.shape[-1] >= _SIZABLE
        if not sizable or self.final_norm is not None or not is_plain((x, cu_seqlens)):
            return None
        last = self.in_order()[-1]
        full = last.window == window_bounds(causal=False, window=None)
        call = self.call_of(x, cu_seqlens, max_seqlen) if full else None
        if call is None or call[1].pairs:
            return None
        specs, inputs, parameters = call
        x = inputs.x
        if len(specs) > 1:
            x, _ = stack.run_stack(specs.without_last, inputs, parameters[: -len(FIELDS)])
        return last.first_tokens(x, cu_seqlens, max_seqlen, None if inputs.seeds is None else inputs.seeds[-1])

    def explain(self, x: Tensor, max_seqlen: int) -> Any:
        """How ``forward`` runs the layers for ``x`` [T, C]: by which plan, or one by one. Nothing is computed."""
        cu_seqlens = torch.tensor((0, x.shape[0]), dtype=torch.int32, device=x.device)
        call = self.call_of(x, cu_seqlens, max_seqlen, *self.angles(x, max_seqlen))
        if call is None:
            return Explanation("transformer_layers", "modules", {"core": NOT_WHOLE, "modules": None}, "modules")
        return explain(*call)

    def angles(self, x: Tensor, max_seqlen: int) -> tuple[Any, ...]:
        """The arguments of ``call_of`` for layers that rotate queries and keys."""
        return ()

    @property
    def order(self) -> list[int]:
        """The indices in ``layers`` of the layers that run. If no layer occurs twice, layers can be removed and
        added."""
        count = len(self.layers)
        if self._repeated is None:
            return list(range(count))
        if count != max(self._repeated) + 1:
            expected = f"{max(self._repeated) + 1}, because some of them run more than once"
            raise ValueError(f"PackedTransformer: layers: expected {expected}, got {count}")
        return self._repeated

    def in_order(self) -> list[PackedLayer]:
        """The layers in their order, without wrappers."""
        return [layer_in(module) for module in self._modules_in_order()]

    def _norms_in_front(self, modules: list[nn.Module], layers: list[PackedLayer]) -> list[nn.LayerNorm | None]:
        """In a pre-LN model: the first LayerNorm of each layer, which the previous layer applies, and the final one.

        None for a layer with a wrapper or hooks: only its own call may read its parameters. FSDP, for example, gathers
        them only there.
        """
        if self.final_norm is None:
            return [None] * (len(layers) + 1)
        is_called = [type(module) is not self.layer_class or is_watched(module) for module in modules]
        norms = [None if called else layer.norm1 for called, layer in zip(is_called, layers, strict=True)]
        return [*norms, self.final_norm]

    def _modules_in_order(self) -> list[nn.Module]:
        held = list(self.layers)
        return [held[index] for index in self.order]


_epsilon_of = operator.itemgetter("eps")
_BLOCK_MODULES = 6  # linear layers and norms of a layer, without norms of heads
_NO_HEAD_NORMS: dict[str, Any] = {"weight": None, "bias": None}  # in place of the parameters of two norms


class _Specs(Uncopied):
    """A stack's layers as data, and the settings from which they were made."""

    def __init__(self, settings: Any, specs: Specs | None) -> None:
        self.settings, self.specs = settings, specs


def are_described(layers: Sequence[Any]) -> bool:
    """Whether a ``LayerSpec`` can describe all layers."""
    return all(isinstance(layer, PackedLayer) and layer.is_described() for layer in layers)


def with_next_norms(layers: Sequence[Any], final_norm: nn.Module | None) -> list[tuple[Any, Any]]:
    """Each layer with the norm that it applies for the next one: None in a post-LN model, without a ``final_norm``."""
    if not layers or final_norm is None:
        return [(layer, None) for layer in layers]
    return list(zip(layers, [*(layer.norm1 for layer in layers[1:]), final_norm], strict=True))


def specs_of(
    layers: Sequence[tuple[Any, Any]],
    keys: Sequence[Any],
    absent: list[bool],
    adapters: Sequence[tuple[Adapter, ...]] = (),
) -> Specs | None:
    """The layers as data, each with its next norm; None if a description does not cover one of them. ``absent``: which
    FIELDS of each layer are None; ``adapters``: those of each layer, if there are any."""
    layer_specs = []
    for index, (layer, norm) in enumerate(layers):
        if not layer.has_spec():
            return None
        of_layer = absent[index * len(FIELDS) : (index + 1) * len(FIELDS)]
        present = frozenset(name for name, missing in zip(FIELDS, of_layer, strict=True) if not missing)
        described = layer.spec(norm, keys.index(layer.table_key()) if keys else None, present)
        layer_specs.append(replace(described, adapters=adapters[index]) if adapters else described)
    return Specs.of(layer_specs)


class PlainLayers(Uncopied):
    """What is needed to run a tree of modules as one stack, computed once for as long as the tree is unchanged."""

    def __init__(self, tree: Tree, layers: Sequence[Any], final_norm: nn.LayerNorm | None) -> None:
        self.tree = tree
        known = are_described(layers)
        self.layers = with_next_norms(layers, final_norm if known else None)
        self.fusable = known and bool(layers) and all(layer.has_readable_modules(norm) for layer, norm in self.layers)
        # For each layer, its linear layers that have adapters, by their names; empty if no layer has any.
        modules_of_layers = [adapted_modules(layer) for layer in layers] if known else []
        self.adapted = modules_of_layers if any(modules_of_layers) else []
        modules = [layer.block_modules(norm) for layer, norm in self.layers] if self.fusable else []
        # The owners of the parameters are in the order of FIELDS; a norm of heads has no bias.
        self._has_head_norms = any(m is not NO_NORM for of_layer in modules for m in of_layer[_BLOCK_MODULES:])
        self._owners: list[dict[str, Any]] = []
        for of_layer in modules:
            heads = [m._parameters for m in of_layer[_BLOCK_MODULES:]] if self._has_head_norms else [_NO_HEAD_NORMS]
            self._owners += [*(m._parameters for m in of_layer[:_BLOCK_MODULES]), *heads]
        # norm_a, norm_b, and the norms of heads where layers have them
        self._norms = [norm.__dict__ for of_layer in modules for norm in (of_layer[2], *of_layer[5:])]

    def fields(self) -> list[Tensor | None] | None:
        """The layers' parameters now, the FIELDS of each in one list; None if some are missing or not plain tensors."""
        values = plain_parameters(self._owners)
        if values is None or not self._has_head_norms:
            return values
        count, block = len(values) // len(self.layers), 2 * _BLOCK_MODULES
        fields: list[Tensor | None] = []
        for first in range(0, len(values), count):
            fields += [*values[first : first + block], *values[first + block : first + count : 2]]
        return fields

    def is_readable(self) -> bool:
        """Whether the adapters may be read now."""
        return all(linear.is_readable() for of_layer in self.adapted for linear in of_layer.values())

    def adapters(self) -> list[tuple[Adapter, ...]]:
        """The adapters of each layer as data; empty if no token has one."""
        adapters = [
            tuple(adapter for name, linear in of_layer.items() if (adapter := linear.adapter(name)) is not None)
            for of_layer in self.adapted
        ]
        return adapters if any(adapters) else []

    def with_adapters(self, inputs: Inputs) -> Inputs:
        """The inputs with the parameters of ``adapters``, and with the adapter of each token, if there are several."""
        if not self.adapters():
            return inputs
        modules = [m for of_layer in self.adapted for m in of_layer.values() if isinstance(m, SelectedLinear)]
        selected = modules[0].selection.adapters if modules else None
        pairs = [tuple(linear.pair() for linear in of_layer.values()) for of_layer in self.adapted]
        return inputs._replace(pairs=pairs, adapters=selected)

    def epsilons(self) -> list[float]:
        """The current epsilons of all norms."""
        return [*map(_epsilon_of, self._norms)]


def layer_in(module: nn.Module) -> PackedLayer:
    """The layer itself, or the layer inside a wrapper (torch.compile, checkpoint_wrapper)."""
    if isinstance(module, PackedLayer):
        return module
    for inner in module.modules():
        if isinstance(inner, PackedLayer):
            return inner
    raise TypeError(
        f"PackedTransformer: layers: expected a PackedLayer, or a module around one, got {type(module).__name__}"
    )
