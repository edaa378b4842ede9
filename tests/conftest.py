"""Without a GPU, Triton kernels run in Triton's interpreter: the variable must be set before Triton is imported."""

import os
import warnings

import numpy
import pytest
import torch


def numpy_refuses_the_interpreter() -> bool:
    """Triton 3.6's interpreter makes Python integers of arrays of one element, which numpy refuses from 2.4 on."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            int(numpy.ones(1))
    except TypeError:
        return True
    return False


if torch.cuda.is_available() or numpy_refuses_the_interpreter():
    os.environ.pop("TRITON_INTERPRET", None)
else:
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_report_header() -> list[str]:
    if torch.cuda.is_available() or "TRITON_INTERPRET" in os.environ:
        return []
    return [f"Triton kernels are not run: without a GPU they need numpy older than 2.4, here {numpy.__version__}"]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu") is not None:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device; torch sees none"))
