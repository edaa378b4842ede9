"""``fasttfm show curves``."""

from __future__ import annotations

from pathlib import Path

import pytest

from fasttfm.cli.main import main
from fasttfm.train.compared_curves import draw

pytest.importorskip("matplotlib", reason="it draws the picture")


@pytest.fixture
def runs(tmp_path: Path) -> list[str]:
    """Two runs, of which one has a second loss and an interrupted last line."""
    texts = {
        "nsp": "step,tokens,loss,validation_loss,next_sentence,seconds\n10,1,3.5,,0.7,1\n20,2,2.5,3.0,0.6,2\n30,3,1",
        "mlm": "step,tokens,loss,validation_loss,seconds\n10,1,4.5,4.0,1\n",
    }
    for name, text in texts.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "log.csv").write_text(text)
    return [str(tmp_path / name) for name in texts]


def test_each_column_is_a_panel_with_a_curve_of_each_run(runs: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    figures = []
    monkeypatch.setattr("fasttfm.train.compared_curves.draw", lambda *call: figures.append(draw(*call)) or figures[-1])
    output = Path(runs[0]).parent / "curves.png"
    call = ["show", "curves", "--runs", *runs, "--output", str(output), "--columns", "loss", "next_sentence"]
    assert main(call) == 0
    assert output.read_bytes().startswith(b"\x89PNG")
    curves = [
        {str(line.get_label()): [list(line.get_xdata()), list(line.get_ydata())] for line in panel.get_lines()}
        for panel in figures[0].axes
    ]
    assert curves == [{"nsp": [[10, 20], [3.5, 2.5]], "mlm": [[10], [4.5]]}, {"nsp": [[10, 20], [0.7, 0.6]]}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--columns", "accuracy"), "columns: expected some of loss, validation_loss, next_sentence, seconds, got acc"),
        (("--columns", "loss", "--runs", "empty"), "runs: expected a folder with the log.csv of a run, got empty"),
        (("--columns", "loss", "--output", "curves.html"), "--output: expected a name that ends in .png, got curves"),
    ],
)
def test_what_cannot_be_drawn_is_refused(
    options: tuple[str, ...], message: str, runs: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(["show", "curves", "--output", "curves.png", "--runs", *runs, *options])
    assert message in capsys.readouterr().err
