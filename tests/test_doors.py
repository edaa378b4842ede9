"""The names of ``import fasttfm``, and what a first call that goes wrong says."""

from __future__ import annotations

import inspect
import json
import os
import pkgutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import fasttfm
from fasttfm import models

SUBMODULES = (
    *("data", "flash_attn", "generate", "inference", "models", "nn", "ops", "optim", "tasks", "testing", "train"),
)


def in_new_interpreter(code: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout.strip()


def test_names_are_imported_when_they_are_used() -> None:
    code = f"""
import sys, json, fasttfm
before = [name for name in {SUBMODULES!r} if f"fasttfm.{{name}}" in sys.modules]
objects = [getattr(fasttfm, name).__name__ for name in {SUBMODULES!r}]
print(json.dumps([before, objects, fasttfm.Session.__module__, fasttfm.patch.__module__]))
"""
    before, names, session, patch = json.loads(in_new_interpreter(code))
    assert before == ["ops"]
    assert names == [f"fasttfm.{name}" for name in SUBMODULES]
    assert (session, patch) == ("fasttfm.inference.session", "fasttfm.patching.patch")


def test_completion_lists_the_public_names() -> None:
    assert set(SUBMODULES) | {"Session", "patch", "unpatch", "register_attention", "explain"} <= set(dir(fasttfm))
    assert [name for name in dir(fasttfm) if getattr(fasttfm, name) is None] == []
    with pytest.raises(AttributeError, match="module 'fasttfm' has no attribute 'sesion'"):
        fasttfm.sesion  # noqa: B018


def test_modules_without_an_underscore_are_meant_for_users() -> None:
    """IPython completes ``import fasttfm.`` from the files."""
    others = {
        "__main__",
        "bench",
        "cli",
        "kernels",
        "patching",
        "selftest",
        "serve",
    }  # run as commands, or named in the docs
    found = {module.name for module in pkgutil.iter_modules(fasttfm.__path__) if not module.name.startswith("_")}
    assert found - others == set(SUBMODULES)


def test_generate_is_a_module_and_a_function() -> None:
    assert inspect.signature(fasttfm.generate) == inspect.signature(fasttfm.generate.generate)
    torch.manual_seed(0)
    model = models.GPT2LMHeadModel(models.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2)).eval()
    tokens = torch.tensor([[1, 2, 3]])
    ours = fasttfm.generate(model, tokens, max_new_tokens=4, eos_token_id=[])
    assert torch.equal(ours, fasttfm.generate.generate(model, tokens, max_new_tokens=4, eos_token_id=[]))
    with pytest.raises(TypeError, match=r"GPT2LMHeadModel.generate: expected fasttfm.generate\(model, input_ids"):
        model.generate(tokens)


def test_explain_without_arguments_lists_the_backends_of_this_machine() -> None:
    found = fasttfm.explain("layer_norm")
    assert found.chosen is None
    assert found.reasons["reference"] is None
    assert "explain('layer_norm', x, ...) says which one runs a call" in str(found)


@pytest.mark.parametrize(("op", "arguments"), [("layer_norm", ("x",)), ("embedding", (torch.ones(2, 4), None, 3))])
def test_explain_with_wrong_arguments_names_those_of_the_op(op: str, arguments: tuple[object, ...]) -> None:
    with pytest.raises(TypeError, match=rf"explain: expected the arguments of fasttfm.ops.{op}\(.*, got others: "):
        fasttfm.explain(op, *arguments)


def test_a_model_prints_its_size() -> None:
    config = models.BertConfig(vocab_size=50, hidden_size=32, num_attention_heads=2, num_hidden_layers=1)
    model = models.BertModel(config)
    count = sum(each.numel() for each in model.parameters())
    assert repr(model).splitlines()[1] == f"  bert, {count:,} parameters, float32 on cpu"


def test_a_generation_session_prints_what_it_is() -> None:
    model = models.GPT2LMHeadModel(models.GPT2Config(vocab_size=50, n_embd=32, n_layer=1, n_head=2)).eval()
    session = fasttfm.generate.GenerationSession(model, max_batch=2, max_length=64)
    expected = "GenerationSession(GPT2LMHeadModel, up to 2 sequences of 64 tokens, float32 on cpu)"
    assert repr(session) == expected


def test_an_import_takes_little_more_than_torchs(tmp_path: Path) -> None:
    """In processor time, with the bytecode that the first import has written. Half of a second is allowed here, because
    a loaded machine's processors are slower; on an idle one it takes less than 0.15 seconds."""
    code = "import time, torch; begin = time.process_time(); import fasttfm; print(time.process_time() - begin)"
    environment = {"PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    seconds = [float(in_new_interpreter(code, **environment)) for _ in range(2)]
    assert min(seconds) < 0.5, seconds
