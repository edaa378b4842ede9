"""transformers' Trainer, Accelerate and GradScaler around fasttfm's models and patched ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from model_parity import SIZES
from patched_models import IDS, MASKS, WORDS, with_dropout
from torch import Tensor

import fasttfm
from fasttfm import models

transformers = pytest.importorskip("transformers")
accelerate = pytest.importorskip("accelerate")

KINDS = ("patched", "ours", "plain")
LABELS = WORDS.where(MASKS["right"].bool(), -100)
LABELS[:, 0] = IDS[:, 0]  # every sequence has something to predict
STEPS, BATCH = 5, 4
# Adam divides by the size of gradients: a large epsilon prevents it from amplifying the rounding of those that are
# nearly 0.
RATE, EPSILON = 2e-2, 1e-2


def make(kind: str) -> Any:
    """A small BERT without dropout; all kinds have the same parameters."""
    torch.manual_seed(0)
    sizes = {key: value for key, value in SIZES.items() if key != "num_labels"}
    module = transformers.BertForMaskedLM(transformers.BertConfig(**sizes))
    with_dropout(module, 0.0)
    if kind == "patched":
        fasttfm.patch(module)
    if kind != "ours":
        return module
    rates = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    ours = models.BertForMaskedLM(models.BertConfig(**sizes, **rates))
    ours.load_state_dict(ours.own_tensors(dict(module.state_dict())), strict=False)
    return ours


class Rows(torch.utils.data.Dataset[dict[str, Tensor]]):
    def __len__(self) -> int:
        return len(IDS)

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {"input_ids": IDS[row], "attention_mask": MASKS["right"][row], "labels": LABELS[row]}


def evaluated(module: Any) -> float:
    """The mean of the batches' losses, as Trainer's evaluation takes it."""
    batches = torch.utils.data.DataLoader(Rows(), BATCH)
    with torch.no_grad():
        losses = [module.eval()(**batch).loss for batch in batches]
    return float(torch.stack(losses).mean())


@pytest.fixture(autouse=True)
def forget_accelerators() -> None:
    """Accelerate keeps the precision of the first accelerator of a process."""
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


# ---- Trainer ---------------------------------------------------------------------------------------------------------


def trainer(kind: str, directory: Path, **options: Any) -> Any:
    settings = transformers.TrainingArguments(
        str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        per_device_eval_batch_size=BATCH,
        learning_rate=RATE,
        adam_epsilon=EPSILON,
        lr_scheduler_type="constant",
        logging_steps=1,
        save_steps=3,
        eval_strategy="steps",
        eval_steps=STEPS,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        **options,
    )
    return transformers.Trainer(make(kind), settings, train_dataset=Rows(), eval_dataset=Rows())


def losses_of(run: Any) -> Tensor:
    return torch.tensor([entry["loss"] for entry in run.state.log_history if "loss" in entry])


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Any:
    run = trainer("plain", tmp_path_factory.mktemp("plain"))
    run.train()
    return run


@pytest.mark.parametrize("kind", KINDS[:2])
def test_trainer_follows_the_plain_model_saves_and_resumes(kind: str, tmp_path: Path, plain: Any) -> None:
    run = trainer(kind, tmp_path)
    run.train()
    expected = losses_of(plain)
    assert len(expected) == STEPS
    assert expected[-1] < 0.9 * expected[0]
    torch.testing.assert_close(losses_of(run), expected, rtol=1e-5, atol=0)
    evaluation = [entry["eval_loss"] for entry in run.state.log_history if "eval_loss" in entry]
    assert evaluation == pytest.approx([evaluated(run.model)])

    again = trainer(kind, tmp_path)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-3"))
    assert torch.equal(losses_of(again), losses_of(run))
    assert all(torch.equal(a, b) for a, b in zip(again.model.parameters(), run.model.parameters(), strict=True))


def test_trainer_predicts_by_a_patched_model(tmp_path: Path, plain: Any) -> None:
    run = trainer("patched", tmp_path)
    run.model.load_state_dict(plain.model.state_dict())
    found, expected = run.predict(Rows()), plain.predict(Rows())
    assert found.metrics["test_loss"] == pytest.approx(expected.metrics["test_loss"], rel=1e-5)
    tokens = MASKS["right"].bool().numpy()
    assert (found.predictions[tokens].argmax(-1) == expected.predictions[tokens].argmax(-1)).all()
    run.save_model()
    read = transformers.BertForMaskedLM.from_pretrained(tmp_path)
    assert evaluated(read) == pytest.approx(expected.metrics["test_loss"], rel=1e-5)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_trainer_with_checkpointing_accumulation_and_label_smoothing(kind: str, tmp_path: Path) -> None:
    smoothing = {"label_smoothing_factor": 0.1} if kind == "patched" else {}  # needs logits: Trainer keeps the labels
    options = {"gradient_checkpointing": True, "gradient_accumulation_steps": 2, **smoothing}
    run = trainer(kind, tmp_path, bf16=True, **options)
    run.train()
    losses = losses_of(run)
    assert len(losses) == STEPS
    assert losses[-1] < losses[0]


# ---- Accelerate ------------------------------------------------------------------------------------------------------


def accelerated(kind: str, directory: Path, *, restore: bool) -> tuple[list[float], Any]:
    """The losses of five steps of two batches each, with a checkpoint after the third; or those of a resumed run."""
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
    module = make(kind)
    optimizer = torch.optim.AdamW(module.parameters(), lr=RATE, eps=EPSILON)
    module, optimizer, batches = accelerator.prepare(module, optimizer, torch.utils.data.DataLoader(Rows(), BATCH))
    if restore:
        accelerator.load_state(str(directory))
    losses = []
    order = [each for _ in range(3) for each in batches][: 2 * STEPS]
    for step, each in enumerate(order):
        if restore and step < 6:
            continue
        if step == 6 and not restore:
            accelerator.save_state(str(directory))
        with accelerator.accumulate(module):
            loss = module(**each).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, accelerator.unwrap_model(module)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_accelerate(kind: str, tmp_path: Path) -> None:
    losses, module = accelerated(kind, tmp_path / kind, restore=False)
    expected, other = accelerated("plain", tmp_path / "plain", restore=False)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(expected), rtol=1e-5, atol=0)
    assert evaluated(module) == pytest.approx(evaluated(other), rel=1e-5)
    rest, again = accelerated(kind, tmp_path / kind, restore=True)
    assert rest == losses[6:]
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), module.parameters(), strict=True))


# ---- GradScaler ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("kind", KINDS[:2])
def test_grad_scaler_in_fp16(kind: str, device: str) -> None:
    module = make(kind).to(device).train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**40)  # too large, so that the first steps are skipped
    batch = {"input_ids": IDS, "attention_mask": MASKS["right"], "labels": LABELS}
    batch = {name: value.to(device) for name, value in batch.items()}
    before = [parameter.detach().clone() for parameter in module.parameters()]
    losses, scales = [], []
    for _ in range(40):
        with torch.autocast(device, dtype=torch.float16):
            loss = module(**batch).loss
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())
        if len(scales) == 1:
            assert all(torch.equal(a, b) for a, b in zip(module.parameters(), before, strict=True))
    assert scales[0] < 2.0**40
    assert scales[-1] == scales[-2]
    assert all(parameter.isfinite().all() for parameter in module.parameters())
    assert losses[-1] < 0.9 * losses[0]
