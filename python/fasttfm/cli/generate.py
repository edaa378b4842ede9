"""``fasttfm generate``: continues a prompt, or answers it given a description and examples.

  fasttfm generate --model DIR --prompt "Once upon a time" --temperature 0.8
  fasttfm generate --model DIR --prompt "cheese" --description "Translate English to French:" --shots examples.jsonl
  fasttfm generate --model DIR --prompt "The meaning of" --num-beams 4

examples.jsonl has one example per line: {"input": "sea otter", "output": "loutre de mer"}. With a description or
examples, the prompt becomes one more example whose output the model completes (zero-, one- or few-shot prompting).
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from fasttfm.cli.options import GPT_HELP, Formatter, add_device_option, device_of, exit_on_user_error


def add_parser(subparsers: Any) -> None:
    """Adds the ``generate`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "generate",
        help="continue a prompt, optionally with examples",
        description=__doc__,
        formatter_class=Formatter,
    )
    parser.add_argument("--model", required=True, metavar="MODEL", help=GPT_HELP)
    parser.add_argument(
        "--prompt", required=True, metavar="TEXT", help="the text to continue or to answer; - reads it from stdin"
    )
    parser.add_argument("--tokenizer", metavar="PATH", help="tokenizer (default: that of the model's directory)")
    group = parser.add_argument_group("the task")
    group.add_argument("--description", default="", metavar="TEXT", help="instruction at the beginning of the prompt")
    group.add_argument("--shots", type=Path, metavar="FILE", help="examples, one JSON object per line")
    group.add_argument("--count", type=int, metavar="N", help="use the first N examples only")
    group.add_argument(
        "--template", metavar="TEXT", help=r"format of an example (default: 'Input: {input}\nOutput: {output}')"
    )
    group.add_argument("--separator", default=r"\n\n", metavar="TEXT", help="text between examples")
    group.add_argument(
        "--stop",
        metavar="TEXT",
        help="text that ends the answer (default: the separator, if there is a description, a template or examples)",
    )
    group = parser.add_argument_group("sampling")
    group.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="max tokens to generate")
    group.add_argument(
        "--temperature", type=float, metavar="T", help="sample with this temperature (default: the most likely token)"
    )
    group.add_argument("--top-k", type=int, metavar="K", help="sample from the K most likely tokens")
    group.add_argument(
        "--top-p", type=float, metavar="P", help="sample from the most likely tokens with total probability P"
    )
    group.add_argument("--seed", type=int, metavar="N", help="random seed of the samples")
    group.add_argument(
        "--num-beams", type=int, default=1, metavar="N", help="beam search with N beams; the text is printed at the end"
    )
    group.add_argument("--show-prompt", action="store_true", help="print the whole prompt first")
    add_device_option(parser)
    parser.set_defaults(refuse=parser.error)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        import torch

        from fasttfm.data.tokenizer_files import load_tokenizer
        from fasttfm.generate import generate, stream
        from fasttfm.inference.opening import open_model
        from fasttfm.models.families import longest_input
        from fasttfm.models.family import Head
        from fasttfm.tasks.prompts import text_pieces, until
        from fasttfm.train.settings import random_seed

        sampled = any(value is not None for value in (arguments.temperature, arguments.top_k, arguments.top_p))
        if sampled and arguments.num_beams != 1:
            got = f"{arguments.num_beams} beams"
            raise ValueError(f"--num-beams: expected 1 with --temperature, --top-k or --top-p, got {got}")
        device = device_of(arguments)
        tokenizer = load_tokenizer(arguments.tokenizer or arguments.model)
        model: Any = open_model(arguments.model, Head.CAUSAL_LM).to(device)
        text, stop = _prompt(arguments, tokenizer, longest_input(model.config))
        ids = tokenizer.encode(text)
        if not ids:
            raise ValueError("--prompt: expected a text with tokens, got none")
        if arguments.seed is not None:
            random_seed(arguments.seed)
            torch.manual_seed(arguments.seed)
        options: dict[str, Any] = {"do_sample": False}
        if sampled:
            temperature = 1.0 if arguments.temperature is None else arguments.temperature
            options = {"do_sample": True, "temperature": temperature}
            options |= {"top_k": arguments.top_k, "top_p": arguments.top_p}
        end = tokenizer.special.eos if model.config.eos_token_id is None else None
        options |= {"max_new_tokens": arguments.max_new_tokens, "eos_token_id": end}
        prompt = torch.tensor([ids], device=device, dtype=torch.int64)
        if arguments.num_beams != 1:
            continued = generate(model, prompt, num_beams=arguments.num_beams, **options)
            tokens = iter(continued[0, len(ids) :].tolist())
        else:
            tokens = stream(model, prompt, **options)
        if arguments.show_prompt:
            print(text, end="", flush=True)
        for piece in until(text_pieces(tokenizer, tokens), stop):
            print(piece, end="", flush=True)
        print()
    return 0


def _prompt(arguments: argparse.Namespace, tokenizer: Any, positions: int) -> tuple[str, str]:
    """The prompt, and the text that ends the answer."""
    from fasttfm.tasks.prompts import Prompt, read_shots

    if arguments.count is not None and arguments.count < 0:
        raise ValueError(f"--count: expected a number from 0 on, got {arguments.count}")
    if arguments.max_new_tokens < 0:
        raise ValueError(f"--max-new-tokens: expected a number from 0 on, got {arguments.max_new_tokens}")
    question = sys.stdin.read() if arguments.prompt == "-" else arguments.prompt
    try:
        question.encode()
    except UnicodeEncodeError:
        raise ValueError("--prompt: expected UTF-8 text, got other bytes") from None
    shots = [] if arguments.shots is None else read_shots(arguments.shots)[: arguments.count]
    separator = unescaped(arguments.separator)
    template = None if arguments.template is None else unescaped(arguments.template)
    prompt = Prompt(arguments.description, shots, template, separator)
    room = positions - arguments.max_new_tokens
    if room < 1:
        expected = f"fewer than the model's {positions} positions"
        raise ValueError(f"--max-new-tokens: expected {expected}, got {arguments.max_new_tokens}")
    fitting = prompt.fitting(question, lambda text: len(tokenizer.encode(text)), room)
    if left_out := len(shots) - len(fitting.shots):
        print(f"note: {left_out} of {len(shots)} examples do not fit and are left out, the first ones", file=sys.stderr)
    default = separator if arguments.description or shots or template else ""
    return fitting.text(question), default if arguments.stop is None else unescaped(arguments.stop)


def unescaped(text: str) -> str:
    """An option's text, in which ``\\n`` and ``\\t`` are written out."""
    return text.replace(r"\n", "\n").replace(r"\t", "\t")
