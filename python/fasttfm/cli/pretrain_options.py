"""The options of ``fasttfm pretrain``, by groups."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

# An option that is not given is None: a new run has the default, a resumed one its own setting.


def add_data(group: Any) -> None:
    group.add_argument(
        "--data",
        nargs="+",
        metavar="PATH",
        help=".txt, .md, .rst, .jsonl, .csv, .tsv or .parquet files, folders or glob patterns (default: the text that "
        "ships with the package)",
    )
    group.add_argument(
        "--stream",
        action="store_true",
        default=None,
        help="read and tokenize --data while training: .parquet, .jsonl, .tar (WebDataset) or .npy files (token ids), "
        "also by addresses such as s3://bucket/*.parquet; expects --tokenizer or --init",
    )
    group.add_argument(
        "--window-tokens",
        type=int,
        metavar="N",
        help="with --stream: sequences are shuffled within windows of about this many tokens (default: 4194304)",
    )
    group.add_argument(
        "--language",
        metavar="NAME",
        help="without --data: the language of the shipped text, english or korean (default: english)",
    )
    group.add_argument(
        "--text-column",
        metavar="NAME",
        help="column of the text in .jsonl, .csv, .tsv and .parquet files (default: text)",
    )
    group.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a folder, tokenizer.json, vocab.txt, vocab.json or .model (default: that of --init, or a trained one)",
    )
    group.add_argument(
        "--vocabulary",
        type=int,
        metavar="N",
        help="vocabulary size of a trained tokenizer (default: by --recipe; 4000 for little text)",
    )
    group.add_argument(
        "--vocabulary-kind", metavar="KIND", help="wordpiece, bpe or unigram (default: the family's own kind)"
    )
    group.add_argument("--cased", action="store_true", default=None, help="a trained tokenizer keeps capital letters")
    group.add_argument(
        "--strip-accents", action="store_true", default=None, help="a trained tokenizer removes accents from letters"
    )
    group.add_argument("--prepared", type=Path, metavar="FOLDER", help="folder of token shards, reused by other runs")
    group.add_argument(
        "--held-out",
        type=float,
        metavar="FRACTION",
        help="fraction of the documents in the validation set (default: 0.02)",
    )
    group.add_argument(
        "--max-length",
        type=int,
        metavar="N",
        help="max tokens per sequence (default: by --recipe; 128 for little text)",
    )
    group.add_argument(
        "--first-length",
        type=int,
        metavar="N",
        help="max tokens per sequence in the first steps, as BERT was trained (default: by --recipe)",
    )
    group.add_argument(
        "--first-steps", type=int, metavar="N", help="steps with --first-length (default: 90%% of all steps)"
    )
    group.add_argument(
        "--workers", type=int, metavar="N", help="data loading processes of each rank (default: 2 with a GPU, else 0)"
    )


def add_masking(group: Any) -> None:
    group.add_argument(
        "--masking",
        type=float,
        metavar="FRACTION",
        help="fraction of each sequence that is predicted (default: by --recipe, mostly 0.15)",
    )
    group.add_argument(
        "--mask-share",
        type=float,
        metavar="FRACTION",
        help="of these, the fraction that becomes [MASK] (default: 0.8; 1 for rtd)",
    )
    group.add_argument(
        "--random-share",
        type=float,
        metavar="FRACTION",
        help="of these, the fraction that becomes a random token (default: 0.1; 0 for rtd)",
    )
    group.add_argument(
        "--whole-word", action=argparse.BooleanOptionalAction, help="mask whole words (default: only albert)"
    )
    group.add_argument(
        "--ngram",
        type=int,
        metavar="N",
        help="mask n-grams of up to this length (default: 1; albert: 3; 10 with --spans)",
    )
    group.add_argument(
        "--spans",
        action="store_true",
        default=None,
        help="mask spans of whole words as SpanBERT does (3.8 words on average)",
    )


def add_training(group: Any) -> None:
    group.add_argument(
        "--steps", type=int, metavar="N", help="optimizer steps (default: 400; those of the paper with --recipe paper)"
    )
    group.add_argument(
        "--tokens-per-step",
        type=int,
        metavar="N",
        help="tokens per optimizer step, over all processes (default: by --recipe; 2048 for little text)",
    )
    group.add_argument(
        "--accumulation",
        type=int,
        metavar="N",
        help="gradient accumulation steps per process (default: 1; by --recipe without --tokens-per-step)",
    )
    group.add_argument(
        "--batches-per-step",
        type=int,
        metavar="N",
        help="the same for all processes together: a run with as many has the same curve on any number of processes",
    )
    group.add_argument("--optimizer", metavar="NAME", help="adamw, lamb or muon (default: by --recipe)")
    group.add_argument(
        "--learning-rate",
        type=float,
        metavar="RATE",
        help="peak learning rate (default: by --recipe; 0.00005 with --init)",
    )
    group.add_argument(
        "--weight-decay",
        type=float,
        metavar="RATE",
        help="weight decay, except for biases and LayerNorms (default: by --recipe, mostly 0.01)",
    )
    group.add_argument("--betas", type=float, nargs=2, metavar="B", help="Adam betas (default: by --recipe)")
    group.add_argument(
        "--schedule",
        metavar="NAME",
        help="learning rate schedule: linear, cosine, constant or wsd (warmup, stable, decay) (default: by --recipe)",
    )
    group.add_argument(
        "--decay", type=int, metavar="N", help="with --schedule wsd: steps of its decay (default: a fifth of all)"
    )
    group.add_argument(
        "--warmup", type=int, metavar="N", help="warmup steps (default: those of the paper, at most a tenth of all)"
    )
    group.add_argument(
        "--clip",
        type=float,
        metavar="NORM",
        help="max gradient norm; 0 disables clipping (default: by --recipe, mostly 1.0)",
    )
    group.add_argument("--dropout", type=float, metavar="P", help="dropout probability (default: that of the size)")
    group.add_argument(
        "--precision",
        help="bfloat16, float32 or fp8, the layers' GEMMs in FP8 (default: bfloat16 on a GPU, float32 on a CPU)",
    )
    group.add_argument("--compile", action="store_true", default=None, help="compile the forward with torch.compile")
    group.add_argument(
        "--cuda-graph", action="store_true", default=None, help="run the step as a CUDA graph (one GPU, fixed shapes)"
    )
    group.add_argument(
        "--bad-steps",
        type=int,
        metavar="N",
        help="end the run after this many consecutive non-finite steps (default: 5)",
    )
    group.add_argument("--seed", type=int, metavar="N", help="random seed (default: 0)")


def add_run(group: Any) -> None:
    group.add_argument(
        "--output", type=Path, metavar="DIR", help="output directory (default: a new one under fasttfm-runs)"
    )
    group.add_argument(
        "--resume", action="store_true", help="resume the run in --output from its newest checkpoint, with its settings"
    )
    group.add_argument("--more-steps", type=int, metavar="N", help="with --resume: extend the run by N steps")
    group.add_argument(
        "--overwrite", action="store_true", help="replace the run in --output, or write to a directory that has files"
    )
    group.add_argument("--device", metavar="NAME", help="cpu, cuda or cuda:N (default: a GPU if there is one)")
    group.add_argument("--parallel", metavar="NAME", help="under torchrun: ddp or fsdp (default: ddp)")
    group.add_argument(
        "--gradient-dtype",
        metavar="DTYPE",
        help="torchrun: in which ranks send gradients, float32 or bfloat16: half of the bytes (default: float32)",
    )
    group.add_argument(
        "--shard-optimizer",
        action="store_true",
        default=None,
        help="with ddp: every process has a part of the optimizer's state (ZeRO-1)",
    )
    group.add_argument(
        "--checkpoint-every",
        type=int,
        metavar="STEPS",
        help="checkpoint interval (default: a fifth of the run, at most 1000)",
    )
    group.add_argument(
        "--checkpoints",
        metavar="KIND",
        help="whole, or sharded: every process writes its part while the training goes on (default: whole)",
    )
    group.add_argument("--keep", type=int, metavar="N", help="number of checkpoints to keep (default: 3)")
    group.add_argument(
        "--evaluate-every", type=int, metavar="STEPS", help="evaluation interval (default: a tenth of the run)"
    )
    group.add_argument(
        "--evaluation-batches", type=int, metavar="N", help="validation batches, over all processes (default: 8)"
    )
    group.add_argument("--log-every", type=int, metavar="STEPS", help="logging interval (default: 10)")
    group.add_argument(
        "--compare",
        action=argparse.BooleanOptionalAction,
        help="at the end, time a step of bert or gpt2 and of plain torch (default: without --data and --quiet)",
    )
    group.add_argument("--quiet", action="store_true", help="no progress bar")


def configuration_field(text: str) -> tuple[str, Any]:
    """A field of the configuration and its value: hidden_size=512."""
    name, sign, value = text.partition("=")
    if not sign or not name:
        raise argparse.ArgumentTypeError(f"expected FIELD=VALUE, got {text!r}")
    try:
        return name, json.loads(value)
    except json.JSONDecodeError:
        return name, value
