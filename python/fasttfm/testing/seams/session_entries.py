"""Entry points of inference sessions, of generation and of generation sessions."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import torch

from fasttfm import generate
from fasttfm.inference import Session
from fasttfm.models.families import FAMILIES
from fasttfm.models.family import Head
from fasttfm.testing.seams.entry import EntryPoint, Inputs, Tensors, copy_weights
from fasttfm.testing.seams.model_entries import LENGTH, VOCABULARY, _evaluated, small_model

_HOST = "its inputs are lists of the host"
_OWN = "a session belongs to one model, and is not copied with it"
_SEPARATE = {"deep copy": _OWN, "pickle": _OWN, "separate copies": _OWN}
_CAPTURE = "results are arrays on the host, which no CUDA graph can return"
_ON_HOST = {"capture": _CAPTURE, "first use in a capture": _CAPTURE, "fake tensors first": _HOST}


@dataclass
class Opened:
    """A model and its session."""

    model: Any
    session: Any


def _ids(seed: int, _: torch.device) -> Inputs:
    """On the host, for any device."""
    generator = torch.Generator().manual_seed(300 + seed)
    return {"ids": torch.randint(5, VOCABULARY - 1, (3, LENGTH), generator=generator)}


def _lists(inputs: Inputs) -> list[list[int]]:
    """Sequences of several lengths."""
    return [ids[: LENGTH - 3 * index] for index, ids in enumerate(inputs["ids"].tolist())]


# ---- inference sessions ----------------------------------------------------------------------------------------------


def _text_families() -> dict[str, Any]:
    return {name: family for name, family in FAMILIES.items() if family.tokenizer is not None}


def _model(name: str, device: torch.device) -> Any:
    return _evaluated(functools.partial(small_model, FAMILIES[name], Head.NONE), device)


def _session(name: str, options: dict[str, Any], device: torch.device) -> Opened:
    return _open(_model(name, device), options, device)


def _open(model: Any, options: dict[str, Any], device: torch.device) -> Opened:
    return Opened(model, Session(model, device=device, **options))


def _encode(opened: Opened, inputs: Inputs) -> Tensors:
    ids = _lists(inputs)
    found = {"vectors": torch.from_numpy(opened.session.encode(ids))}
    states = opened.session.encode(ids, output="states")
    return found | {f"states {index}": torch.from_numpy(rows) for index, rows in enumerate(states)}


def _take_weights(options: dict[str, Any], opened: Opened) -> None:
    """As the documentation says: a new session if this one cannot take them."""
    if not opened.session.take_weights(opened.model):
        opened.session = Session(opened.model, device=opened.session.device, **options)


def _rebuilt(name: str, options: dict[str, Any], opened: Opened, device: torch.device) -> Opened:
    model = _model(name, device)
    copy_weights(opened.model, model)
    return _open(model, options, device)


def session_entries(device: str) -> list[EntryPoint]:
    """Of every family that reads text, in the session's default precision; of the first one also in 8 bits."""
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    plain: list[tuple[str, dict[str, Any]]] = [(name, {"dtype": dtype}) for name in _text_families()]
    small: list[tuple[str, dict[str, Any]]] = (
        [(next(iter(_text_families())), {"precision": "int8"})] if device == "cpu" else []
    )
    found = []
    for name, options in [*plain, *small]:
        precision = ", int8" if "precision" in options else ""
        found.append(
            EntryPoint(
                name=f"inference.Session, {name}{precision}",
                covers=("inference.Session",),
                make=functools.partial(_session, name, options),
                inputs=_ids,
                call=_encode,
                module=lambda opened: opened.model,
                rebuild=functools.partial(_rebuilt, name, options),
                refresh=functools.partial(_take_weights, options),
                left_out={**_SEPARATE, **_ON_HOST},
            )
        )
    return found


# ---- generation ------------------------------------------------------------------------------------------------------


def _causal(name: str, device: torch.device) -> Any:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    return _evaluated(functools.partial(small_model, FAMILIES[name], Head.CAUSAL_LM), device).to(dtype)


def _generate(model: Any, inputs: Inputs) -> Tensors:
    device = next(model.parameters()).device
    ids = inputs["ids"].to(device)
    greedy = generate.generate(model, ids, max_new_tokens=4)
    beams = generate.generate(model, ids, max_new_tokens=3, num_beams=2)
    stream = list(generate.stream(model, ids[0], max_new_tokens=4))
    return {"greedy": greedy, "beams": beams, "stream": torch.tensor(stream, device="cpu")}


def _generation_session(name: str, device: torch.device) -> Opened:
    model = _causal(name, device)
    return Opened(model, generate.GenerationSession(model, max_batch=2, max_length=24))


def _rebuilt_generation(name: str, opened: Opened, device: torch.device) -> Opened:
    model = _causal(name, device)
    copy_weights(opened.model, model)
    return Opened(model, generate.GenerationSession(model, max_batch=2, max_length=24))


def _continue(opened: Opened, inputs: Inputs) -> Tensors:
    """Three sequences in two slots; the last one is drawn."""
    options: list[dict[str, Any]] = [{}, {}, {"do_sample": True, "seed": 7}]
    waiting = [
        opened.session.submit(ids, max_new_tokens=4 + index, **options[index])
        for index, ids in enumerate(_lists(inputs))
    ]
    return {f"tokens {i}": torch.tensor(each.result(), device="cpu") for i, each in enumerate(waiting)}


def generation_entries() -> list[EntryPoint]:
    found = []
    shared: dict[str, Any] = {"inputs": _ids}
    for name in (name for name, family in FAMILIES.items() if family.causal):
        found.append(
            EntryPoint(
                name=f"generate.generate, {name}",
                covers=("generate.generate", "generate.stream", "generate.release"),
                make=functools.partial(_causal, name),
                call=_generate,
                module=lambda model: model,
                left_out=dict(_ON_HOST),
                **shared,
            )
        )
        found.append(
            EntryPoint(
                name=f"generate.GenerationSession, {name}",
                covers=("generate.GenerationSession",),
                make=functools.partial(_generation_session, name),
                call=_continue,
                module=lambda opened: opened.model,
                rebuild=functools.partial(_rebuilt_generation, name),
                left_out={**_SEPARATE, **_ON_HOST},
                refuses={
                    "alternating autocast": "generate: autocast: expected",
                    "cast": "GenerationSession: model: expected parameters in",
                },
                **shared,
            )
        )
    return found
