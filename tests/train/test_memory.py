"""What pre-training needs in memory is said before any of it is allocated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fasttfm.cli.main import main
from fasttfm.train import memory
from fasttfm.train.memory import available, needed
from fasttfm.train.pretrain_parts import blank_model
from fasttfm.train.settings import PretrainSettings, ScheduleSettings

CPU = torch.device("cpu")


def settings(family: str, size: str, **changes: Any) -> PretrainSettings:
    return PretrainSettings(family, size, ScheduleSettings(2), **changes)


def test_the_bytes_of_a_published_size() -> None:
    need = needed(settings("gpt3", "13b", changes={"vocab_size": 50257}))
    assert need.parameters == pytest.approx(12.9e9, rel=0.01)
    assert need.certain == 16 * need.parameters  # fp32: parameters, gradients, two moments
    assert need.activations == 17 * 2048 * 5120 * 40 * 4
    halved = needed(settings("gpt3", "13b", changes={"vocab_size": 50257}, batches_per_step=2))
    assert halved.activations == need.activations // 2


@pytest.mark.parametrize("family", ["bert", "albert", "electra", "gpt2"])
def test_parameters_are_those_of_the_model(family: str) -> None:
    chosen = settings(family, "tiny", vocabulary=300)
    model = blank_model(chosen)
    assert all(each.device.type == "meta" for each in model.parameters())
    assert needed(chosen).parameters == sum(each.numel() for each in model.parameters())


def test_a_model_that_does_not_fit_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "available", lambda device: 8 * 2**30)
    call = ["pretrain", "gpt3", "--device", "cpu", "--output", str(tmp_path / "run"), "--size"]
    with pytest.raises(SystemExit) as stopped:
        main([*call, "13b"])
    said = capsys.readouterr().err
    assert stopped.value.code == 1
    assert "gpt3 13b: training needs about 2" in said
    assert "million parameters in fp32 (4" in said
    assert "got 8.0 GiB of free memory on cpu; --size medium fits, with about" in said
    assert not (tmp_path / "run").exists()


def test_activations_that_may_not_fit_are_a_note(monkeypatch: pytest.MonkeyPatch) -> None:
    need = needed(settings("bert", "tiny"))
    monkeypatch.setattr(memory, "available", lambda device: need.certain + need.activations // 2)
    with pytest.warns(UserWarning, match=r"bert tiny: training needs about .*; there are 0\.\d GiB of free memory"):
        memory.check_memory(settings("bert", "tiny"), CPU)


def test_the_free_memory_is_below_the_limit_of_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    free = available(CPU)
    assert free is None or free > 0
    monkeypatch.setattr(memory.resource, "getrlimit", lambda kind: (64 * 2**20 + 2**50, 2**50))
    assert available(CPU) == free
    monkeypatch.setattr(memory, "_left_for_process", lambda: 5)
    assert available(CPU) == 5
