"""Every experiment runs in its quick form and writes a table, a plot and a page."""

from __future__ import annotations

import csv
import dataclasses
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from fasttfm import models
from fasttfm.cli.main import main
from fasttfm.data import Masking
from fasttfm.tasks.experiments import shots
from fasttfm.tasks.experiments.lab import Lab, Row, _draw_curves, _draw_values, parameters, table
from fasttfm.tasks.experiments.registry import EXPERIMENTS
from fasttfm.tasks.experiments.replaced_tokens import AllTokensMLM, MaskedDetection, ReplaceMLM


@pytest.fixture(scope="module")
def lab(tmp_path_factory: pytest.TempPathFactory) -> Lab:
    """Tokenizers and shards are created once for all experiments."""
    return Lab(tmp_path_factory.mktemp("lab"), quick=True)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no trained head")
@pytest.mark.parametrize("name", EXPERIMENTS)
def test_an_experiment_runs(name: str, lab: Lab, tmp_path: Path) -> None:
    experiment = EXPERIMENTS[name]
    rows = list(experiment.run(lab))
    experiment.write(rows[:1], tmp_path)  # the command writes after each row
    paths = experiment.write(rows, tmp_path)
    assert [path.suffix for path in paths] == [".csv", ".md", ".png"]
    assert paths[2].read_bytes().startswith(b"\x89PNG")
    with paths[0].open() as file:
        assert len(list(csv.DictReader(file))) == len(rows) > 1
    assert " ".join(experiment.expect.split()) in paths[1].read_text()
    for column in (*experiment.plotted, *([experiment.x] if experiment.x else [])):
        known = [
            row for row in rows if column != "sentence_loss" or row["objective"] != "none"
        ]  # which has no such loss
        assert all(math.isfinite(row[column]) for row in known)
    assert all(experiment.label in row for row in rows)


@pytest.mark.slow
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["experiment", "shots", "--quick", "--quiet", "--output", str(tmp_path)]
    assert main(command) == 0
    assert "| model | shots | accuracy |" in capsys.readouterr().out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["shots.csv", "shots.md", "shots.png"]
    with pytest.raises(SystemExit) as stopped:
        main(command)
    assert stopped.value.code == 2
    assert "--overwrite writes to it" in capsys.readouterr().err
    with pytest.raises(SystemExit) as stopped:
        main(["experiment", "gravity"])
    assert stopped.value.code == 2


def test_an_interrupted_command_keeps_its_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(_: Lab) -> Iterator[Row]:
        yield {"size": "1 x 32", "layers_parameters": 10, "parameters": 20, "loss": 3.0}
        raise KeyboardInterrupt

    experiment = dataclasses.replace(EXPERIMENTS["model-size"], run=run)
    monkeypatch.setitem(EXPERIMENTS, "model-size", experiment)
    assert main(["experiment", "model-size", "--quick", "--output", str(tmp_path)]) == 130
    assert "1 x 32,10,20,3.0" in (tmp_path / "model-size.csv").read_text()
    assert (tmp_path / "model-size.png").exists()


def test_masking_is_that_of_the_training_set(lab: Lab) -> None:
    """Models that are trained at different rates are validated with the same masks."""
    (low, masked), (high, also_masked) = (
        lab.batches(lab.wordpiece, "single", masking=Masking(rate)) for rate in (0.15, 0.6)
    )
    first, second = next(iter(low)), next(iter(high))
    assert torch.equal(first.cu_seqlens, second.cu_seqlens)
    assert second.predictions == pytest.approx(4 * first.predictions, rel=0.1)
    assert all(torch.equal(a.input_ids, b.input_ids) for a, b in zip(masked, also_masked, strict=True))


@pytest.mark.slow
def test_the_same_seed_gives_the_same_table(lab: Lab) -> None:
    experiment = EXPERIMENTS["model-size"]
    assert table(list(experiment.run(lab))) == table(list(experiment.run(lab)))


def test_a_symbol_has_the_same_label_throughout_a_sequence() -> None:
    ids = shots.sequences(50, torch.Generator().manual_seed(0))
    for row in ids.tolist():
        known: dict[int, int] = {}
        for symbol, label in zip(row[::2], row[1::2], strict=True):
            assert known.setdefault(symbol, label) == label
        assert len(known) <= 4
    assert len({tuple(row) for row in ids.tolist()}) == 50


def test_losses_of_replaced_tokens(lab: Lab) -> None:
    """Each variant divides by its own count, and reads the generator's samples instead of the masks."""
    config = models.ElectraConfig(**lab.sizes, embedding_size=32)
    _, (batch, *_) = lab.batches(lab.wordpiece, "electra")
    torch.manual_seed(0)
    joint = MaskedDetection(models.ElectraForJointPreTraining(config))
    assert joint.counts(batch) == (batch.predictions, batch.predictions)
    kinds = [
        kind(models.ElectraForMaskedLM(config), models.ElectraForMaskedLM(config.generator()))
        for kind in (ReplaceMLM, AllTokensMLM)
    ]
    assert [kind.counts(batch)[1] for kind in kinds] == [batch.predictions, batch.tokens]
    for module in (joint, *kinds):
        for loss, count in zip(module(batch), module.counts(batch), strict=True):
            assert 0 < float(loss.detach()) / count < 60  # ELECTRA's weight of 50 times ln 2, or ln of the vocabulary
    assert parameters(kinds[0]) > parameters(kinds[0].model)


def test_close_values_are_points_and_others_are_bars_from_zero() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="it draws")
    figure, (near, far, equal) = pyplot.subplots(1, 3)
    for panel, values in ((near, (0.58, 0.55, math.nan)), (far, (1.2e6, 3.9e5, 9e4)), (equal, (0.0, 0.0, 0.0))):
        _draw_values(panel, ("a", "b", "c"), values)
    assert (len(near.lines), len(near.patches)) == (1, 0)
    assert [text.get_text() for text in near.texts] == ["0.58", "0.55", "none"]
    assert near.get_xlim()[0] > 0.5
    assert (len(far.lines), len(far.patches)) == (0, 3)
    assert [text.get_text() for text in far.texts] == ["1.2M", "390k", "90k"]
    assert far.get_xlim()[0] == equal.get_xlim()[0] == 0
    pyplot.close(figure)


def test_points_of_curves_show_the_label_unless_it_names_the_curves() -> None:
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="it draws")
    figure, (labelled, plain, by_x) = pyplot.subplots(1, 3)
    rows = [{"sharing": "all", "embedding_size": 32, "parameters": 4e5, "masked_lm_loss": 6.5}]
    rows.append({**rows[0], "embedding_size": 64, "parameters": 8e5})
    experiment = EXPERIMENTS["sharing"]
    _draw_curves(labelled, experiment, rows, "masked_lm_loss")
    _draw_curves(plain, dataclasses.replace(experiment, label="sharing"), rows, "masked_lm_loss")
    _draw_curves(by_x, dataclasses.replace(experiment, label="parameters"), rows, "masked_lm_loss")
    assert [text.get_text() for text in labelled.texts] == ["32", "64"]
    assert labelled.get_xlabel() == "parameters (at the points: embedding size)"
    for panel in (plain, by_x):
        assert (len(panel.texts), panel.get_xlabel()) == (0, "parameters")
    assert labelled.xaxis.get_major_formatter()(8e5, 0) == "800k"
    pyplot.close(figure)
