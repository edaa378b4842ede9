"""FP8 training with FSDP2: the weights of layers travel as e4m3 with one scale for each.

A rank stores its rows of a weight in fp32. Before a layer's forward and backward, FSDP gathers the weight: each rank
casts its rows with the scale that all ranks have, and sends a byte for each element. What arrives are the operands of
the FP8 GEMMs. The parameter itself has the rounded values, for the layer's calls in other precisions: evaluation
computes with these.

Scales are delayed as without sharding (ops/fp8/scales.py): ``update`` makes them of the largest magnitudes of all
ranks. So a gathered weight has the bits that one process casts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.utils import _pytree as pytree

from fasttfm.nn import Fp8Training, PackedLayer
from fasttfm.nn.fp8 import check_layer, linears_of
from fasttfm.ops import fp8

_BYTES = torch.uint8  # gloo has no FP8
_WRAPPING = {
    torch.ops.aten.detach.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.new_zeros.default,
    torch.ops.aten.slice.Tensor,
    torch.ops.aten.copy_.default,
    torch.ops.aten.view.default,
    torch.ops.aten.as_strided.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten._pin_memory.default,
    torch.ops.aten.split.Tensor,
    torch.ops.aten.clone.default,
}


class GatheredInFp8(torch.Tensor):
    """A rank's rows of a weight, which FSDP gathers in FP8. Other operations compute with the rows as they are."""

    owner: list[ShardedFp8Linear]  # the layer, once there is one: all views of a weight share the list
    rows: Tensor

    @staticmethod
    def __new__(cls, rows: Tensor, owner: list[ShardedFp8Linear]) -> GatheredInFp8:
        tensor: GatheredInFp8 = torch.Tensor._make_wrapper_subclass(
            cls,
            rows.size(),
            strides=rows.stride(),
            storage_offset=rows.storage_offset(),
            dtype=rows.dtype,
            device=rows.device,
        )
        tensor.rows, tensor.owner = rows, owner
        return tensor

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self.rows})"

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        owners: list[list[ShardedFp8Linear]] = []

        def unwrapped(tensor: GatheredInFp8) -> Tensor:
            owners.append(tensor.owner)
            return tensor.rows

        arguments, options = pytree.tree_map_only(cls, unwrapped, (args, kwargs or {}))
        result = func(*arguments, **options)
        if func not in _WRAPPING:
            return result
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return pytree.tree_map_only(torch.Tensor, lambda tensor: cls(tensor, owners[0]), result)

    # ---- what FSDP calls, in the order of the current stream ---------------------------------------------------------

    def fsdp_pre_all_gather(
        self, mesh: Any, outer_size: torch.Size, outer_stride: Any, module: nn.Module, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], tuple[Any, ...]]:
        """This rank's rows in FP8, as bytes: as many rows as any rank has."""
        (owner,) = self.owner
        most = -(-outer_size[0] // mesh.size())
        rows = owner.cast_rows(self.rows).view(_BYTES)
        if len(rows) < most:
            rows = torch.cat([rows, rows.new_zeros(most - len(rows), *rows.shape[1:])])
        return (rows,), (outer_size[0],)

    def fsdp_post_all_gather(
        self, outputs: tuple[Tensor, ...], metadata: tuple[Any, ...], dtype: torch.dtype, *, out: Tensor | None = None
    ) -> Any:
        """Writes the layer's FP8 weight, and returns the rounded one with the tensors whose memory FSDP frees."""
        (owner,), (count,) = self.owner, metadata
        owner.take_rows(outputs[0][:count].view(owner.weight.dtype))
        if out is not None:
            with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(out):
                out.copy_(owner.rounded(dtype))
            return None
        whole = owner.rounded(dtype)
        return whole, (whole, owner.rows, owner.columns)


class ShardedFp8Linear(fp8.Fp8Linear):
    """``Fp8Linear`` of a weight that FSDP shards: the FP8 weight is there while FSDP has gathered it."""

    def __init__(self, module: nn.Linear, slots: tuple[fp8.Slot, fp8.Slot, fp8.Slot]) -> None:
        self.module = module
        self.input, self.weight, self.gradient = slots
        self._given = None
        self.rows = self.columns = torch.empty(0, dtype=_BYTES, device=module.weight.device)
        self.shard.owner[:] = [self]

    @property
    def parameter(self) -> Tensor:  # type: ignore[override]
        return self.module.weight

    @property
    def shard(self) -> GatheredInFp8:
        """This rank's rows; outside of the layer's forward and backward."""
        return sharded_rows(self.module)

    def cast_rows(self, rows: Tensor) -> Tensor:
        """Rows of the weight in FP8, with the scale of all ranks; records their largest magnitude."""
        values, columns = fp8.empty_layouts(rows, self.weight.dtype, with_columns=False)
        if len(rows) > 0:
            fp8.TABLE.select(None, rows).forward("cast", rows, self.weight.scale, self.weight.amax, values, columns)
        return values

    def take_rows(self, rows: Tensor) -> None:
        """The whole weight in FP8. FSDP keeps its memory, and has allocated it again since the first time."""
        if self.rows.shape != rows.shape:
            self.rows, self.columns = torch.empty_like(rows), rows.new_empty(rows.shape[::-1])
        self.rows.copy_(rows)
        self.columns.copy_(rows.t())

    def rounded(self, dtype: torch.dtype) -> Tensor:
        """The values of the FP8 weight."""
        return (self.rows.float() * self.weight.inverse).to(dtype)

    def refresh_changed(self) -> None:
        """Nothing: each gathering casts the weight again."""

    def refresh(self) -> None:
        """Nothing: the same."""


class ShardedFp8Training(Fp8Training):
    """``Fp8Training`` of a model that ``gather_in_fp8`` has prepared and FSDP shards. All ranks make it at the same
    time, and call ``update``, ``refresh`` and ``load_state_dict``; after other changes than those of optimizers call
    ``refresh``."""

    @staticmethod
    def is_layer(module: nn.Module) -> bool:
        return isinstance(module, FSDPModule) and type(module).__bases__[1:] == (PackedLayer,)

    def check(self, layer: PackedLayer) -> None:
        """Nothing: ``gather_in_fp8`` has checked it. Its parameters are not plain tensors while they are sharded."""

    def make_linear(self, module: nn.Linear, slots: Any) -> fp8.Fp8Linear:
        return ShardedFp8Linear(module, slots)

    @torch.no_grad()
    def refresh(self) -> None:
        """Sets the scales of weights from their largest magnitudes over all ranks."""
        linears: Any = self._linears
        amax = torch.zeros(len(linears), device=self.scales.scale.device, dtype=torch.float32)
        for index, linear in enumerate(linears):
            fp8.record_amax(amax[index], linear.shard.rows)
        dist.all_reduce(amax, dist.ReduceOp.MAX)
        amax = torch.where(amax.isfinite(), amax, 0.0)
        for linear, largest in zip(linears, amax.unbind(), strict=True):
            linear.weight._set(largest)

    def update(self, *, reduce: bool = True) -> None:
        """As without sharding; the next gathering casts the weights."""
        dist.all_reduce(self.scales.amax, dist.ReduceOp.MAX)
        self.scales.update()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.scales.load_state_dict(state)


def gather_in_fp8(module: nn.Module) -> None:
    """Prepares the weights of all layers for ``ShardedFp8Training``, before FSDP shards them."""
    for layer in [part for part in module.modules() if type(part) is PackedLayer]:
        check_layer("gather_in_fp8", layer, plain=layer.is_fusable())
        for linear in linears_of(layer):
            weight = linear.weight
            linear.weight = nn.Parameter(GatheredInFp8(weight.detach(), []), weight.requires_grad)


def sharded_rows(module: nn.Linear) -> GatheredInFp8:
    """This rank's rows of a module's weight."""
    rows = getattr(module.weight, "_local_tensor", None)
    if not isinstance(rows, GatheredInFp8):
        expected = "one that gather_in_fp8 has prepared and FSDP shards"
        got = f"a weight of type {type(module.weight).__name__}"
        raise TypeError(f"ShardedFp8Training: model: expected {expected}, got {got}")
    return rows
