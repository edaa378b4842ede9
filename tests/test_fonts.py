"""Pictures of texts in scripts that matplotlib's default font lacks."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

from fasttfm import _fonts

matplotlib = pytest.importorskip("matplotlib", reason="fonts are those of matplotlib")
pytest.importorskip("fontTools", reason="matplotlib needs it; it writes the font of the test")


def font_with(letters: str, family: str, path: Path) -> None:
    """Writes a font in which each of these letters is a full square."""
    from fontTools.fontBuilder import FontBuilder
    from fontTools.pens.ttGlyphPen import TTGlyphPen

    pen = TTGlyphPen(None)
    pen.moveTo((0, 0))
    for point in ((0, 800), (800, 800), (800, 0)):
        pen.lineTo(point)
    pen.closePath()
    names = [".notdef", *(f"uni{ord(letter):04X}" for letter in letters)]
    builder = FontBuilder(1000, isTTF=True)
    builder.setupGlyphOrder(names)
    builder.setupCharacterMap({ord(letter): name for letter, name in zip(letters, names[1:], strict=True)})
    builder.setupGlyf(dict.fromkeys(names, pen.glyph()))
    builder.setupHorizontalMetrics(dict.fromkeys(names, (900, 0)))
    builder.setupHorizontalHeader(ascent=900, descent=-100)
    builder.setupNameTable({"familyName": family, "styleName": "Regular"})
    builder.setupOS2(sTypoAscender=900, sTypoDescender=-100)
    builder.setupPost()
    builder.save(path)


@pytest.fixture
def fonts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the system's fonts: empty, and matplotlib knows only its own."""
    from matplotlib import font_manager

    own = [each for each in font_manager.fontManager.ttflist if "mpl-data" in each.fname]
    monkeypatch.setattr(font_manager.fontManager, "ttflist", own)
    monkeypatch.setattr(font_manager, "findSystemFonts", lambda: [str(path) for path in sorted(tmp_path.glob("*.ttf"))])
    monkeypatch.setattr(_fonts, "_reported", set())
    return tmp_path


def families() -> list[str]:
    return list(matplotlib.rcParams["font.family"])


def test_a_font_of_the_system_is_found(fonts: Path) -> None:
    from matplotlib.figure import Figure

    font_with("꽃흙", "Flowers", fonts / "flowers.ttf")
    before = families()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with _fonts.fonts_for(["꽃 and 흙", "\n"]):
            assert families() == [*before, "Flowers"]
            figure = Figure()
            figure.suptitle("꽃 and 흙")
            figure.savefig(fonts / "drawn.png")  # warns of a missing glyph, if there is one
        assert families() == before
        with _fonts.fonts_for(["letters, café"]):
            assert families() == before


def test_a_missing_font_is_reported_once(fonts: Path) -> None:
    font_with("흙", "Soil", fonts / "soil.ttf")  # which lacks the flower
    from matplotlib.figure import Figure

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            with _fonts.fonts_for(["꽃과 흙"]):
                figure = Figure()
                figure.suptitle("꽃과 흙")
                figure.savefig(fonts / "drawn.png")
    (message,) = [str(each.message) for each in seen]
    assert message.startswith("no font has 과꽃흙 (Hangul), which the picture shows as boxes; install one")
    assert "fonts-nanum" in message


def write_confusions(folder: Path) -> Path:
    from fasttfm.tasks.pictures import write_confusion

    write_confusion(folder / "confusion.png", [[3, 1], [0, 2]], ["꽃", "흙"], "dev")
    return folder / "confusion.png"


def write_curves_of_a_run(folder: Path) -> Path:
    from fasttfm.train.curves import write_curves

    (folder / "log.csv").write_text("step,loss,gradient_norm,learning_rate,seconds\n1,2.5,1,0.1,1\n2,2,1,0.1,2\n")
    write_curves(folder / "log.csv", folder / "curves.png", "qa, 꽃/흙")
    return folder / "curves.png"


def write_curves_of_runs(folder: Path) -> Path:
    from fasttfm.train.compared_curves import compare_curves

    for name in ("꽃", "흙"):
        (folder / name).mkdir()
        (folder / name / "log.csv").write_text("step,loss,seconds\n1,2.5,1\n2,2,2\n")
    compare_curves([folder / "꽃", folder / "흙"], ["loss"], folder / "runs.png")
    return folder / "runs.png"


def write_shots(folder: Path) -> Path:
    from fasttfm.cli.prompt_eval import draw_shots

    curve = [{"model": name, "k": k, "accuracy": 0.5, "accuracy_deviation": 0.0} for name in "꽃흙" for k in (0, 1)]
    draw_shots(folder / "shots.png", curve, ["accuracy"], "classify: 꽃.tsv")
    return folder / "shots.png"


@pytest.mark.parametrize("write", [write_confusions, write_curves_of_a_run, write_curves_of_runs, write_shots])
def test_pictures_use_it(write: Callable[[Path], Path], fonts: Path) -> None:
    font_with("꽃흙", "Flowers", fonts / "flowers.ttf")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a missing glyph warns
        assert write(fonts).read_bytes().startswith(b"\x89PNG")
