"""ViT against transformers: the same checkpoint, the same outputs and gradients, image sizes, and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import wide
from torch import Tensor

from fasttfm import models
from fasttfm.models import CheckpointError
from fasttfm.testing.modules import check_modules

SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 56,
    "image_size": 12,
    "patch_size": 4,
    "encoder_stride": 4,
    "num_labels": 3,
}
CLASSES = ["ViTModel", "ViTForImageClassification", "ViTForMaskedImageModeling"]
MASKED = torch.tensor([[0, 1, 1, 0, 0, 1, 0, 0, 1], [1, 0, 0, 0, 0, 0, 0, 1, 0]]).bool()


def pixels(height: int = 12, width: int = 12, *, channels: int = 3) -> Tensor:
    return torch.randn(2, channels, height, width, generator=torch.Generator().manual_seed(height + width))


def theirs_of(name: str, **changes: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(1)
    module = getattr(transformers, name)(transformers.ViTConfig(**{**SIZES, **changes})).eval()
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return module


def pair(name: str, directory: Path, **changes: Any) -> tuple[Any, Any]:
    """Our model, loaded from the checkpoint of theirs, and theirs."""
    theirs = theirs_of(name, **changes)
    theirs.save_pretrained(directory)
    return getattr(models, name).from_pretrained(directory), theirs


def arguments(name: str) -> dict[str, Tensor]:
    if name.endswith("Classification"):
        return {"labels": torch.tensor([2, 0])}
    return {"bool_masked_pos": MASKED} if name.endswith("Modeling") else {}


def tensors(output: Any) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name in output.keys():  # noqa: SIM118 - ours is no mapping
        value = wide(output[name]) if name == "loss" else output[name]
        for index, each in enumerate(value if isinstance(value, tuple) else [value]):
            found[f"{name}.{index}"] = each
    return found


# Names of modules in recent releases of transformers, and in checkpoints.
_RENAMED = {
    r"(?<!encoder\.)layers\.(\d+)": r"encoder.layer.\1",
    r"attention\.([qkv])_proj": lambda found: (
        f"attention.attention.{ {'q': 'query', 'k': 'key', 'v': 'value'}[found[1]] }"
    ),
    r"attention\.o_proj": "attention.output.dense",
    r"mlp\.fc1": "intermediate.dense",
    r"mlp\.fc2": "output.dense",
}


def checkpoint_name(name: str) -> str:
    for pattern, replacement in _RENAMED.items():
        name = re.sub(pattern, replacement, name)
    return name


def check(ours: Any, theirs: Any, images: Tensor, **given: Any) -> None:
    """Outputs, hidden states and gradients, including those of the pixels."""

    def call(module: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return tensors(module(inputs["pixels"], **given, output_hidden_states=True))

    def translate(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
        named = {checkpoint_name(name): value for name, value in gradients.items() if name != "pixels"}
        own = {name: value for name, value in gradients.items() if name == "pixels"}
        return own | ours.own_tensors(named)

    check_modules(ours, theirs, call, {"pixels": images}, translate=translate)


VARIANTS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in CLASSES),
    ("ViTForImageClassification", {"qkv_bias": False, "num_channels": 1, "hidden_act": "gelu_pytorch_tanh"}),
    ("ViTForImageClassification", {"image_size": [8, 12], "patch_size": [4, 6]}),
    ("ViTForMaskedImageModeling", {"num_channels": 2, "layer_norm_eps": 1e-5}),
    ("ViTModel", {"pooler_output_size": 20, "num_hidden_layers": 1}),
]


@pytest.mark.parametrize(("name", "changes"), VARIANTS, ids=[str(number) for number in range(len(VARIANTS))])
def test_same_numbers_as_transformers(name: str, changes: dict[str, Any], tmp_path: Path) -> None:
    size = changes.get("image_size", [12, 12])
    images = pixels(*size, channels=changes.get("num_channels", 3))
    check(*pair(name, tmp_path, **changes), images, **arguments(name))


@pytest.mark.parametrize(("height", "width"), [(16, 16), (8, 20), (13, 15)])
def test_images_of_other_sizes(height: int, width: int, tmp_path: Path) -> None:
    """Positions are interpolated; pixels past the last whole patch are ignored."""
    check(*pair("ViTModel", tmp_path), pixels(height, width), interpolate_pos_encoding=True)


def test_attention_weights(tmp_path: Path) -> None:
    ours, theirs = pair("ViTModel", tmp_path)
    theirs.set_attn_implementation("eager")
    found, expected = (model(pixels(), output_attentions=True).attentions for model in (ours, theirs))
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("name", CLASSES)
def test_transformers_reads_what_is_saved(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = getattr(models, name)(models.ViTConfig(**SIZES)).eval()
    ours.save_pretrained(tmp_path)
    theirs = getattr(transformers, name).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        found, expected = (tensors(model(pixels(), **arguments(name))) for model in (ours, theirs))
    assert found.keys() == expected.keys()
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], msg=key)
    theirs.save_pretrained(tmp_path / "again")
    again = getattr(models, name).from_pretrained(tmp_path / "again")
    for key, value in ours.state_dict().items():
        assert torch.equal(again.state_dict()[key], value), key


def test_heads_load_each_others_checkpoints(tmp_path: Path) -> None:
    """A checkpoint may have or not have a mask token and a pooler."""
    models.ViTForMaskedImageModeling(models.ViTConfig(**SIZES)).save_pretrained(tmp_path / "masked")
    with pytest.warns(UserWarning, match="no trained head \\(classifier\\): randomly initialized"):
        labels = models.ViTForImageClassification.from_pretrained(tmp_path / "masked", num_labels=5)
    assert labels.new_heads == ("classifier",)
    labels.save_pretrained(tmp_path / "labels")
    with pytest.warns(UserWarning, match="no trained head \\(embeddings.mask_token, decoder\\)"):
        masked = models.ViTForMaskedImageModeling.from_pretrained(tmp_path / "labels")
    assert torch.equal(masked.vit.embeddings.position, labels.vit.embeddings.position)
    assert masked(pixels(), MASKED).loss.isfinite()
    with pytest.warns(UserWarning, match="pooler"):
        assert models.ViTModel.from_pretrained(tmp_path / "masked")(pixels()).pooler_output.shape == (2, 48)


def test_images_and_checkpoints_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = models.ViTForImageClassification(models.ViTConfig(**SIZES))
    with pytest.raises(ValueError, match=r"pixels: expected 12 x 12 pixels, or others with .*, got 16 x 12"):
        model(pixels(16, 12))
    with pytest.raises(ValueError, match=r"pixels: expected shape \[B, 3, height, width\], got shape \(2, 1, 12, 12\)"):
        model(pixels(channels=1))
    with pytest.raises(ValueError, match=r"a patch of \(4, 4\) or more, got 3 x 12"):
        model(pixels(3, 12), interpolate_pos_encoding=True)
    with pytest.raises(TypeError, match="pixels: expected"):
        model(pixels().long())
    with pytest.raises(ValueError, match="masked: expected None without a mask token"):
        model.vit(pixels(), MASKED)
    masked = models.ViTForMaskedImageModeling(models.ViTConfig(**{**SIZES, "encoder_stride": 2}))
    with pytest.raises(ValueError, match=r"patch_size: expected 2, as encoder_stride, for a loss, got \(4, 4\)"):
        masked(pixels(), MASKED)
    with pytest.raises(ValueError, match=r"masked: expected shape \(2, 9\)"):
        models.ViTForMaskedImageModeling(models.ViTConfig(**SIZES))(pixels(), MASKED[:, :4])
    model.save_pretrained(tmp_path)
    config = tmp_path / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "pooler_act": "gelu"}))
    with pytest.raises(CheckpointError, match="pooler_act: expected 'tanh'"):
        models.ViTForImageClassification.from_pretrained(tmp_path)


def test_dropout_hooks_and_checkpointing() -> None:
    torch.manual_seed(0)
    config = models.ViTConfig(**SIZES, hidden_dropout_prob=0.2, attention_probs_dropout_prob=0.2)
    model = models.ViTForImageClassification(config).train()
    gradients = []
    for checkpointing in (False, True):
        (model.gradient_checkpointing_enable if checkpointing else model.gradient_checkpointing_disable)()
        torch.manual_seed(1)
        model.zero_grad()
        model(pixels(), torch.tensor([0, 1])).loss.backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for plain, again in zip(*gradients, strict=True):
        torch.testing.assert_close(plain, again)
    model.eval()
    with torch.no_grad():
        expected, calls = model(pixels()).logits, []
        model.vit.register_forward_hook(lambda module, inputs, output: calls.append(output))
        torch.testing.assert_close(model(pixels()).logits, expected)
    assert len(calls) == 1


def test_bf16_autocast_and_compile() -> None:
    torch.manual_seed(0)
    model = models.ViTForImageClassification(models.ViTConfig(**SIZES)).eval()
    with torch.no_grad():
        exact = model(pixels()).logits
        with torch.autocast("cpu", torch.bfloat16):
            assert model.vit.embeddings(pixels()).dtype == torch.bfloat16
            found = model(pixels()).logits
    # 12 products of numbers below 1 in a row, each rounded to 8 bits.
    torch.testing.assert_close(found.float(), exact, atol=12 * 2**-8 * float(exact.abs().max()), rtol=0)
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(pixels()).logits, exact)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CLASSES)
def test_same_numbers_on_a_gpu(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """Heads of 64, which the native core supports in bf16."""
    ours, theirs = pair(name, tmp_path, hidden_size=128, num_attention_heads=2)
    given = {key: value.cuda() for key, value in arguments(name).items()}
    check(ours.cuda().to(dtype), theirs.cuda().to(dtype), pixels(), **given)


def test_a_batch_without_images() -> None:
    model = models.ViTForImageClassification(models.ViTConfig(**SIZES))
    assert model(pixels()[:0]).logits.shape == (0, 3)


def test_channels_last() -> None:
    model = models.ViTModel(models.ViTConfig(**SIZES)).eval()
    expected = model(pixels()).last_hidden_state
    images = pixels().to(memory_format=torch.channels_last)
    found = model.to(memory_format=torch.channels_last)(images).last_hidden_state
    torch.testing.assert_close(found, expected)
