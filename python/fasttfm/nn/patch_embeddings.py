"""``PatchEmbeddings``: images as packed rows of patches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from fasttfm.nn.embeddings import autocast_type
from fasttfm.ops import linear
from fasttfm.ops.core import checks

_NAME = "PatchEmbeddings"


class PatchProjection(nn.Module):
    """A linear projection of each patch. ``weight`` [C, channels, height, width] is the weight of the convolution that
    other implementations use; because patches do not overlap, it is one GEMM."""

    def __init__(self, channels: int, width: int, patch: tuple[int, int], **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, channels, *patch, **factory))
        self.bias = nn.Parameter(torch.zeros(width, **factory))
        nn.init.trunc_normal_(self.weight, std=0.02)

    def forward(self, pixels: Tensor) -> Tensor:
        """``[B, patches, C]`` of ``pixels`` [B, channels, height, width], row by row."""
        width, channels, height, breadth = self.weight.shape
        grid = (pixels.shape[2] // height, pixels.shape[3] // breadth)
        cells = pixels.unflatten(3, (grid[1], breadth)).unflatten(2, (grid[0], height)).permute(0, 2, 4, 1, 3, 5)
        # One copy reorders the patches and casts them.
        dtype = autocast_type(pixels) or self.weight.dtype
        rows = cells.to(dtype, memory_format=torch.contiguous_format).reshape(-1, channels * height * breadth)
        y: Tensor = linear.dense(rows, self.weight.flatten(1), self.bias)
        return y.view(pixels.shape[0], grid[0] * grid[1], width)


class MaskToken(nn.Module):
    """The row that replaces masked patches."""

    def __init__(self, width: int, **factory: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(1, 1, width, **factory))


class PatchEmbeddings(nn.Module):
    """Patches of images with positions, and a class token before them (ViT).

    Args:
        width: C, the model's width.
        image: Height and width of the images that the positions belong to.
        patch: Height and width of a patch.
        channels: The number of channels of an image.
        dropout: Dropout probability of the result.
        mask_token: Whether patches can be masked.
        device, dtype: Device and dtype of the parameters.
    """

    def __init__(
        self,
        width: int,
        image: tuple[int, int] = (224, 224),
        patch: tuple[int, int] = (16, 16),
        *,
        channels: int = 3,
        dropout: float = 0.0,
        mask_token: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not all(1 <= small <= large for small, large in zip(patch, image, strict=True)):
            raise checks.bad_value(_NAME, "patch", f"a part of the image {image}", patch)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        self.image, self.patch, self.channels, self.dropout = image, patch, channels, dropout
        self.grid = (image[0] // patch[0], image[1] // patch[1])  # the number of patches per column and per row
        self.projection = PatchProjection(channels, width, patch, **factory)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, width, **factory))
        self.position = nn.Parameter(torch.zeros(1, 1 + self.grid[0] * self.grid[1], width, **factory))
        self.mask_token = MaskToken(width, **factory) if mask_token else None

    def forward(self, pixels: Tensor, masked: Tensor | None = None, *, interpolate: bool = False) -> Tensor:
        """``[B, 1 + patches, C]``, contiguous; in autocast's type under autocast.

        Args:
            pixels: ``[B, channels, height, width]``.
            masked: bool ``[B, patches]``: the patches that the mask token replaces.
            interpolate: Whether images of other sizes are allowed, with interpolated positions. Rows and columns of
                pixels after the last whole patch are ignored.
        """
        grid = self._check(pixels, masked, interpolate)
        x = self.projection(pixels[:, :, : grid[0] * self.patch[0], : grid[1] * self.patch[1]])
        if masked is not None:
            assert self.mask_token is not None
            x = torch.where(masked[..., None], self.mask_token.weight.to(x.dtype), x)
        first = self.cls_token.to(x.dtype).expand(len(x), -1, -1)
        x = (torch.cat([first, x], dim=1) + self.positions(grid)).to(x.dtype)
        return functional.dropout(x, self.dropout, self.training)

    def positions(self, grid: tuple[int, int]) -> Tensor:
        """The class token's position and those of a grid of patches, ``[1, 1 + patches, C]``."""
        if grid == self.grid:
            return self.position
        table = self.position[:, 1:].unflatten(1, self.grid).permute(0, 3, 1, 2)
        table = functional.interpolate(table, size=grid, mode="bicubic", align_corners=False)
        return torch.cat([self.position[:, :1], table.flatten(2).mT], dim=1)

    def _check(self, pixels: Tensor, masked: Tensor | None, interpolate: bool) -> tuple[int, int]:
        checks.check_floating(_NAME, "pixels", pixels)
        if pixels.dim() != 4 or pixels.shape[1] != self.channels:
            expected = f"shape [B, {self.channels}, height, width]"
            raise checks.bad_value(_NAME, "pixels", expected, f"shape {tuple(pixels.shape)}")
        height, width = pixels.shape[2:]
        if (height, width) != self.image and not interpolate:
            expected = f"{self.image[0]} x {self.image[1]} pixels, or others with interpolate_pos_encoding=True"
            raise checks.bad_value(_NAME, "pixels", expected, f"{height} x {width}")
        grid = (height // self.patch[0], width // self.patch[1])
        if 0 in grid:
            raise checks.bad_value(_NAME, "pixels", f"a patch of {self.patch} or more", f"{height} x {width}")
        if masked is not None:
            if self.mask_token is None:
                raise checks.bad_value(_NAME, "masked", "None without a mask token", "a tensor")
            checks.check_shape(_NAME, "masked", masked, (len(pixels), grid[0] * grid[1]))
            if masked.dtype != torch.bool:
                raise checks.bad_value(_NAME, "masked", "bool", str(masked.dtype))
        return grid

    def extra_repr(self) -> str:
        return f"image={self.image}, patch={self.patch}, channels={self.channels}, dropout={self.dropout}"
