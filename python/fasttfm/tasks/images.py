"""``image``: a label for each image."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fasttfm._atomic_files import write_json
from fasttfm.data.images import ImageExample, ImageFormat, as_pixels, read_images
from fasttfm.data.lines import DataError
from fasttfm.models.checkpoint_files import CheckpointError, read_json
from fasttfm.models.family import Family, Head
from fasttfm.models.text_model import LAST_STATES
from fasttfm.tasks.inputs import Feature, Format, TaskBatch
from fasttfm.tasks.labels import ClassifyTask
from fasttfm.tasks.task import Language, Task

PROCESSOR = "preprocessor_config.json"  # transformers' file with the image preprocessing
_RESAMPLING = {2: False, 3: True}  # Pillow's codes (bilinear, bicubic): whether it is bicubic


@dataclass(frozen=True)
class ImageLanguage(Language):
    """A vision model's input format: there is no tokenizer, and every image has the same number of tokens."""

    images: ImageFormat

    def save(self, directory: Path, config: Any) -> None:
        form = self.images
        values = {
            "image_processor_type": "ViTImageProcessor",
            "do_resize": True,
            "size": {"height": form.size[0], "width": form.size[1]},
            "resample": 3 if form.bicubic else 2,
            "do_rescale": True,
            "rescale_factor": 1 / 255,
            "do_normalize": True,
            "image_mean": list(form.mean),
            "image_std": list(form.std),
        }
        write_json(directory / PROCESSOR, values)


def image_language(directory: Path, family: Family, config: Any) -> ImageLanguage:
    """The input format of a checkpoint's model, from its ``preprocessor_config.json`` and the model's image size."""
    form = Format([], [], [], config.tokens(), segments=False)
    grey = dict.fromkeys(("image_mean", "image_std"), [0.5] * config.num_channels)
    settings = {**grey, **(read_json(directory / PROCESSOR) if (directory / PROCESSOR).is_file() else {})}
    mean, std = (settings[name] for name in grey)
    if settings.get("do_normalize") is False:
        mean, std = [0.0] * config.num_channels, [1.0] * config.num_channels
    for name, expected in (("resample", list(_RESAMPLING)), ("do_rescale", [True]), ("do_center_crop", [False, None])):
        if name in settings and settings[name] not in expected:
            raise CheckpointError(
                f"{directory / PROCESSOR}: {name}: expected one of {expected}, got {settings[name]!r}"
            )
    images = ImageFormat(
        config.image(), config.num_channels, tuple(mean), tuple(std), _RESAMPLING[settings.get("resample", 2)]
    )
    return ImageLanguage(None, family, form, images)  # type: ignore[arg-type]  # there is no tokenizer


@dataclass
class ImageFeature(Feature):
    """An image, which is decoded when its batch is collated."""

    image: ImageExample = None  # type: ignore[assignment]  # it has no default, but follows fields that have one
    patches: int = 0

    @property
    def tokens(self) -> int:
        return self.patches

    def content(self) -> Iterator[bytes]:
        image = self.image.image
        yield self.image.name.encode() if isinstance(image, Path) else image.tobytes()
        yield repr(self.target).encode()


@dataclass
class ImageBatch(TaskBatch):
    """Images [B, channels, height, width]."""

    @property
    def tokens(self) -> int:
        return len(self.features) * self.max_seqlen

    def inputs(self) -> dict[str, Any]:
        return {**LAST_STATES, **self.others}


class ImageTask(ClassifyTask):
    """A label for each image."""

    name = "image"
    about = "a label for each image"
    file_format = "a folder of images for each label, or .npz"
    line_format = "the path of an image"
    json_fields = "image, label"
    read_file = staticmethod(read_images)
    reads = "images"
    head = Head.IMAGE_CLASSIFICATION
    options = ()
    kept = ()
    distills = False
    language: ImageLanguage

    @classmethod
    def for_values(cls) -> type[Task] | None:  # type: ignore[override]
        return None

    def is_example(self, value: Any) -> bool:
        return not isinstance(value, (list, Iterator))

    def example(self, value: Any) -> Any:
        """An array, a tensor [channels, height, width], Pillow's image or a path."""
        if isinstance(value, ImageExample):
            return value
        label = None
        if isinstance(value, Mapping):
            label, value = value.get("label"), value.get("image")
        if isinstance(value, (str, Path)):
            return ImageExample(str(value), Path(value), None if label is None else str(label))
        if not isinstance(value, (np.ndarray, Tensor)) and not hasattr(value, "getbands"):
            raise DataError(f"{self.name}: expected an image or its path, got {value!r:.60}")
        return ImageExample("an array", as_pixels(value, self.name), None if label is None else str(label))

    def features(self, examples: Sequence[Any]) -> list[Feature]:
        tokens = self.language.format.max_length
        return [
            ImageFeature(number, [], self._target(example), example, tokens) for number, example in enumerate(examples)
        ]

    def batch(self, features: Sequence[Feature]) -> TaskBatch:
        images = [feature.image for feature in features if isinstance(feature, ImageFeature)]
        others = {"pixel_values": self.language.images.batch(images)}
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        batch = ImageBatch(list(features), none, None, none, self.language.format.max_length, {}, others=others)
        if all(feature.target is not None for feature in features):
            batch.targets, batch.count = {"labels": self.label_numbers(features)}, len(features)
        return batch

    def label_numbers(self, features: Sequence[Feature]) -> Tensor:
        return torch.tensor([feature.target for feature in features], dtype=torch.int64, device="cpu")

    def inputs(self, example: Any) -> dict[str, Any]:
        return {"image": example.name}

    def without_text(self, example: Any) -> Any:
        return replace(example, image=Path(example.name))
