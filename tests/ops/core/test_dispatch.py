"""Every op with torch's dispatcher and autograd: tensor subclasses, meta tensors, tracers, and derivatives other than
the first in reverse mode. Each is correct, or raises an error that names the op."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from native.calls import layer_norm_arguments
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._pytree import tree_map_only

from fasttfm import _native, ops, use_backend
from fasttfm.ops.layers.transformer_block import BlockOptions, BlockParameters, transformer_block
from fasttfm.testing.harness import draw_inputs, same_bits
from fasttfm.testing.spec import Inputs, OpSpec, outputs_of
from fasttfm.testing.specs import all_specs
from fasttfm.testing.specs.pack import UNPACK_SPEC

SPECS = {**all_specs(), UNPACK_SPEC.name: UNPACK_SPEC}
# Ops with arguments that are lists of bool.
LOSSES = ("contrastive_loss", "distillation_loss", "linear_cross_entropy", "masked_lm_loss")
LINEAR = ("column_sum", "pack", "rotary", "unpack")  # linear in their input, so that second derivatives are correct

every_op = pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
TRAINED = {name: spec for name, spec in SPECS.items() if spec.differentiable}  # the others are for inference only
trained_op = pytest.mark.parametrize("spec", TRAINED.values(), ids=TRAINED)
WRITTEN = {"decode_attention": ("key_cache", "value_cache")}  # arguments that an op writes


class Wrapped(Tensor):
    """Wraps a tensor and has no memory of its own, like DTensor. Ops get the wrapped tensor."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Wrapped:
        wrapped: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )
        wrapped.inner = inner
        return wrapped

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wrapped, lambda x: x.inner, (args, kwargs or {}))
        return tree_map_only(Tensor, Wrapped, function(*args, **kwargs))


def unwrapped(tensor: Tensor) -> Tensor:
    return tensor.inner if isinstance(tensor, Wrapped) else tensor


def typical(spec: OpSpec, dtype: torch.dtype = torch.float32) -> tuple[Inputs, Callable[..., Tensor], list[Tensor]]:
    """The inputs of the spec's first case; the op as a function of its differentiable ones; and those."""
    inputs = draw_inputs(spec, spec.cases[0], dtype)
    names = [name for name in spec.differentiable if inputs.get(name) is not None]

    def function(*values: Tensor) -> Tensor:
        arguments = {**inputs, **dict(zip(names, values, strict=True))}
        return outputs_of(spec.function(**arguments, **spec.cases[0].options))[0]

    return inputs, function, [inputs[name] for name in names]


def refused(spec: OpSpec, asked: str) -> Any:
    return pytest.raises(NotImplementedError, match=f"^.*{spec.name}.*: {re.escape(asked)}.*: not implemented; use ")


lost = pytest.raises(NotImplementedError, match=r"^fasttfm::\w+: derivatives in forward mode, by torch.func or in ")


# ---- tensor subclasses -----------------------------------------------------------------------------------------------


@every_op
def test_a_subclass_in_any_argument_is_seen(spec: OpSpec) -> None:
    """Kernels would take its data pointer, 0, for a missing argument."""
    case = spec.cases[0]
    inputs = draw_inputs(spec, case, torch.float32)
    plain = outputs_of(spec.function(**inputs, **case.options))
    for name, value in inputs.items():
        if isinstance(value, Tensor):
            found = outputs_of(spec.function(**{**inputs, name: Wrapped(value)}, **case.options))
            for expected, output in zip(plain, found, strict=True):
                assert same_bits(unwrapped(output), expected), f"{name} is a subclass"


@every_op
def test_a_negative_view_in_any_argument_is_read_with_its_sign(spec: OpSpec) -> None:
    """torch has views that are the negative of their memory (``z.conj().imag``); the dispatcher resolves them."""
    case = spec.cases[0]
    inputs = draw_inputs(spec, case, torch.float32)
    plain = outputs_of(spec.function(**inputs, **case.options))
    for name, value in inputs.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name not in WRITTEN.get(spec.name, ()):
            negative = value.neg()._neg_view()
            assert negative.is_neg()
            found = outputs_of(spec.function(**{**inputs, name: negative}, **case.options))
            for expected, output in zip(plain, found, strict=True):
                assert same_bits(output, expected), f"{name} is a negative view"


def test_a_negative_view_as_an_incoming_gradient_is_read_with_its_sign() -> None:
    x, weight = torch.randn(3, 16, requires_grad=True), torch.randn(16)
    q, dy = torch.randn(2, 3, 4, 8, requires_grad=True), torch.randn(3, 16)
    for run, leaf, gradient in (
        (lambda: ops.layer_norm(x, weight, weight), x, dy),
        (lambda: ops.attention(q, q, q), q, torch.randn_like(q)),
        (lambda: ops.gated_activation(x), x, dy[:, :8].contiguous()),
    ):
        found, expected = (torch.autograd.grad(run(), leaf, each) for each in (gradient.neg()._neg_view(), gradient))
        assert same_bits(found[0], expected[0])


def test_gradients_of_a_subclass_reach_it() -> None:
    x, weight, bias = torch.randn(3, 8), torch.randn(8), torch.randn(8)
    wrapped = Wrapped(weight.clone()).requires_grad_()
    ops.layer_norm(x, wrapped, bias).square().sum().backward()
    plain = weight.clone().requires_grad_()
    ops.layer_norm(x, plain, bias).square().sum().backward()
    assert wrapped.grad is not None
    assert plain.grad is not None
    assert same_bits(unwrapped(wrapped.grad), plain.grad)


def layer() -> tuple[Tensor, Tensor, BlockOptions, BlockParameters]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((48, 16), (48,), (16, 16), (16,), (16,), (16,), (32, 16), (32,), (16, 32), (16,), (16,), (16,))
    parameters = BlockParameters(*(torch.randn(shape, generator=generator) / 4 for shape in shapes))
    options = BlockOptions(1, 5, -1, -1, "gelu", 0.0, 0.0, 0.0, 1e-5, 1e-5, False, False, None)
    cu_seqlens = torch.tensor([0, 5, 8], dtype=torch.int32)
    return torch.randn(8, 16, generator=generator), cu_seqlens, options, parameters


@pytest.mark.parametrize("name", BlockParameters._fields)
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_a_subclass_in_any_parameter_of_a_layer_is_seen(name: str, train: bool) -> None:
    x, cu_seqlens, options, parameters = layer()
    x.requires_grad_(train)
    plain, _ = transformer_block(x, None, cu_seqlens, None, options, parameters)
    changed = parameters._replace(**{name: Wrapped(getattr(parameters, name))})
    found, _ = transformer_block(x, None, cu_seqlens, None, options, changed)
    assert same_bits(unwrapped(found.detach()), plain.detach())
    if train:
        gradients = [torch.autograd.grad(y.sum(), x)[0] for y in (plain, found)]
        assert same_bits(gradients[0], unwrapped(gradients[1]))


def test_a_tensor_with_elements_is_not_taken_for_none() -> None:
    _, outputs = layer_norm_arguments(x := torch.ones(4, 8))
    for tensor in (torch.empty(8, device="meta"), Wrapped(torch.ones(8))):
        with pytest.raises(TypeError, match=r"weight: expected a .*tensor with memory of its own"):
            _native.core().layer_norm_forward(x, tensor, None, *outputs.values(), 1e-5)


# ---- meta tensors and tracers ----------------------------------------------------------------------------------------


@every_op
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_meta_tensors_get_shapes_and_types(spec: OpSpec, train: bool) -> None:
    case = spec.cases[0]
    inputs = draw_inputs(spec, case, torch.float32)
    plain = outputs_of(spec.function(**inputs, **case.options))
    meta = {name: value.to("meta") if isinstance(value, Tensor) else value for name, value in inputs.items()}
    wanted = [meta[name].requires_grad_(train) for name in spec.differentiable if meta.get(name) is not None]
    found = outputs_of(spec.function(**meta, **case.options))
    for expected, output in zip(plain, found, strict=True):
        assert (output.shape, output.dtype, output.device.type) == (expected.shape, expected.dtype, "meta")
    if train and wanted:
        for value, gradient in zip(wanted, torch.autograd.grad(found[0].sum(), wanted), strict=True):
            assert (gradient.shape, gradient.dtype) == (value.shape, value.dtype)


@trained_op
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_jit_trace_follows_new_values_or_is_refused(spec: OpSpec) -> None:
    _, function, values = typical(spec)
    if spec.name in LOSSES:
        with pytest.raises(NotImplementedError, match=r"^fasttfm::\w+: torch.jit.trace: not implemented; use torch"):
            torch.jit.trace(function, tuple(values), check_trace=False)
        return
    traced = torch.jit.trace(function, tuple(values), check_trace=False)
    others = [value * 2 for value in values]
    assert same_bits(traced(*others), function(*others))
    values = [value.requires_grad_() for value in values]
    with lost:
        torch.jit.trace(function, tuple(values), check_trace=False)


# ---- derivatives -----------------------------------------------------------------------------------------------------


@trained_op
@pytest.mark.parametrize("backend", [None, "reference"])
def test_second_derivatives_are_right_or_refused(spec: OpSpec, backend: str | None) -> None:
    _, function, values = typical(spec)
    values = [value.requires_grad_() for value in values]
    with use_backend(backend):
        loss = function(*values).square().sum()
    if spec.name not in LINEAR:
        with refused(spec, "second derivatives (create_graph=True)"):
            torch.autograd.grad(loss, values, create_graph=True)
        return
    (gradient,) = torch.autograd.grad(loss, values, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), values)
    # loss = |A x|^2, whose gradient is g = 2 A^T A x; that of |g|^2 is 4 A^T A g, as the gradient of |A g|^2 is
    # 2 A^T A g.
    direction = gradient.detach().requires_grad_()
    (expected,) = torch.autograd.grad(function(direction).square().sum(), direction)
    torch.testing.assert_close(second, 2 * expected)


def test_second_derivatives_of_a_layer_are_refused() -> None:
    x, cu_seqlens, options, parameters = layer()
    y, _ = transformer_block(x.requires_grad_(), None, cu_seqlens, None, options, parameters)
    with pytest.raises(
        NotImplementedError, match=r"^transformer_block: second derivatives .* use torch.nn.Transformer"
    ):
        torch.autograd.grad(y.square().sum(), x, create_graph=True)


@every_op
@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
def test_forward_mode_is_refused(spec: OpSpec, train: bool) -> None:
    _, function, values = typical(spec)
    with forward_ad.dual_level():
        function(*values)  # without tangents it is not refused
        for index, value in enumerate(values):
            dual = forward_ad.make_dual(value.clone().requires_grad_(train), torch.ones_like(value))
            with lost:
                function(*values[:index], dual, *values[index + 1 :])


def test_derivatives_inside_compiled_functions_are_refused() -> None:
    x = torch.randn(3, 8)

    def loss(x: Tensor) -> Tensor:
        return ops.layer_norm(x).square().sum()

    for function in (torch.func.grad(loss), lambda x: torch.func.jvp(loss, (x,), (x,))):
        torch._dynamo.reset()
        with pytest.raises(Exception, match=r"fasttfm::layer_norm_forward: derivatives in forward mode, by torch.func"):
            torch.compile(function, backend="aot_eager")(x)
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend="aot_eager")
    (gradient,) = torch.autograd.grad(compiled(x.requires_grad_()), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        gradient.sum().backward()


@trained_op
def test_derivatives_by_function_transforms_are_refused(spec: OpSpec) -> None:
    _, function, values = typical(spec)

    def loss(*given: Tensor) -> Tensor:
        return function(*given).sum()

    tangents = tuple(torch.ones_like(value) for value in values)
    with lost:
        torch.func.grad(loss)(*values)
    with lost:
        torch.func.jvp(loss, tuple(values), tangents)
    with lost:
        torch.func.jacfwd(loss)(*values)
    # Results that do not depend on the differentiated argument need no derivative.
    found = torch.func.grad(lambda x: x.sum() + loss(*values))(torch.ones(2))
    assert found.tolist() == [1.0, 1.0]


@trained_op
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_is_right_without_gradients_and_refused_with(spec: OpSpec) -> None:
    _, function, (first, *others) = typical(spec)
    batch = torch.stack([first, first * 2])
    found = torch.func.vmap(lambda value: function(value, *others))(batch)
    for example, expected in zip(found, (first, first * 2), strict=True):
        assert same_bits(example, function(expected, *others))
    with lost:
        torch.func.vmap(lambda value: function(value, *others))(batch.requires_grad_())


@trained_op
def test_gradients_do_not_follow_indices_that_numpy_overwrites(spec: OpSpec) -> None:
    """A buffer that NumPy fills with the next batch before the backward: torch does not count that change."""
    seen: list[set[str]] = []
    for case in spec.cases:
        inputs = draw_inputs(spec, case, torch.float32)
        names = [name for name in spec.differentiable if inputs.get(name) is not None]
        tensors = {name: value for name, value in inputs.items() if isinstance(value, Tensor)}
        indices = {name: x for name, x in tensors.items() if not x.is_floating_point() and name != "seed"}
        if not indices or set(indices) in seen:
            continue
        seen.append(set(indices))
        gradients = []
        for overwrite in (False, True):
            leaves = {name: inputs[name].detach().requires_grad_() for name in names}
            y = outputs_of(spec.function(**{**inputs, **leaves}, **case.options))[0].square().sum()
            if overwrite:
                for value in indices.values():
                    value.numpy().fill(2**30 if value.dtype in (torch.int32, torch.int64) else 1)
            gradients.append(torch.autograd.grad(y, list(leaves.values())))
        for name, before, after in zip(names, *gradients, strict=True):
            assert same_bits(before, after), f"{case}: d{name}"


@trained_op
def test_batched_gradients_are_refused(spec: OpSpec) -> None:
    _, function, values = typical(spec)
    values = [value.requires_grad_() for value in values]
    y = function(*values)
    with refused(spec, "batched gradients"):
        torch.autograd.grad(y, values, torch.stack([y.detach(), y.detach()]), is_grads_batched=True)
