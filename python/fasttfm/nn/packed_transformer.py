"""``PackedTransformer``: a stack of transformer layers over packed tokens."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from fasttfm.nn.packed_layer import PackedLayer, draw_seeds
from fasttfm.nn.parts import layer_norm
from fasttfm.nn.plain import Tree, Uncopied, is_watched, plain_parameters
from fasttfm.ops import linear
from fasttfm.ops.attention import window_bounds
from fasttfm.ops.backends import Explanation, explain, requested
from fasttfm.ops.layers.spec import FIELDS, LayerSpec, Specs
from fasttfm.ops.layers.torch_executor import Inputs
from fasttfm.ops.library import is_plain
from fasttfm.ops.transformer_block import BlockOptions
from fasttfm.ops.transformer_native import PARAMETERS, layers_in
from fasttfm.ops.transformer_stack import run_layers

Group = tuple[BlockOptions, list[Tensor | None]]  # consecutive layers with the same options, and their parameters

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
    int8: Any = None  # a session in int8 sets it

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
            found: Tensor = self.fp8.run(x, cu_seqlens, max_seqlen, hidden_states, with_last, **inputs)
            return found
        groups = self.groups(max_seqlen) if hidden_states is None and not inputs else None
        if groups is not None:
            return self._run_whole(x, cu_seqlens, groups)
        if self.int8 is not None and hidden_states is None and not inputs:
            whole: Tensor | None = self.int8.run(x, cu_seqlens, max_seqlen)
            if whole is not None:
                return whole
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

    def groups(self, max_seqlen: int) -> list[Group] | None:
        """The op's arguments for the whole stack; None if the layers have to run one by one: one of them is not plain
        or has FP8 GEMMs, gradient checkpointing is on, or the call is compiled."""
        if (self.checkpointing and self.training) or torch.compiler.is_dynamo_compiling():
            return None
        if self.training and any(isinstance(each, PackedLayer) and each.uses_fp8() for each in self.layers):
            return None
        plan = self.plain_layers()
        return None if plan is None else plan.groups(max_seqlen)

    def described(self, keys: Sequence[Any] = ()) -> tuple[Specs, list[Tensor | None]] | None:
        """The layers as data, and their parameters, the FIELDS of each in one list; None if they have to run one by
        one. ``keys`` are what the tables depend on that rotate queries and keys."""
        plain = self.plain_layers()
        parameters = None if plain is None else plain.fields()
        if plain is None or parameters is None:
            return None
        absent = [each is None for each in parameters]
        settings = ([each.spec_settings(each.__dict__) for each, _ in plain.layers], absent, keys, plain.epsilons())
        known: Any = self.__dict__.get("_specs")
        if known is None or known.settings != settings:
            known = self.__dict__["_specs"] = _Specs(settings, specs_of(plain.layers, keys, absent))
        return None if known.specs is None else (known.specs, parameters)

    def inputs_of(
        self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int, tables: Mapping[Any, Any], positions: Tensor | None
    ) -> Inputs:
        """The inputs of a plan of the layers, without dropout, for the stream ``x`` [T, C] before the first one."""
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
        return plan if plan.fusable else None

    def first_tokens(self, x: Tensor, cu_seqlens: Tensor, max_seqlen: int) -> Tensor | None:
        """The rows of ``forward``'s result that belong to the first tokens of the sequences, ``[sequences, C]``, of a
        post-LN model without windows on a CPU: the last layer computes only keys and values of the other tokens. None
        if ``forward`` has to compute all rows, or is faster because there are few of them."""
        sizable = x.is_cpu and x.numel() * x.shape[-1] >= _SIZABLE
        if not sizable or self.final_norm is not None or not is_plain((x, cu_seqlens)):
            return None
        groups = self.groups(max_seqlen)
        if groups is None:
            return None
        last = self.in_order()[-1]
        if last.window != window_bounds(causal=False, window=None):
            return None
        return self._run_whole(x, cu_seqlens, groups, first_tokens_of=last)

    def _run_whole(
        self, x: Tensor, cu_seqlens: Tensor, groups: list[Group], *, first_tokens_of: PackedLayer | None = None
    ) -> Tensor:
        """Runs the layers by one op for each group of layers with the same options. The last layer, where it is given
        as ``first_tokens_of``, computes only the first tokens' states."""
        first: Any = next(iter(self.layers))
        residual: Tensor | None = None
        if self.final_norm is not None:
            residual, x = x, layer_norm(first.norm1, x)
        (x,) = linear.autocast(x)
        first.check(x, cu_seqlens, residual, None)
        drops = any(options.attention_p or options.p_a or options.p_b for options, _ in groups)
        layers = sum(len(given) for _, given in groups) // PARAMETERS
        seeds = draw_seeds(x.device, layers) if drops else None
        longest = groups[-1][0].max_seqlen
        if first_tokens_of is not None:
            groups = [*groups[:-1], (groups[-1][0], groups[-1][1][:-PARAMETERS])]
        start = 0
        for options, given in groups:
            end = start + len(given) // PARAMETERS
            if given:
                own = None if seeds is None else seeds[start:end]
                x, residual = run_layers(x, residual, cu_seqlens, own, options, given)
            start = end
        if first_tokens_of is not None:
            return first_tokens_of.first_tokens(x, cu_seqlens, longest, None if seeds is None else seeds[-1])
        return x

    def explain(self, x: Tensor, max_seqlen: int) -> Explanation:
        """Which implementation ``forward`` uses for ``x`` [T, C], and why not the others: "cpu", "cuda" or
        "cuda_few_rows" is one native call, "ops" runs a layer's ops one by one. Nothing is computed."""
        groups = self.groups(max_seqlen)
        if groups is None:
            reasons = {"cpu": NOT_WHOLE, "cuda_few_rows": NOT_WHOLE, "cuda": NOT_WHOLE, "ops": None}
            return Explanation("transformer_stack", "ops", reasons, "ops")
        residual = None if self.final_norm is None else x
        (normalised,) = linear.autocast(x)
        parameters = layers_in([each for _, given in groups for each in given])
        return explain("transformer_stack", normalised, residual, groups[0][0], parameters)

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
        own = [type(module) is not self.layer_class or is_watched(module) for module in modules]
        norms = [None if each else layer.norm1 for each, layer in zip(own, layers, strict=True)]
        return [*norms, self.final_norm]

    def _modules_in_order(self) -> list[nn.Module]:
        held = list(self.layers)
        return [held[index] for index in self.order]


# The attributes that determine a layer's options, in addition to the epsilons of its norms.
_settings_of = operator.itemgetter(
    *("training", "dropout", "feed_forward_dropout", "attention_dropout"),
    *("heads", "window", "activation", "recompute", "keep_activation"),
)
_epsilon_of = operator.itemgetter("eps")
_BLOCK_VALUES = 12  # weights and biases of a layer's linear layers and norms, without norms of heads


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


def specs_of(layers: Sequence[tuple[Any, Any]], keys: Sequence[Any], absent: list[bool]) -> Specs | None:
    """The layers as data, each with its next norm; None if a description does not cover one of them. ``absent``: which
    FIELDS of each layer are None."""
    specs: dict[LayerSpec, LayerSpec] = {}  # equal ones once
    found = []
    for index, (layer, norm) in enumerate(layers):
        if not layer.has_spec():
            return None
        of_layer = absent[index * len(FIELDS) : (index + 1) * len(FIELDS)]
        present = frozenset(name for name, missing in zip(FIELDS, of_layer, strict=True) if not missing)
        described = layer.spec(norm, keys.index(layer.table_key()) if keys else None, present)
        found.append(specs.setdefault(described, described))
    return Specs(found)


class PlainLayers(Uncopied):
    """What is needed to run a tree of modules as one stack, computed once for as long as the tree is unchanged."""

    def __init__(self, tree: Tree, layers: Sequence[Any], final_norm: nn.LayerNorm | None) -> None:
        self.tree = tree
        known = are_described(layers)
        self.layers = with_next_norms(layers, final_norm if known else None)
        self.fusable = known and bool(layers) and all(layer.has_plain_modules(norm) for layer, norm in self.layers)
        modules = [layer.block_modules(norm) for layer, norm in self.layers] if self.fusable else []
        self._owners = [each._parameters for own in modules for each in own]
        self._layers = [layer.__dict__ for layer in layers]
        # norm_a, norm_b, and the norms of heads where layers have them
        self._norms = [norm.__dict__ for own in modules for norm in (own[2], *own[5:])]
        # Settings, and what follows from them: the options of consecutive layers, and which parameters are theirs.
        self._known: tuple[Any, list[tuple[BlockOptions, slice]]] = (None, [])

    def parameters(self) -> list[Tensor | None] | None:
        """The layers' parameters now; None if some are missing or not plain tensors."""
        return plain_parameters(self._owners)

    def fields(self) -> list[Tensor | None] | None:
        """The same in the order of ``FIELDS``; norms of heads have no bias."""
        values = self.parameters()
        if values is None:
            return None
        count = len(values) // len(self.layers)
        fields: list[Tensor | None] = []
        for first in range(0, len(values), count):
            end = first + _BLOCK_VALUES
            heads = values[end : first + count : 2] or [None] * (len(FIELDS) - _BLOCK_VALUES)
            fields += [*values[first:end], *heads]
        return fields

    def epsilons(self) -> list[float]:
        """The current epsilons of all norms."""
        return [*map(_epsilon_of, self._norms)]

    def groups(self, max_seqlen: int) -> list[Group] | None:
        """The layers' options and parameters now; None if parameters are missing or not plain tensors."""
        values = self.parameters()
        if values is None:
            return None
        settings = (requested(None), [*map(_settings_of, self._layers)], self.epsilons())
        known, groups = self._known
        if settings != known:
            groups = self._grouped(max_seqlen)
            self._known = (settings, groups)
        return [(_with_length(options, max_seqlen), values[own]) for options, own in groups]

    def _grouped(self, max_seqlen: int) -> list[tuple[BlockOptions, slice]]:
        found, end = [], 0
        for options, group in itertools.groupby(layer.block_options(max_seqlen, norm) for layer, norm in self.layers):
            start, end = end, end + PARAMETERS * len(list(group))
            found.append((options, slice(start, end)))
        return found


def _with_length(options: BlockOptions, max_seqlen: int) -> BlockOptions:
    return options if options.max_seqlen == max_seqlen else options._replace(max_seqlen=max_seqlen)


def layer_in(module: nn.Module) -> PackedLayer:
    """The layer itself, or the layer inside a wrapper (torch.compile, checkpoint_wrapper)."""
    if isinstance(module, PackedLayer):
        return module
    for each in module.modules():
        if isinstance(each, PackedLayer):
            return each
    raise TypeError(
        f"PackedTransformer: layers: expected a PackedLayer, or a module around one, got {type(module).__name__}"
    )
