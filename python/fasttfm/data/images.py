"""Readers of labelled images, and the conversion of an image to a model's pixels.

Files of arrays (.npz, .npy) need only NumPy; PNG, JPEG and other images are decoded by Pillow.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from fasttfm import _extras
from fasttfm.data.lines import DataError, data_error

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm")
_ARRAYS = (".npz", ".npy")
_IMAGES, _LABELS, _NAMES = ("images", "image", "x"), ("labels", "label", "y"), "names"
_GREY = np.array([0.299, 0.587, 0.114])  # ITU-R 601, the weights with which Pillow converts colours to grey


@dataclass(frozen=True, eq=False)
class ImageExample:
    """An image, and its label if it has one."""

    name: str  # its path, or the path of its file and its number there
    image: np.ndarray | Path  # uint8 [height, width] or [height, width, channels]; or the file to decode
    label: str | None = None

    def pixels(self) -> np.ndarray:
        """uint8 [height, width, channels]; grey images have one channel, others three."""
        pixels = decoded(self.image) if isinstance(self.image, Path) else self.image
        return pixels[..., None] if pixels.ndim == 2 else pixels


def read_images(path: str | Path) -> list[ImageExample]:
    """The images of a folder, of a file of arrays, or of one image file.

    A folder has a folder of images for each label, or images without labels. An ``.npz`` file has the array ``images``
    [count, height, width] or [count, height, width, channels], uint8 or numbers from 0 to 1, and usually ``labels``
    [count]: texts, or indices into the optional array ``names``. An ``.npy`` file has only images.
    """
    path = Path(path)
    if path.is_dir():
        return _of_folder(path)
    if path.suffix in _ARRAYS:
        return _of_arrays(path)
    if path.suffix.lower() not in SUFFIXES:
        raise data_error(path, f"a folder, or a name that ends in {', '.join((*_ARRAYS, *SUFFIXES))}", repr(path.name))
    if not path.is_file():
        raise data_error(path, "an image", "no such file")
    return [ImageExample(str(path), path)]


def images_of(dataset: Any) -> list[ImageExample]:
    """The examples of a data set of (image, label) pairs, such as torchvision's. Images are arrays, tensors [channels,
    height, width] or Pillow's; labels that are numbers get their names from ``classes``, if the data set has it."""
    classes = getattr(dataset, "classes", None)
    examples = []
    for number in range(len(dataset)):
        image, label = dataset[number]
        where = f"image {number}"
        examples.append(ImageExample(where, as_pixels(image, where), _label_name(label, classes, where)))
    return examples


def _label_name(label: Any, classes: Any, where: str) -> str | None:
    if isinstance(label, (Tensor, np.ndarray, np.generic)):
        label = label.tolist()
    if classes is None or not isinstance(label, int):
        return None if label is None else str(label)
    if not 0 <= label < len(classes):
        raise data_error(where, f"a label from 0 to {len(classes) - 1}, as there are classes", str(label))
    return str(classes[label])


def is_image_folder(folder: Path) -> bool:
    """Whether a folder has images, or folders that have images."""
    directories = [folder, *(path for path in _visible(folder) if path.is_dir())]
    return any(True for directory in directories for _ in _files(directory))


def as_pixels(image: Any, name: str) -> np.ndarray:
    """Converts an array, a tensor [channels, height, width] or Pillow's image to uint8 [height, width] or [height,
    width, channels]."""
    if isinstance(image, Tensor):
        image = image.detach().cpu().movedim(0, -1).numpy() if image.dim() == 3 else image.detach().cpu().numpy()
    elif hasattr(image, "getbands"):
        try:
            image = _of_pillow(image)
        except ValueError as error:
            raise data_error(name, "an image of 8 or 16 bits", str(error)) from None
    return _bytes(np.asarray(image), name, (2, 3))


def decoded(path: Path) -> np.ndarray:
    """The pixels of an image file, uint8 [height, width] or [height, width, 3], rotated by its EXIF orientation."""
    try:
        from PIL import Image, ImageOps
    except ImportError:
        raise _extras.missing("reading image files", "Pillow", "images") from None
    try:
        with Image.open(path) as image:
            return _of_pillow(ImageOps.exif_transpose(image))
    except FileNotFoundError:
        raise data_error(path, "an image", "no such file") from None
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise data_error(path, "an image that Pillow decodes", f"{error}") from None


def _of_pillow(image: Any) -> np.ndarray:
    if image.mode == "F":
        raise ValueError("pixels of fractions")
    if image.mode.startswith("I"):  # Pillow's own conversion limits greater numbers to 255
        levels = np.asarray(image).astype(np.int64)
        if image.mode != "I":  # 16 bits
            levels >>= 8
        if levels.size and not 0 <= levels.min() <= levels.max() < 256:
            raise ValueError(f"pixels of 32 bits, from {levels.min()} to {levels.max()}")
        return levels.astype(np.uint8)
    return np.asarray(image.convert("L" if image.mode in ("1", "L", "LA") else "RGB"))


def _visible(folder: Path) -> list[Path]:
    """What is in a folder, without the hidden files of editors and systems."""
    return sorted(path for path in folder.iterdir() if not path.name.startswith("."))


def _files(folder: Path) -> Iterator[Path]:
    return (path for path in _visible(folder) if path.suffix.lower() in SUFFIXES and path.is_file())


def _of_folder(folder: Path) -> list[ImageExample]:
    labels = [path for path in _visible(folder) if path.is_dir()]
    labelled = [(label, file) for label in labels for file in _files(label)]
    if labelled:
        deeper = [inner for label in labels for inner in _visible(label) if inner.is_dir()]
        if left := sum(1 for directory in (folder, *deeper) for _ in _files(directory)):
            warnings.warn(f"{folder}: {left} images that are not in a label's own folder are left out", stacklevel=3)
        return [ImageExample(str(file), file, label.name) for label, file in labelled]
    examples = [ImageExample(str(file), file) for file in _files(folder)]
    if not examples:
        raise data_error(folder, f"images ({', '.join(SUFFIXES)}), or a folder of them for each label", "none")
    return examples


def _of_arrays(path: Path) -> list[ImageExample]:
    try:
        loaded = np.load(path, allow_pickle=False)
        arrays = {name: loaded[name] for name in loaded.files} if path.suffix == ".npz" else {_IMAGES[0]: loaded}
    except OSError as error:
        raise data_error(path, "a readable file", error.strerror or str(error)) from None
    except (ValueError, EOFError, zipfile.BadZipFile) as error:
        raise data_error(path, "arrays as NumPy saves them", str(error)) from None
    images = next((arrays[name] for name in _IMAGES if name in arrays), None)
    labels = next((arrays[name] for name in _LABELS if name in arrays), None)
    if images is None:
        raise data_error(path, f"an array {_IMAGES[0]}", ", ".join(arrays) or "no array")
    images = _bytes(images, str(path), (3, 4))
    if labels is not None and labels.shape != (len(images),):
        raise data_error(path, f"labels of shape ({len(images)},), one for each image", f"shape {labels.shape}")
    if labels is not None and labels.dtype.kind == "S":
        labels = np.char.decode(labels, "utf-8", "replace")
    if labels is not None and labels.dtype.kind == "f" and np.isnan(labels).any():
        raise data_error(path, "labels", "NaN")
    names = arrays.get(_NAMES)
    if labels is not None and names is not None:
        if labels.dtype.kind not in "iu" or (len(labels) and not 0 <= labels.min() <= labels.max() < len(names)):
            raise data_error(path, f"labels from 0 to {len(names) - 1}, indices into names", "others")
        labels = names[labels]
    return [
        ImageExample(f"{path}:{number}", image, None if labels is None else str(labels[number]))
        for number, image in enumerate(images)
    ]


def _bytes(images: np.ndarray, where: str, dimensions: tuple[int, int]) -> np.ndarray:
    """Converts one or several images to uint8."""
    if images.ndim not in dimensions or (images.ndim == dimensions[1] and images.shape[-1] not in (1, 3, 4)):
        count = "count, " if dimensions[0] == 3 else ""
        expected = f"[{count}height, width] or [{count}height, width, 1 or 3 channels]"
        raise data_error(where, expected, f"shape {images.shape}")
    if 0 in images.shape[dimensions[0] - 2 :]:
        raise data_error(where, "images of at least one pixel", f"shape {images.shape}")
    if images.ndim == dimensions[1] and images.shape[-1] == 4:
        images = images[..., :3]  # without transparency
    if images.dtype == np.uint8:
        return images
    if images.dtype.kind == "f" and images.size and images.min() >= 0 and images.max() <= 1:
        scaled: np.ndarray = (images * 255).round().astype(np.uint8)
        return scaled
    if images.size == 0:
        return images.astype(np.uint8)
    raise data_error(where, "uint8 pixels, or numbers from 0 to 1", f"{images.dtype} from {images.min()} on")


# ---- a model's pixels ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ImageFormat:
    """The conversion of an image to a model's pixels: ``(resized / 255 - mean) / std``.

    Args:
        size: Height and width.
        channels: 1 for grey, 3 for colours.
        mean, std: One number for each channel.
        bicubic: Whether images are resized bicubically; otherwise bilinearly.
    """

    size: tuple[int, int]
    channels: int = 3
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    bicubic: bool = False

    def __post_init__(self) -> None:
        if self.channels not in (1, 3):
            raise DataError(f"images: num_channels: expected 1 or 3, got {self.channels}")
        if not len(self.mean) == len(self.std) == self.channels or 0 in self.std:
            expected = f"{self.channels} numbers, std without 0"
            raise DataError(f"images: image_mean, image_std: expected {expected}, got {self.mean}, {self.std}")

    def __call__(self, pixels: np.ndarray) -> Tensor:
        """Converts uint8 [height, width, channels] to fp32 [channels, height, width]."""
        if pixels.shape[-1] == 3 and self.channels == 1:
            pixels = (pixels @ _GREY).round().astype(np.uint8)[..., None]
        x = torch.from_numpy(np.array(pixels)).permute(2, 0, 1).float()  # a copy: Pillow's arrays are not writable
        if x.shape[1:] != self.size:
            mode = "bicubic" if self.bicubic else "bilinear"
            x = functional.interpolate(x[None], self.size, mode=mode, antialias=True)[0].round_().clamp_(0, 255)
        mean, std = (
            torch.tensor(values, dtype=torch.float32, device="cpu").view(-1, 1, 1) for values in (self.mean, self.std)
        )
        return ((x / 255 - mean) / std).expand(self.channels, -1, -1)

    def batch(self, examples: Sequence[ImageExample]) -> Tensor:
        """fp32 [examples, channels, height, width]."""
        return torch.stack([self(example.pixels()) for example in examples])
