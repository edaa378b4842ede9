"""GPT-2 (Radford et al., 2019): a causal transformer LM, pre-LN.

    z_0 = word + position
    y   = z_(i-1) + Attention(LN(z_(i-1))),    z_i = y + MLP(LN(y))        i = 1 ... layers
    x   = LN(z_layers)

Classes, arguments, outputs and checkpoints are those of transformers, whose weights are transposed. Internally a batch
is packed: padding is removed before the embeddings and restored only in outputs. GPT-1 (``openai_gpt.py``) and GPT-3
(``gpt3.py``) are built from the same parts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from fasttfm.models.checkpoint_names import Names, Rule, rule
from fasttfm.models.config import ModelConfig
from fasttfm.models.family import Family, Head
from fasttfm.models.objectives import CausalLM
from fasttfm.models.outputs import BaseModelOutput, ClassifierOutput, DoubleHeadsOutput, LMOutput
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import Encoded, Layout, TextModel, flatten_choices, text_model
from fasttfm.nn import CausalLMHead, Embeddings, PackedLayer, PackedTransformer
from fasttfm.nn.losses import classification_loss, token_loss
from fasttfm.ops.core.checks import IndexErrors

if TYPE_CHECKING:
    from typing_extensions import Unpack

_errors = IndexErrors("DoubleHeadsModel", ("mc_token_ids",), rows="sequence")


@dataclass
class GPTConfig(ModelConfig):
    """The common fields of all GPT configurations."""

    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **ModelConfig.required,
        "summary_type": ("cls_index",),
        "summary_use_proj": (True,),
        "summary_proj_to_labels": (True,),
    }

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    resid_pdrop: float = 0.1
    embd_pdrop: float = 0.1
    attn_pdrop: float = 0.1
    layer_norm_epsilon: float = 1e-5
    initializer_range: float = 0.02
    summary_activation: str | None = None  # of the multiple-choice head: tanh or None
    summary_first_dropout: float = 0.1  # before this head
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    recompute: bool = False  # PackedLayer's: less memory for a little time
    keep_activation: bool = False  # PackedLayer's: less time for more memory

    @property
    def inner_width(self) -> int:
        return 4 * self.n_embd

    @property
    def activation(self) -> str:
        raise NotImplementedError


@dataclass
class GPT2Config(GPTConfig):
    model_type: ClassVar[str] = "gpt2"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "tiny": {"n_layer": 2, "n_embd": 128, "n_head": 2},
        "small": {},
        "medium": {"n_layer": 24, "n_embd": 1024, "n_head": 16},
        "large": {"n_layer": 36, "n_embd": 1280, "n_head": 20},
        "xl": {"n_layer": 48, "n_embd": 1600, "n_head": 25},
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {
        **GPTConfig.required,
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    }

    n_inner: int | None = None  # 4 n_embd by default
    activation_function: str = "gelu_new"
    bos_token_id: int | None = 50256
    eos_token_id: int | list[int] | None = 50256

    @property
    def inner_width(self) -> int:
        return 4 * self.n_embd if self.n_inner is None else self.n_inner

    @property
    def activation(self) -> str:
        return self.activation_function


# ---- names in checkpoints --------------------------------------------------------------------------------------------

LAYER_NAMES = (
    rule("encoder.layers.*.qkv", "h.*.attn.c_attn", transpose=True),
    rule("encoder.layers.*.out", "h.*.attn.c_proj", transpose=True),
    rule("encoder.layers.*.norm1", "h.*.ln_1"),
    rule("encoder.layers.*.up", "h.*.mlp.c_fc", transpose=True),
    rule("encoder.layers.*.down", "h.*.mlp.c_proj", transpose=True),
    rule("encoder.layers.*.norm2", "h.*.ln_2"),
)


def names_of(*base: Rule) -> Names:
    """The names of a GPT family in checkpoints; ``base`` are the rules outside of the layers."""
    return Names(
        prefix="transformer",
        base=(*base, *LAYER_NAMES),
        heads=(
            rule("lm_head.decoder", "lm_head"),
            rule("multiple_choice", "multiple_choice_head.summary"),
            rule("score", "score"),
        ),
        ignored=(r"transformer\.h\.\d+\.attn\.(masked_)?bias",),  # the causal mask, in old files
    )


NAMES = names_of(rule("embeddings.word", "wte"), rule("embeddings.position", "wpe"), rule("encoder.final_norm", "ln_f"))


# ---- the model without a head ----------------------------------------------------------------------------------------


class GPT2Model(TextModel):
    """Embeddings, causal layers and the last LayerNorm. Segments (``token_type_ids``) are token ids, whose embeddings
    are added."""

    config_class: ClassVar[type[ModelConfig]] = GPT2Config
    names = NAMES
    norm_first: ClassVar[bool] = True

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        width = config.n_embd
        self.embeddings = Embeddings(
            config.vocab_size, width, config.n_positions, None, norm=False, dropout=config.embd_pdrop
        )
        self.encoder = PackedTransformer(
            [
                PackedLayer(
                    width,
                    config.n_head,
                    config.inner_width,
                    norm_first=self.norm_first,
                    activation=config.activation,
                    dropout=config.resid_pdrop,
                    attention_dropout=config.attn_pdrop,
                    eps=config.layer_norm_epsilon,
                    causal=True,
                    window=self.window(index),
                    recompute=config.recompute,
                    keep_activation=config.keep_activation,
                )
                for index in range(config.n_layer)
            ],
            nn.LayerNorm(width, eps=config.layer_norm_epsilon) if self.norm_first else None,
        )
        self.finish()

    def window(self, layer: int) -> tuple[int, int] | None:
        """How far before and after itself a token attends in a layer; None for no limit except causality."""
        return None

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        **layout: Unpack[Layout],
    ) -> BaseModelOutput:
        encoded = self.encode_packed(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        return BaseModelOutput(encoded.batch.unpack(encoded.x), None, **encoded.returned())


# ---- heads -----------------------------------------------------------------------------------------------------------


class GPT2Head(PretrainedModel):
    """A model around the layers."""

    config_class: ClassVar[type[ModelConfig]] = GPT2Config
    names = NAMES
    encoder_class: ClassVar[type[GPT2Model]] = GPT2Model

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.transformer = self.encoder_class(config)

    @property
    def encoder(self) -> TextModel:
        return text_model(f"{type(self).__name__}.transformer", self.transformer)


class NextTokenLoss:
    """The forward of models with an encoder and a ``CausalLMHead``: ``labels`` are ``input_ids``, with -100 for tokens
    that are not predicted."""

    def forward(
        self: Any,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        output_logits: bool = False,
        **layout: Unpack[Layout],
    ) -> LMOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        loss, logits = predict(self.lm_head, encoded, labels, output_logits)
        return LMOutput(loss, logits, **encoded.returned())


class GPT2LMHeadModel(NextTokenLoss, GPT2Head):
    """Predicts the next tokens: ``labels`` are ``input_ids``, with -100 for tokens that are not predicted."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.lm_head = CausalLMHead(config.n_embd, config.vocab_size)
        self.finish()


class GPT2DoubleHeadsModel(GPT2Head):
    """Predicts the next tokens and chooses between continuations: ``input_ids`` [B, choices, S], or packed with
    ``num_choices`` sequences per question. The choice is read from the token at ``mc_token_ids`` [B, choices], its
    column or, in a packed batch, its index in its sequence; by default from the last token. An index outside of its
    sequence raises ValueError; on a GPU its logit is NaN, and a later call or ``fasttfm.ops.check_errors()`` raises."""

    def __init__(self, config: GPTConfig) -> None:
        if config.summary_activation not in (None, "tanh"):
            got = repr(config.summary_activation)
            raise ValueError(f"{type(self).__name__}: summary_activation: expected 'tanh' or None, got {got}")
        config.num_labels = 1  # as HF's does
        super().__init__(config)
        self.lm_head = CausalLMHead(config.n_embd, config.vocab_size)
        self.dropout = nn.Dropout(config.summary_first_dropout)
        self.multiple_choice = nn.Linear(config.n_embd, 1)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        mc_token_ids: Tensor | None = None,
        labels: Tensor | None = None,
        mc_labels: Tensor | None = None,
        num_choices: int | None = None,
        output_logits: bool = False,
        **layout: Unpack[Layout],
    ) -> DoubleHeadsOutput:
        shape = input_ids.shape
        choices, input_ids, others = flatten_choices(
            type(self).__name__, num_choices, input_ids, attention_mask, token_type_ids, position_ids, labels
        )
        *others, labels = others
        encoded = self.encoder.encode(input_ids, *others, **layout)
        loss, logits = predict(self.lm_head, encoded, labels, output_logits)
        choice = self.choose(encoded, mc_token_ids).view(-1, choices)
        mc_loss = None if mc_labels is None else token_loss(choice, mc_labels.flatten())
        if logits is not None:
            logits = logits.view(*shape, -1)
        return DoubleHeadsOutput(loss, mc_loss, logits, choice, **encoded.returned())

    def choose(self, encoded: Encoded, columns: Tensor | None) -> Tensor:
        """A number [sequences, 1] for each continuation."""
        batch, known = encoded.batch, None
        if columns is None:
            states = batch.last_tokens(encoded.x)
        else:
            rows, known = batch.rows(columns.flatten())
            states = encoded.x.index_select(0, rows)
            if not torch.compiler.is_compiling():  # a compiled model gives NaN
                _errors.record("mc_token_ids", columns.flatten(), known, batch.cu_seqlens.diff())
        scores: Tensor = self.multiple_choice(self.dropout(states))
        if known is not None:
            scores = scores.where(known[:, None], torch.nan)
        return torch.tanh(scores) if self.config.summary_activation == "tanh" else scores


class LastTokenScore:
    """The logits of models with a layer ``score`` for the state of the last token that is not
    ``config.pad_token_id``."""

    def classify(
        self: Any, encoded: Encoded, input_ids: Tensor, labels: Tensor | None, num_orders: int = 1
    ) -> tuple[Tensor, Tensor | None]:
        """Logits [sequences / num_orders, labels], and their loss."""
        batch, padding = encoded.batch, self.config.pad_token_id
        states = batch.last_tokens(encoded.x, None if padding is None else batch.pack(input_ids) != padding)
        if num_orders > 1:
            states = states.unflatten(0, (-1, num_orders)).sum(1)
        logits = self.score(states)
        return logits, None if labels is None else classification_loss(logits, labels, self.config.problem_type)


class GPT2ForSequenceClassification(LastTokenScore, GPT2Head):
    """Labels sequences by their last token that is not ``config.pad_token_id``. With ``num_orders`` above 1, each group
    of ``num_orders`` consecutive sequences is one example with its texts in different orders: their states are added,
    and it has one label (GPT-1's similarity of two sentences)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__(config)
        self.score = nn.Linear(config.n_embd, config.num_labels, bias=False)
        self.finish()

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        position_ids: Tensor | None = None,
        *,
        labels: Tensor | None = None,
        num_orders: int = 1,
        **layout: Unpack[Layout],
    ) -> ClassifierOutput:
        encoded = self.encoder.encode(input_ids, attention_mask, token_type_ids, position_ids, **layout)
        logits, loss = self.classify(encoded, input_ids, labels, num_orders)
        return ClassifierOutput(loss, logits, **encoded.returned())


def predict(
    head: CausalLMHead, encoded: Encoded, labels: Tensor | None, output_logits: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Loss and logits. Logits of all tokens take much memory: with a loss they are computed only if requested."""
    batch = encoded.batch
    loss = None if labels is None else head.loss(encoded.x, batch.pack(labels), batch.cu_seqlens)
    return loss, batch.unpack(head(encoded.x)) if labels is None or output_logits else None


FAMILY = Family(
    "GPT-2",
    GPT2Config,
    {
        Head.NONE: GPT2Model,
        Head.PRETRAINING: GPT2LMHeadModel,
        Head.CAUSAL_LM: GPT2LMHeadModel,
        Head.SEQUENCE_CLASSIFICATION: GPT2ForSequenceClassification,
        Head.MULTIPLE_CHOICE: GPT2DoubleHeadsModel,
    },
    pretraining=CausalLM,
    sequences="causal",
    tokenizer="bpe",
    positions="n_positions",
    patching="gpt2",
    benchmark=Head.CAUSAL_LM,
)
