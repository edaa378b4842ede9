"""``Network``: a model as a session runs it, from packed ids to vectors, hidden states or logits."""

from __future__ import annotations

import copy
import functools
from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fasttfm.inference.adapters import adapters_of, check_unadapted
from fasttfm.inference.batches import Bucket, Packed, buffer_size, split_buffer, write_bucket
from fasttfm.inference.cpu_linear import pack_linears, packed_precision
from fasttfm.inference.late_interaction import Keys, ProjectedTokens, attending_to
from fasttfm.inference.opening import base_of
from fasttfm.inference.pooling import PADDED, POOLING, SPLADE, Layers, Tokens, pooling_names
from fasttfm.inference.settings import EmbedSettings, modules_after_pooling
from fasttfm.inference.spans import SPAN_COLUMNS, AnswerSpans
from fasttfm.inference.sparse import largest_logits
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head
from fasttfm.models.outputs import QuestionAnsweringOutput
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import LAST_STATES


class Output(Enum):
    """What a session computes."""

    VECTORS = "vectors"  # fp32 [width] of each sequence
    STATES = "states"  # fp32 [tokens, width of the layers]
    LOGITS = "logits"  # of the model's head: fp32 [labels] of each sequence, or [tokens, labels]
    SPARSE = "sparse"  # a weight of each word of the vocabulary, as SparseVectors
    MULTI = "multi"  # of a document: fp32 [tokens, width], a vector for each token (ColBERT)
    MULTI_QUERY = "multi-query"  # the same of a query
    SPANS = "spans"  # of a question and its context: fp32 [4], as AnswerSpans.found says

    __hash__ = object.__hash__  # Enum's is a function in Python, and every launch looks up a graph


TOKENS = (Output.MULTI, Output.MULTI_QUERY)
# The heads with a row of logits for each sequence, and those with one for each token.
_SEQUENCE_HEADS = (Head.SEQUENCE_CLASSIFICATION,)
_TOKEN_HEADS = (
    *(Head.MASKED_LM, Head.CAUSAL_LM, Head.REPLACED_TOKENS),
    *(Head.TOKEN_CLASSIFICATION, Head.QUESTION_ANSWERING),
)


class Inputs(NamedTuple):
    """A packed batch on the device."""

    ids: Tensor  # int64 [T]
    segments: Tensor | None  # int64 [T]
    cu_seqlens: Tensor  # int32 [sequences + 1]
    max_seqlen: int
    adapters: Tensor | None = None  # int32 [T]: the index of each token's LoRA adapter, -1 for none

    @classmethod
    def of(cls, batch: Packed, device: torch.device) -> Inputs:
        """Copies the batch to the device on the current stream, and waits for the copy."""
        shape, segments = Bucket(batch.tokens, batch.sequences, batch.max_seqlen), batch.segments is not None
        pinned = device.type == "cuda"
        host = torch.empty(buffer_size(shape, segments), dtype=torch.int32, device="cpu", pin_memory=pinned)
        write_bucket(host.numpy(), batch, shape, padding=0)
        adapters = None if batch.adapters is None else torch.from_numpy(batch.adapters).to(device)
        return cls(*split_buffer(host.to(device), shape, segments), batch.max_seqlen, adapters)


class Network:
    """A model in evaluation mode, on one device and in one dtype. The given model is not modified.

    Parameters of its own refer to the model's memory, or to copies: changes in place are changes of both, and the
    memory stays if the model gets other memory, for example on another device. The session's stream orders reads of it.

    Args:
        dtype: The dtype of weights and hidden states. On a CPU, bf16 applies only to the GEMMs.
        skipped: The number of tokens at the beginning of a text that are not pooled.
        int8: Whether GEMMs are computed in int8 (CPU only).
        fill: The id of tokens at the end of queries that no token attends to; None without them.
        answers: How spans are found.
        adapters: The directories of LoRA adapters, by their names.
        owns_model: Whether nothing else holds the model, so that its weights do not change. On a CPU weights in fp32
            are then packed.
    """

    def __init__(
        self,
        model: PretrainedModel,
        settings: EmbedSettings,
        device: torch.device,
        dtype: torch.dtype,
        skipped: int = 0,
        *,
        int8: bool = False,
        fill: int | None = None,
        answers: AnswerSpans | None = None,
        adapters: Mapping[str, Path] = MappingProxyType({}),
        owns_model: bool = False,
    ) -> None:
        self.settings, self.layers = settings, Layers.of(settings.layers)
        self._answers = AnswerSpans() if answers is None else answers
        self.pooling = pooling_names(settings.pooling)
        self.pads = not PADDED.isdisjoint(self.pooling)
        packed = packed_precision(device, dtype, int8=int8, may_pack=owns_model and not adapters)
        with torch.inference_mode(False):  # take_weights writes into the copies
            precision = dtype if packed is None else torch.float32
            self.model = _own_copy(model, device, precision, always=packed is not None and not owns_model)
        if packed is not None:
            check_unadapted(self.model)
            pack_linears(self.model, packed)
        self.adapters = adapters_of(self.model, adapters, packed=packed is not None)
        self.is_packed = packed is not None
        self.base = base_of(self.model)
        self.has_segments = self.base.has_segments
        depth = len(self.base.encoder.order)
        self.layers.check(depth)
        self.device, self.skipped = device, skipped
        self._after = copy.deepcopy(modules_after_pooling(settings)).to(device)
        self.head = _head_of(model)
        self.state_width = self.layers.widths(depth) * self.base.encoder.in_order()[0].width
        self.is_splade = SPLADE in self.pooling
        self.vocabulary: int = model.config.vocab_size
        self._token_weights = copy.deepcopy(settings.token_weights)
        if self._token_weights is not None:
            self._token_weights = self._token_weights.to(device=device, dtype=torch.float32)
        if self.is_splade:
            self._check_splade()
        tokens = settings.late_interaction
        self._tokens = None if tokens is None else ProjectedTokens(copy.deepcopy(tokens)).to(device)
        self._fill = fill
        if settings.dimensions is not None:
            assert self.vector_width == settings.dimensions  # the module refuses other numbers

    def _check_splade(self) -> None:
        if self.head is not Head.MASKED_LM:
            expected, got = "expected a model with a head for masked tokens", f"one for {self.head.value}"
        elif self.pooling != (SPLADE,):
            expected, got = "expected no other pooling with it", ", ".join(self.pooling)
        elif self.layers != Layers():
            expected, got = "expected layers='last' with it", f"{self.settings.layers!r}"
        elif self.skipped:
            expected, got = "expected pool_prompt=True with it", "False"
        else:
            return
        raise ValueError(f"Session: pooling: splade: {expected}, got {got}")

    @torch.no_grad()
    def take_weights(self, model: PretrainedModel) -> bool:
        """Copies the weights of the model of which this network was made, after they have changed. False if the network
        stores them in another layout, or if the model has other modules now: then a new network is needed."""
        modules = (self.model, model)
        ours, theirs = ({**dict(module.named_parameters()), **dict(module.named_buffers())} for module in modules)
        shapes = [{name: tensor.shape for name, tensor in tensors.items()} for tensors in (ours, theirs)]
        if self.is_packed or shapes[0] != shapes[1]:
            return False
        names = [name for name, tensor in theirs.items() if not _is_same_memory(ours[name], tensor)]
        if names:
            torch._foreach_copy_([ours[name] for name in names], [theirs[name] for name in names])
        return True

    @functools.cached_property
    def vector_width(self) -> int:
        """The number of elements of a vector."""
        with torch.inference_mode():
            width = self.vocabulary if self.is_splade else self.state_width * len(self.pooling)
            pooled = torch.zeros(1, width, device=self.device, dtype=torch.float32)
            return int(self._after(pooled).shape[-1])

    def check(self, output: Output) -> None:
        """Raises ValueError if the model does not compute the output."""
        if output is Output.LOGITS and self.head not in (*_SEQUENCE_HEADS, *_TOKEN_HEADS):
            able = ", ".join(head.value for head in (*_SEQUENCE_HEADS, *_TOKEN_HEADS))
            raise ValueError(f"Session: output: logits: expected a model with a head for {able}, got {self.head.value}")
        if output is Output.SPARSE and self._token_weights is None and self.head is not Head.MASKED_LM:
            expected = (
                "expected a model with a head for masked tokens, or a folder with weights of tokens (sparse_linear)"
            )
            raise ValueError(f"Session: output: sparse: {expected}, got one for {self.head.value}")
        if output is Output.SPANS and self.head is not Head.QUESTION_ANSWERING:
            expected = f"expected a model with a head for {Head.QUESTION_ANSWERING.value}"
            raise ValueError(f"Session: output: spans: {expected}, got {self.head.value}")
        if output in TOKENS and self._tokens is None:
            expected = "expected a folder of ColBERT's kind, or EmbedSettings(late_interaction=...)"
            raise ValueError(f"Session: output: {output.value}: {expected}, got none")

    def empty_shape(self, output: Output) -> tuple[int, ...] | None:
        """The shape of the result of a text without tokens; None for logits of tokens, of which a head knows it."""
        if output is Output.VECTORS:
            return (self.vector_width,)
        if output is Output.SPANS:
            return (SPAN_COLUMNS,)
        if self.is_per_sequence(output):
            return (int(self.model.config.num_labels),)
        if output is Output.STATES:
            return (0, self.state_width)
        return (0, self.token_width) if output in TOKENS else None

    def is_captured(self, output: Output) -> bool:
        """Whether CUDA graphs may compute the output; rows over the whole vocabulary have no room in their memory,
        and a query's tokens that others attend to are counted on the device."""
        if output is Output.MULTI_QUERY and self._fill is not None:
            return False
        return output is not Output.SPARSE and not (output is Output.VECTORS and self.is_splade)

    @property
    def sparse_width(self) -> int:
        """The number of elements of a sparse vector."""
        return self.vector_width if self.is_splade else self.vocabulary

    @property
    def has_token_weights(self) -> bool:
        """Whether the sparse output has a weight for each token, instead of one for each word."""
        return self._token_weights is not None

    def is_per_sequence(self, output: Output) -> bool:
        """Whether the output has a row for each sequence; otherwise one for each token."""
        if output is Output.SPARSE:
            return not self.has_token_weights
        per_sequence = output in (Output.VECTORS, Output.SPANS)
        return per_sequence or (output is Output.LOGITS and self.head in _SEQUENCE_HEADS)

    def reads_segments(self, output: Output) -> bool:
        """Whether the output depends on the segments of sequences."""
        return self.has_segments or output is Output.SPANS

    @torch.inference_mode()
    def finish(self, pooled: Tensor) -> Tensor:
        """The vectors of pooled states: dense layers, dimensions and norms, as the settings say."""
        vectors: Tensor = self._after(pooled)
        return vectors

    @torch.inference_mode()
    def run(self, output: Output, inputs: Inputs) -> Tensor:
        """fp32 [sequences, ...] or [T, ...]. Autocast of the calling thread has no effect."""
        if not torch.is_autocast_enabled(self.device.type):  # entering the context takes longer than this
            return self._run(output, inputs)
        with torch.autocast(self.device.type, enabled=False):
            return self._run(output, inputs)

    def _run(self, output: Output, inputs: Inputs) -> Tensor:
        if self.adapters is None:
            return self._rows(output, inputs)
        with self.adapters.of(inputs.adapters):
            return self._rows(output, inputs)

    def _rows(self, output: Output, inputs: Inputs) -> Tensor:
        if output is Output.LOGITS:
            return self._logits(inputs).float()
        if output is Output.SPANS:
            read = inputs if self._answers.segments else inputs._replace(segments=None)
            return self._answers.found(
                self._logits(read).float(), inputs.segments, inputs.cu_seqlens, inputs.max_seqlen
            )
        if output in TOKENS:
            return self._token_vectors(inputs, output)
        states = self._states(inputs)
        if output is Output.STATES:
            return states.float()
        if output is Output.SPARSE and self._token_weights is not None:
            return self._token_weights(states.float()).relu()
        if output is Output.SPARSE or self.is_splade:
            model: Any = self.model
            weights = largest_logits(model.lm_head, states, inputs.cu_seqlens, inputs.max_seqlen).log1p_()
            return self._after(weights) if self.is_splade else weights
        tokens = Tokens(states, inputs.cu_seqlens, inputs.max_seqlen, self.skipped)
        pooled = [POOLING[name](tokens) for name in self.pooling]
        vectors: Tensor = self._after(pooled[0] if len(pooled) == 1 else torch.cat(pooled, -1))
        return vectors

    def _token_vectors(self, inputs: Inputs, output: Output) -> Tensor:
        """fp32 [T, width]"""
        assert self._tokens is not None
        base = self.base
        if output is Output.MULTI_QUERY and self._fill is not None:
            base = attending_to(base, Keys.before_fill(inputs.ids, inputs.cu_seqlens, self._fill))
        vectors: Tensor = self._tokens(base.encode(**self._arguments(inputs)).x)
        return vectors

    @functools.cached_property
    def token_width(self) -> int:
        """The number of elements of a token's vector."""
        assert self._tokens is not None
        with torch.inference_mode():
            width = self.base.encoder.in_order()[0].width
            return int(self._tokens(torch.zeros(1, width, device=self.device, dtype=torch.float32)).shape[-1])

    def _states(self, inputs: Inputs) -> Tensor:
        """[T, width of the layers], in fp32 if several layers are combined"""
        last = self.layers == Layers()
        encoded = self.base.encode(**{**self._arguments(inputs), "output_hidden_states": not last})
        if last:
            return encoded.x
        assert encoded.hidden_states is not None
        return self.layers.join(encoded.hidden_states)

    def _logits(self, inputs: Inputs) -> Tensor:
        output: Any = self.model(**self._arguments(inputs))
        if isinstance(output, QuestionAnsweringOutput):
            assert output.start_logits is not None
            assert output.end_logits is not None
            return torch.stack([output.start_logits, output.end_logits], -1)
        logits: Tensor = output.logits
        return logits

    def _arguments(self, inputs: Inputs) -> dict[str, Any]:
        segments = inputs.segments if self.has_segments else None
        return {
            "input_ids": inputs.ids,
            "token_type_ids": segments,
            "cu_seqlens": inputs.cu_seqlens,
            "max_seqlen": inputs.max_seqlen,
            **LAST_STATES,
        }


def _own_copy(
    model: PretrainedModel, device: torch.device, dtype: torch.dtype, *, always: bool = False
) -> PretrainedModel:
    """A copy; where the model is as the session needs it, and not ``always``, one whose tensors share the memory of the
    model's: its modules stay in evaluation when the model is trained, and its tensors stay where they are when the
    model is moved or cast, which assigns other memory to the model's tensors."""
    tensors = [parameter for parameter in model.parameters() if parameter.is_floating_point()]
    if not always and all(parameter.dtype == dtype and parameter.device == device for parameter in tensors):
        namespaces = [
            namespace for module in model.modules() for namespace in (vars(module), module._parameters, module._buffers)
        ]
        # By the identity of the model's: tied tensors stay tied.
        shared = {
            id(value): _alias(value)
            for namespace in namespaces
            for value in namespace.values()
            if isinstance(value, Tensor)
        }
        return copy.deepcopy(model, shared).eval()
    return copy.deepcopy(model).eval().requires_grad_(False).to(device=device, dtype=dtype)


def _alias(tensor: Tensor) -> Tensor:
    """Another tensor with the same memory, without gradients."""
    alias = tensor.detach()
    return nn.Parameter(alias, requires_grad=False) if isinstance(tensor, nn.Parameter) else alias


def _is_same_memory(one: Tensor, other: Tensor) -> bool:
    return one.device == other.device and one.dtype == other.dtype and one.data_ptr() == other.data_ptr()


def _head_of(model: PretrainedModel) -> Head:
    """The head of a model's class, or of the one that it is a subclass of."""
    heads = {kind: head for family in FAMILIES.values() for head, kind in family.models.items()}
    return next((heads[kind] for kind in type(model).__mro__ if kind in heads), Head.NONE)
