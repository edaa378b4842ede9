"""``python -m fasttfm.selftest``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import fasttfm
from fasttfm import selftest
from fasttfm.testing.specs import all_specs


def test_every_op_is_checked(capsys: pytest.CaptureFixture[str]) -> None:
    assert selftest.main(["--device", "cpu"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"fasttfm {fasttfm.__version__} in ")
    assert {line.split()[0] for line in lines[1:-1]} == set(all_specs())
    assert lines[-1].startswith("passed on cpu")


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = all_specs()["layer_norm"]

    def off(*args: Any, **options: Any) -> torch.Tensor:
        result: torch.Tensor = spec.function(*args, **options)
        return result * 1.01

    monkeypatch.setattr(selftest, "all_specs", lambda: {"layer_norm": replace(spec, function=off)})
    assert selftest.main(["--device", "cpu"]) == 1
    assert selftest.WRONG in capsys.readouterr().out


def test_a_failing_kernel_is_reported(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    spec = all_specs()["layer_norm"]

    def fails(*_: Any, **__: Any) -> torch.Tensor:
        raise RuntimeError("no kernel image is available\nfor this device")

    specs = {"layer_norm": replace(spec, function=fails), "pack": all_specs()["pack"]}
    monkeypatch.setattr(selftest, "all_specs", lambda: specs)
    assert selftest.main(["--device", "cpu"]) == 1
    _, broken, whole, end = capsys.readouterr().out.splitlines()
    assert "WRONG: RuntimeError: no kernel image is available" in broken
    assert (whole.split()[0], whole.count("ok")) == ("pack", 3)
    assert end.startswith("3 failed on cpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch sees a GPU here")
def test_a_missing_device_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit:
        selftest.main(["--device", "cuda"])
    assert exit.value.code == 2
    assert "torch.cuda.is_available() is False" in capsys.readouterr().err
