"""ViT (Dosovitskiy et al., 2020): a pre-LN transformer encoder over the patches of an image.

    x_0 = (class token, W patch_1, ..., W patch_n) + position
    x_i = y + MLP(LN(y)),    y = x_(i-1) + Attention(LN(x_(i-1)))        i = 1 ... layers
    x = LN(x_layers),    logits = V x[class token]

Classes, arguments, outputs and checkpoints are those of transformers. Patches do not overlap, so their embedding is one
GEMM. The layers are those of the other families: all images of a batch have the same number of tokens, without padding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.models.checkpoint_names import Names, rule
from fasttfm.models.config import ModelConfig
from fasttfm.models.family import Family, Head
from fasttfm.models.outputs import BaseModelOutput, ClassifierOutput, MaskedImageOutput
from fasttfm.models.pretrained import PretrainedModel
from fasttfm.models.text_model import BaseModel, Encoded, Outputs
from fasttfm.nn import PackedBatch, PackedLayer, PackedTransformer, PatchEmbeddings
from fasttfm.nn.losses import classification_loss
from fasttfm.nn.patch_embeddings import MaskToken, PatchProjection
from fasttfm.nn.plain import is_watched
from fasttfm.ops import linear

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _sizes(width: int, layers: int, heads: int, **others: Any) -> dict[str, Any]:
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    return {**sizes, "intermediate_size": 4 * width, **others}


@dataclass
class ViTConfig(ModelConfig):
    model_type: ClassVar[str] = "vit"
    sizes: ClassVar[dict[str, dict[str, Any]]] = {
        "mini": _sizes(64, 4, 4, image_size=28, patch_size=7, encoder_stride=7),  # for small images
        "tiny": _sizes(192, 12, 3),
        "small": _sizes(384, 12, 6),
        "base": {},
        "large": _sizes(1024, 24, 16),
        "huge": _sizes(1280, 32, 16, patch_size=14, encoder_stride=14),
    }
    required: ClassVar[dict[str, tuple[Any, ...]]] = {**ModelConfig.required, "pooler_act": ("tanh",)}

    hidden_size: int = 768
    num_hidden_layers: int = 12
    num_attention_heads: int = 12
    intermediate_size: int = 3072
    hidden_act: str = "gelu"
    hidden_dropout_prob: float = 0.0
    attention_probs_dropout_prob: float = 0.0
    initializer_range: float = 0.02
    layer_norm_eps: float = 1e-12
    image_size: int | list[int] = 224  # or height and width
    patch_size: int | list[int] = 16
    num_channels: int = 3
    qkv_bias: bool = True
    encoder_stride: int = 16  # for masked image modelling: the reconstructed pixels per patch in each direction
    pooler_output_size: int | None = None  # hidden_size by default
    recompute: bool = False  # PackedLayer's: less memory for a little time
    keep_activation: bool = False  # PackedLayer's: less time for more memory

    def image(self) -> tuple[int, int]:
        """Height and width of an image."""
        return _height_and_width("image_size", self.image_size)

    def patch(self) -> tuple[int, int]:
        """Height and width of a patch."""
        return _height_and_width("patch_size", self.patch_size)

    def tokens(self) -> int:
        """The tokens of an image: its patches and the class token."""
        height, width = (pixels // patch for pixels, patch in zip(self.image(), self.patch(), strict=True))
        return 1 + height * width


def _height_and_width(name: str, size: int | list[int]) -> tuple[int, int]:
    both = (size, size) if isinstance(size, int) else tuple(size)
    if len(both) != 2:
        raise ValueError(f"ViTConfig: {name}: expected a number, or height and width, got {size}")
    return both


_LAYER = "encoder.layer.*"
NAMES = Names(
    prefix="vit",
    base=(
        rule("embeddings.cls_token", "embeddings.cls_token"),
        rule("embeddings.mask_token.weight", "embeddings.mask_token"),
        rule("embeddings.position", "embeddings.position_embeddings"),
        rule("embeddings.projection", "embeddings.patch_embeddings.projection"),
        rule("encoder.layers.*.norm1", f"{_LAYER}.layernorm_before"),
        rule("encoder.layers.*.qkv", *(f"{_LAYER}.attention.attention.{part}" for part in ("query", "key", "value"))),
        rule("encoder.layers.*.out", f"{_LAYER}.attention.output.dense"),
        rule("encoder.layers.*.norm2", f"{_LAYER}.layernorm_after"),
        rule("encoder.layers.*.up", f"{_LAYER}.intermediate.dense"),
        rule("encoder.layers.*.down", f"{_LAYER}.output.dense"),
        rule("encoder.final_norm", "layernorm"),
        rule("pooler", "pooler.dense"),
    ),
    heads=(rule("classifier", "classifier"), rule("decoder", "decoder.0")),
    optional=("pooler", "embeddings.mask_token"),
)


class ViTParts(PretrainedModel):
    """The common part of models with and without a head."""

    config_class = ViTConfig
    names = NAMES

    def initialise(self, module: nn.Module) -> None:
        """Draws weights as transformers does: truncated normal, with one standard deviation for all linear layers."""
        if isinstance(module, PatchEmbeddings):
            for table in (module.cls_token, module.position):
                self._draw_weight(table)
        elif isinstance(module, MaskToken):
            nn.init.zeros_(module.weight)
        elif isinstance(module, (nn.Linear, PatchProjection, PixelDecoder)):
            self._draw_weight(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)

    def _draw_weight(self, weight: Tensor) -> None:
        nn.init.trunc_normal_(weight, std=self.config.initializer_range)


class ViTModel(ViTParts, BaseModel):
    """The encoder, with a pooler on the class token."""

    def __init__(self, config: ViTConfig, add_pooling_layer: bool = True, use_mask_token: bool = False) -> None:
        super().__init__(config)
        width = config.hidden_size
        self.embeddings = PatchEmbeddings(
            width,
            config.image(),
            config.patch(),
            channels=config.num_channels,
            dropout=config.hidden_dropout_prob,
            mask_token=use_mask_token,
        )
        layers = [
            PackedLayer(
                width,
                config.num_attention_heads,
                config.intermediate_size,
                norm_first=True,
                activation=config.hidden_act,
                dropout=config.hidden_dropout_prob,
                attention_dropout=config.attention_probs_dropout_prob,
                eps=config.layer_norm_eps,
                qkv_bias=config.qkv_bias,
                recompute=config.recompute,
                keep_activation=config.keep_activation,
            )
            for _ in range(config.num_hidden_layers)
        ]
        self.encoder = PackedTransformer(layers, nn.LayerNorm(width, eps=config.layer_norm_eps))
        self.pooler = nn.Linear(width, config.pooler_output_size or width) if add_pooling_layer else None
        self.finish()

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **options: Unpack[Outputs],
    ) -> BaseModelOutput:
        """Runs the model over ``pixel_values`` [B, channels, height, width]. ``bool_masked_pos`` [B, patches] is true
        for patches that the mask token replaces; ``interpolate_pos_encoding`` allows images of other sizes."""
        encoded = self.encode_packed(pixel_values, bool_masked_pos, interpolate_pos_encoding, **options)
        states = encoded.batch.unpack(encoded.x)
        pooled = None if self.pooler is None else torch.tanh(self.pooler(states[:, 0]))
        return BaseModelOutput(states, pooled, **encoded.returned())

    def encode(self, *images: Any, **options: Any) -> Encoded:
        """The packed states of the last layer, for a model with a head. If this module has hooks or is a subclass, it
        is called."""
        if type(self) is ViTModel and not is_watched(self):
            return self.encode_packed(*images, **options)
        output = self(*images, **options)
        batch = PackedBatch.full(output.last_hidden_state[..., 0])
        return Encoded(batch.pack(output.last_hidden_state), batch, output.hidden_states, output.attentions)

    def encode_packed(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        *,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
    ) -> Encoded:
        """The packed states of the last layer, for this module's own forward."""
        output_hidden_states, output_attentions = self.outputs(output_hidden_states, output_attentions)
        masked = None if bool_masked_pos is None else bool_masked_pos.bool()
        x = self.embeddings(pixel_values, masked, interpolate=bool(interpolate_pos_encoding))
        batch = PackedBatch.full(x[..., 0])
        states: list[Tensor] | None = [] if output_hidden_states or output_attentions else None
        # In transformers the last of the hidden states is before the final LayerNorm.
        x = self.encoder(batch.pack(x), batch.cu_seqlens, batch.max_seqlen, hidden_states=states, with_last=True)
        attentions = self.attentions(states[:-1], batch) if states is not None and output_attentions else None
        hidden = tuple(batch.unpack(state) for state in states) if states is not None and output_hidden_states else None
        return Encoded(x, batch, hidden, attentions)


# ---- heads -----------------------------------------------------------------------------------------------------------


class ViTHead(ViTParts):
    """A model around the encoder."""

    def __init__(self, config: ViTConfig, *, mask_token: bool = False) -> None:
        super().__init__(config)
        self.vit = ViTModel(config, add_pooling_layer=False, use_mask_token=mask_token)


class ViTForImageClassification(ViTHead):
    """Labels images. The loss follows ``config.problem_type`` (nn.losses.classification_loss)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config)
        self.classifier = nn.Linear(config.hidden_size, config.num_labels)
        self.finish()

    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **options: Unpack[Outputs],
    ) -> ClassifierOutput:
        encoded = self.vit.encode(pixel_values, None, interpolate_pos_encoding, **options)
        logits = self.classifier(encoded.batch.first_tokens(encoded.x))
        loss = None if labels is None else classification_loss(logits, labels, self.config.problem_type)
        return ClassifierOutput(loss, logits, **encoded.returned())


class PixelDecoder(nn.Module):
    """A linear projection of a patch's state to its pixels. ``weight`` [pixels, C, 1, 1] is the weight of the
    convolution that other implementations use."""

    def __init__(self, width: int, pixels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(pixels, width, 1, 1))
        self.bias = nn.Parameter(torch.zeros(pixels))

    def forward(self, x: Tensor) -> Tensor:
        return linear.dense(x, self.weight.flatten(1), self.bias)


class ViTForMaskedImageModeling(ViTHead):
    """Reconstructs the pixels of masked patches (SimMIM)."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__(config, mask_token=True)
        self.decoder = PixelDecoder(config.hidden_size, config.encoder_stride**2 * config.num_channels)
        self.finish()

    def forward(
        self,
        pixel_values: Tensor,
        bool_masked_pos: Tensor | None = None,
        interpolate_pos_encoding: bool | None = None,
        **options: Unpack[Outputs],
    ) -> MaskedImageOutput:
        """With ``bool_masked_pos`` the loss is the mean of |pixel - reconstruction| over masked patches."""
        stride, patch = self.config.encoder_stride, self.config.patch()
        if bool_masked_pos is not None and patch != (stride, stride):
            expected = f"{stride}, as encoder_stride, for a loss"
            raise ValueError(f"ViTForMaskedImageModeling: patch_size: expected {expected}, got {patch}")
        encoded = self.vit.encode(pixel_values, bool_masked_pos, interpolate_pos_encoding, **options)
        rows = self.decoder(encoded.batch.unpack(encoded.x)[:, 1:])
        grid = (pixel_values.shape[2] // patch[0], pixel_values.shape[3] // patch[1])
        reconstruction = functional.pixel_shuffle(rows.mT.unflatten(2, grid), stride)
        loss = None
        if bool_masked_pos is not None:
            masked = bool_masked_pos.bool().view(-1, *grid)
            masked = masked.repeat_interleave(patch[0], 1).repeat_interleave(patch[1], 2)[:, None]
            distance = (pixel_values - reconstruction).abs().float() * masked
            loss = distance.sum() / (masked.sum() + 1e-5) / self.config.num_channels
        return MaskedImageOutput(loss, reconstruction, **encoded.returned())


FAMILY = Family(
    "ViT",
    ViTConfig,
    {
        Head.NONE: ViTModel,
        Head.IMAGE_CLASSIFICATION: ViTForImageClassification,
        Head.MASKED_IMAGE: ViTForMaskedImageModeling,
    },
)
