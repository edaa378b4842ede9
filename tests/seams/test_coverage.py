"""Every public op, module, family, optimizer and session has an entry point, or is named as an exception."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from unittest import mock

import pytest
import torch

import fasttfm
from fasttfm import generate, inference, nn, ops
from fasttfm.models.families import FAMILIES
from fasttfm.ops.layers import core_executor
from fasttfm.testing.seams import entry_points, seams
from fasttfm.testing.seams.model_entries import patched_families
from fasttfm.testing.seams.module_entries import EXCEPTIONS as MODULE_EXCEPTIONS
from fasttfm.testing.seams.op_entries import EXCEPTIONS as OP_EXCEPTIONS
from fasttfm.testing.seams.registry import FIRST_CAPTURE
from fasttfm.testing.seams.session_entries import native_int8
from fasttfm.testing.seams.training_entries import optimizer_classes

EXCEPTIONS = {
    **OP_EXCEPTIONS,
    **MODULE_EXCEPTIONS,
    "inference.Calibration": "scales of a session; nothing is computed",
    "inference.AnswerSpans": "settings of a session",
    "inference.EmbedSettings": "settings of a session",
    "generate.BeamSearch": "settings: generate.generate's entry point searches with beams",
    "generate.CachedDecoder": "runs the steps of generate.GenerationSession",
    "generate.Generation": "a result of generate.GenerationSession",
    "generate.Sampling": "settings: generate.GenerationSession's entry point draws tokens",
}


def public_names() -> set[str]:
    found = {f"{module.__name__.rpartition('.')[2]}.{name}" for module in (ops, nn) for name in module.__all__}
    found |= {
        f"{module.__name__.rpartition('.')[2]}.{name}" for module in (inference, generate) for name in module.__all__
    }
    found |= {f"models.{name}" for name in FAMILIES}
    found |= {f"patch.{name}" for name in patched_families()}
    return found | {f"optim.{name}" for name in optimizer_classes()}


def missing(covered: set[str], exceptions: Mapping[str, str]) -> list[str]:
    return sorted(public_names() - covered - set(exceptions))


def covered(device: str) -> set[str]:
    return {name for entry in entry_points(device).values() for name in entry.covers}


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_everything_public_is_covered(device: str) -> None:
    pytest.importorskip("transformers")
    assert missing(covered(device), EXCEPTIONS) == []
    assert covered(device) - public_names() == set()


def test_int8_layers_run_in_the_native_call() -> None:
    cpu, calls = torch.device("cpu"), []
    forward = core_executor.forward
    entries = [entry for name, entry in entry_points("cpu").items() if "int8" in name and "linear" not in name]
    assert len(entries) == 2 * len(native_int8()) == 10  # post-LN, pre-LN, shared layers; the first two with rotation
    with mock.patch.object(core_executor, "forward", lambda *given: calls.append(1) or forward(*given)):
        for number, entry in enumerate(entries):
            entry.call(entry.make(cpu), entry.inputs(0, cpu))
            assert len(calls) > number, entry
            calls[number + 1 :] = []


def test_every_optimizer_has_an_entry_point() -> None:
    """Whatever was imported before."""
    pattern = re.compile(r"^class (\w+)\((?:Optimizer|torch\.optim\.\w+)\)", re.MULTILINE)
    sources = (path.read_text(encoding="utf-8") for path in Path(fasttfm.__file__).parent.rglob("*.py"))
    classes = [name for text in sources for name in pattern.findall(text)]
    assert classes
    assert sorted(classes) == sorted(optimizer_classes())
    assert {f"optim.{name}" for name in classes} <= set(entry_points("cpu"))


def test_exceptions_are_public_and_not_covered() -> None:
    assert set(EXCEPTIONS) - public_names() == set()
    assert set(EXCEPTIONS) & covered("cpu") == set()
    assert all(EXCEPTIONS.values())


def test_a_name_without_an_entry_point_is_reported() -> None:
    assert missing(covered("cpu") - {"ops.layer_norm", "models.bert"}, EXCEPTIONS) == ["models.bert", "ops.layer_norm"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_what_is_left_out_exists_and_has_a_reason(device: str) -> None:
    every = (*seams().values(), FIRST_CAPTURE)
    known = {seam.name for seam in every} | {name for seam in every for name in seam.variants}
    for entry in entry_points(device).values():
        assert set(entry.left_out) <= known, entry
        assert all(entry.left_out.values()), entry
