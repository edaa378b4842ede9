"""``fasttfm glue``: tasks in GLUE's layouts, scores, and the files of the leaderboard."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from fasttfm.cli.main import main
from fasttfm.tasks.glue import GLUE, GlueResult, find_tasks, submission_text

pytest.importorskip("sklearn", reason="scores are scikit-learn's")
WORDS = ("whale", "ship", "sea", "captain", "war", "peace", "congress", "law")


def write(path: Path, header: str, rows: list[list[str]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = ([header.split(" ")] if header else []) + rows
    path.write_text("".join("\t".join(row) + "\n" for row in lines))


@pytest.fixture(scope="module")
def glue(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """CoLA, STS-B, MRPC and MNLI with a few examples each."""
    folder = tmp_path_factory.mktemp("glue_data")
    texts = [f"The {a} and the {b} ." for a in WORDS for b in WORDS][:40]
    for part, chosen in (("train", texts[:32]), ("dev", texts[32:])):
        rows = [["gj04", str(i % 2), "" if i % 2 else "*", text] for i, text in enumerate(chosen)]
        write(folder / "CoLA" / f"{part}.tsv", "", rows)
        pairs = [[str(i), *"abcdef", text, text, f"{i % 5}.200"] for i, text in enumerate(chosen)]
        write(folder / "STS-B" / f"{part}.tsv", "index g f y o a b sentence1 sentence2 score", pairs)
        (folder / "MRPC").mkdir(exist_ok=True)
        lines = [f"{i % 2}\t1\t2\t{text}\t{text}\n" for i, text in enumerate(chosen)]
        (folder / "MRPC" / f"{part}.tsv").write_text("Quality\t#1 ID\t#2 ID\t#1 String\t#2 String\n" + "".join(lines))
        labels = ("entailment", "neutral", "contradiction")
        names = ["train"] if part == "train" else ["dev_matched", "dev_mismatched"]
        for name in names:
            rows = [[str(i), text, text, "x", labels[i % 3]] for i, text in enumerate(chosen)]
            write(folder / "MNLI" / f"{name}.tsv", "index sentence1 sentence2 label1 gold_label", rows)
    write(folder / "CoLA" / "test.tsv", "index sentence", [[str(i), text] for i, text in enumerate(texts[:3])])
    for name in ("MNLI/test_matched", "MNLI/test_mismatched", "diagnostic/diagnostic"):
        rows = [[str(i), text, text] for i, text in enumerate(texts[:2])]
        write(folder / f"{name}.tsv", "index sentence1 sentence2", rows)
    rows = [[str(i), *"abcdef", text, text] for i, text in enumerate(texts[:3])]
    write(folder / "STS-B" / "test.tsv", "index g f y o a b sentence1 sentence2", rows)
    return folder


def test_every_task_with_files(
    glue: Path, bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["glue", "--model", str(bert_directory), "--data", str(glue), "--device", "cpu", "--quiet"]
    call += ["--epochs", "1", "--max-length", "32", "--output", str(tmp_path / "run")]
    assert main([*call, "--tasks", "CoLA", "STS-B", "MNLI"]) == 0
    said = capsys.readouterr().out
    assert "3 of GLUE's 9 tasks" in said
    assert "of 3 tasks, without SST-2, MRPC, QQP, QNLI, RTE, WNLI" in said
    run = tmp_path / "run"
    report = json.loads((run / "glue.json").read_text())
    assert list(report["tasks"]) == ["CoLA", "STS-B", "MNLI"]
    assert report["tasks"]["MNLI"]["dev"].keys() == {"MNLI-m", "MNLI-mm"}
    assert report["average"] == pytest.approx(sum(task["score"] for task in report["tasks"].values()) / 3)
    names = sorted(path.name for path in (run / "submission").iterdir())
    assert names == ["AX.tsv", "CoLA.tsv", "MNLI-m.tsv", "MNLI-mm.tsv", "STS-B.tsv"]
    lines = (run / "submission" / "CoLA.tsv").read_text().splitlines()
    assert lines[0] == "index\tprediction"
    assert [line.split("\t")[0] for line in lines[1:]] == ["0", "1", "2"]
    assert {line.split("\t")[1] for line in lines[1:]} <= {"0", "1"}
    assert (run / "glue.png").read_bytes().startswith(b"\x89PNG")
    assert "average,score," in (run / "glue.csv").read_text()

    # A resumed run trains what is missing, and keeps the rest.
    assert main([*call, "--tasks", "CoLA", "MRPC", "--resume"]) == 0
    again = json.loads((run / "glue.json").read_text())["tasks"]
    assert list(again) == ["CoLA", "MRPC", "STS-B", "MNLI"]
    assert again["CoLA"] == report["tasks"]["CoLA"]
    assert again["MRPC"]["dev"]["MRPC"].keys() == {"f1", "accuracy"}


def test_the_best_of_several_trainings_is_kept(
    glue: Path, bert_directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    call = ["glue", "--model", str(bert_directory), "--data", str(glue), "--device", "cpu", "--quiet"]
    call += ["--epochs", "1", "--max-length", "16", "--tasks", "STS-B", "--save-models"]
    several = [*call, "--search", "1e-9,1e-2", "--restarts", "2", "--output", str(tmp_path / "several")]
    assert main(several) == 0
    result = json.loads((tmp_path / "several" / "glue.json").read_text())["tasks"]["STS-B"]
    trials = result["trials"]
    assert [(trial["learning_rate"], trial["seed"]) for trial in trials] == [(1e-9, 0), (1e-9, 1), (1e-2, 0), (1e-2, 1)]
    assert len({trial["score"] for trial in trials}) > 1
    best = max(trials, key=lambda trial: trial["score"])
    assert result["score"] == best["score"]
    said = capsys.readouterr().out
    assert f"  * learning rate {best['learning_rate']:g}, seed {best['seed']}: score {best['score']:.3f}" in said
    assert len(list((tmp_path / "several" / "STS-B").glob("rate-*/log.csv"))) == 4
    # The same training by itself leaves the same model and submission.
    rate, seed = str(best["learning_rate"]), str(best["seed"])
    one = [*call, "--learning-rate", rate, "--seed", seed, "--output", str(tmp_path / "one")]
    assert main(one) == 0
    for name in ("STS-B/model.safetensors", "submission/STS-B.tsv"):
        assert (tmp_path / "several" / name).read_bytes() == (tmp_path / "one" / name).read_bytes()


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        (["--search", "1e-4", "--learning-rate", "1e-4"], "--search: expected without --learning-rate"),
        (["--search", "1e-4,1e-4"], "search: expected different learning rates, got 0.0001, 0.0001"),
        (["--restarts", "0"], "restarts: expected a number from 1 on, got 0"),
        (["--tasks", "RTE"], "expected a folder for RTE, got CoLA, MNLI, MRPC, STS-B, diagnostic"),
        (["--tasks", "SQuAD"], "tasks: expected some of CoLA, SST-2"),
        (["--data", "/nowhere"], "/nowhere: expected a directory with the folders of GLUE's tasks, got no directory"),
        (["--resume"], "--resume: expected --output"),
    ],
)
def test_impossible_requests_are_reported(
    more: list[str], sentence: str, glue: Path, bert_directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["glue", "--model", str(bert_directory), "--data", str(glue), *more])
    assert stopped.value.code
    assert sentence in capsys.readouterr().err


def test_scores_are_those_of_the_leaderboard() -> None:
    tasks = {task.name: task for task in GLUE}
    gold, predicted = ["1", "1", "0", "0"], ["1", "0", "0", "1"]
    assert tasks["MRPC"].scores(gold, predicted, {"accuracy": 0.5, "f1": 0.9}) == {"f1": 0.5, "accuracy": 0.5}
    assert tasks["CoLA"].scores(gold, predicted, {"matthews": 0.1, "accuracy": 0.5}) == {"matthews": 0.1}
    result = GlueResult("MNLI", 9, {"MNLI-m": {"accuracy": 0.8}, "MNLI-mm": {"accuracy": 0.6}})
    assert result.score == pytest.approx(0.7)
    assert submission_text([5.2, -0.1, 3.14159], values=True) == "index\tprediction\n0\t5.000\n1\t0.000\n2\t3.142\n"


def test_folders_are_found_by_their_names(tmp_path: Path) -> None:
    for name in ("SST2", "stsb", "other"):
        (tmp_path / name).mkdir()
    assert find_tasks(tmp_path) == {"SST-2": tmp_path / "SST2", "STS-B": tmp_path / "stsb"}
