"""The kernel for the Hugging Face hub: self-contained, in its own namespace, and with the results of fasttfm."""

from __future__ import annotations

import ast
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fasttfm
import fasttfm.flash_attn
from fasttfm.ops.core.backends import triton_absent

TOOL = Path(__file__).parents[2] / "tools" / "hub_kernel.py"


def load(name: str, path: Path) -> ModuleType:
    """A module under a name of its own, as ``kernels`` imports a variant."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernel")
    assert load("hub_kernel", TOOL).main([str(folder)]) == 0
    return folder


@pytest.fixture(scope="module")
def variant(folder: Path) -> Path:
    return folder / "build" / "torch-cpu"


@pytest.fixture(scope="module")
def kernel(variant: Path) -> Any:
    return load(json.loads((variant / "metadata.json").read_text())["id"], variant / "__init__.py")


def imported(tree: ast.AST) -> Iterator[str]:
    """The top-level packages that a file imports, without relative imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            assert node.module is not None
            yield node.module.split(".")[0]


def test_variants_need_only_torch_triton_and_the_standard_library(folder: Path) -> None:
    variants = sorted((folder / "build").iterdir())
    assert [variant.name for variant in variants] == ["torch-cpu", "torch-cuda"]
    for variant in variants:
        found = {name for path in variant.rglob("*.py") for name in imported(ast.parse(path.read_text()))}
        assert found - sys.stdlib_module_names == {"torch", "triton"}
    metadata = [json.loads((variant / "metadata.json").read_text()) for variant in variants]
    assert [each["backend"]["type"] for each in metadata] == ["cpu", "cuda"]
    assert len({each["id"] for each in metadata}) == 2
    files = [{path.relative_to(variant) for path in variant.rglob("*")} for variant in variants]
    assert files[0] == files[1]


def test_the_kernel_names_no_module_of_the_package(variant: Path) -> None:
    for path in variant.rglob("*.py"):
        strings = (node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant))
        names = [text for text in strings if isinstance(text, str) and text.startswith("fasttfm.")]
        assert names == [], path


def test_ops_are_in_a_namespace_of_their_own(kernel: Any) -> None:
    own = kernel.ops.layer_norm.__module__.split(".")[0]
    assert own == kernel.__name__ != "fasttfm"
    assert hasattr(getattr(torch.ops, own), "layer_norm_forward")
    for name in kernel.__all__:
        assert hasattr(kernel, name)


@pytest.mark.parametrize("backend", ["reference", "triton"])
def test_results_are_those_of_the_package(kernel: Any, backend: str) -> None:
    if backend == "triton" and (reason := triton_absent()):
        pytest.skip(reason)
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x, weight, bias, dy = (torch.randn(shape, device=device) for shape in ((5, 24), (24,), (24,), (5, 24)))

    def run(function: Any) -> list[Tensor]:
        leaves = [tensor.clone().requires_grad_() for tensor in (x, weight, bias)]
        y = function(*leaves, backend=backend)
        return [y, *torch.autograd.grad(y, leaves, dy)]

    for found, expected in zip(run(kernel.layer_norm), run(fasttfm.ops.layer_norm), strict=True):
        assert torch.equal(found, expected)


def test_attention_has_flash_attentions_functions(kernel: Any) -> None:
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 7, 3, 16) for _ in range(3))
    expected = nn.functional.scaled_dot_product_attention(*(x.transpose(1, 2) for x in (q, k, v)), is_causal=True)
    torch.testing.assert_close(kernel.flash_attn_func(q, k, v, causal=True), expected.transpose(1, 2))
    names = [name for name in dir(fasttfm.flash_attn) if name.startswith("flash_attn_")]
    assert set(names) <= set(kernel.__all__)


class Norm(nn.Module):
    """As transformers' RMSNorm of Llama."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(16))
        self.variance_epsilon = 1e-6

    def forward(self, hidden_states: Tensor) -> Tensor:
        scale = torch.rsqrt(hidden_states.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return self.weight * hidden_states * scale


def test_kernels_loads_the_folder_and_kernelizes_with_it(folder: Path) -> None:
    kernels = pytest.importorskip("kernels", reason="the package kernels of Hugging Face is not installed")
    if not hasattr(kernels, "get_local_kernel"):
        pytest.skip("the folder kernels/ hides the package of Hugging Face")
    found = kernels.get_local_kernel(folder)
    assert found.__name__.startswith("_fasttfm_")
    layer = kernels.use_kernel_forward_from_hub("RMSNorm")(Norm)
    activation = kernels.use_kernel_forward_from_hub("GeluTanh")(type("Gelu", (nn.GELU,), {}))
    model = nn.Sequential(layer(), activation("tanh"))
    x = torch.randn(3, 16)
    expected = model(x)
    repositories = {
        name: {found_device: kernels.LocalLayerRepository(repo_path=folder, layer_name=name)}
        for name in ("RMSNorm", "GeluTanh")
        for found_device in ("cuda" if torch.cuda.is_available() else "cpu",)
    }
    mode = kernels.Mode.TRAINING | kernels.Mode.TORCH_COMPILE
    with kernels.use_kernel_mapping(repositories, inherit_mapping=False):
        model = kernels.kernelize(model, mode=mode, device=next(iter(repositories["RMSNorm"])), use_fallback=False)
    assert [module.forward.__func__.__module__ for module in model] == [f"{found.__name__}.layers"] * 2
    torch.testing.assert_close(model(x), expected)
