"""The servers that ``serve_load.py`` measures, each in a process of its own, and the texts and models."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_START_SECONDS = 600.0  # a server imports for long on a busy machine
_STOP_SECONDS = 90.0  # for 30 seconds it answers what is in flight; a reload that has begun ends first
_TEXT = """
the of and to in a is that for on with as by at from this be are was not have it or an which their its people government
country states power law public time year first new great war peace world work life water house day city school system
church history music science number part group place form light river summer market question reason letter paper village
morning station family doctor teacher student friend mother father child
"""
_WORDS = _TEXT.split()


@dataclass
class Contender:
    """A server that runs. ``model`` is its name in requests."""

    name: str
    port: int
    model: str
    process: Process | None = None

    def stop(self) -> None:
        if self.process is not None:
            self.process.stop()
            self.process = None


class Process:
    """A server's process, with its log in a file."""

    def __init__(self, command: list[str], log: Path, cwd: Path | None = None, **variables: str) -> None:
        self._file = log.open("wb")
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", **variables}
        self.popen = subprocess.Popen(command, stdout=self._file, stderr=subprocess.STDOUT, env=environment, cwd=cwd)
        self._log = log

    def wait_until_ready(self, url: str) -> None:
        end = time.monotonic() + _START_SECONDS
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        while time.monotonic() < end:
            if self.popen.poll() is not None:
                break
            with contextlib.suppress(OSError):
                if opener.open(url, timeout=5).status == 200:
                    return
            time.sleep(0.2)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self._log.read_text(errors='replace')[-3000:]}")

    def memory(self) -> float:
        """MiB that are resident."""
        text = Path(f"/proc/{self.popen.pid}/status").read_text()
        match = re.search(r"VmRSS:\s+(\d+)", text)
        return int(match[1]) / 1024 if match else 0.0

    def stop(self) -> int:
        if self.popen.poll() is None:
            self.popen.send_signal(signal.SIGTERM)
            try:
                self.popen.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.popen.kill()
                self.popen.wait()
        self._file.close()
        return int(self.popen.returncode)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def start_ours(options: Any, folder: Path, log: Path, *more: str) -> Contender:
    """``fasttfm serve``."""
    port = free_port()
    command = [sys.executable, "-m", "fasttfm", "serve", "--model", str(folder), "--port", str(port)]
    command += ["--hostname", "127.0.0.1", "--device", options.device, *more]
    name = "fasttfm serve"
    if options.precision:
        command += ["--precision", options.precision]
        name += f", {options.precision}"
    if options.processes > 1:
        command += ["--processes", str(options.processes)]
        name += f", {options.processes} processes"
    process = Process(command, log)
    process.wait_until_ready(f"http://127.0.0.1:{port}/health")
    return Contender(name, port, folder.name, process)


def start_infinity(options: Any, folder: Path, engine: str, log: Path) -> Contender:
    """infinity, with the same model. Its largest batch is 32 texts, its default."""
    port = free_port()
    model = onnx_folder(options, folder, log.parent / "onnx") if engine == "optimum" else folder
    # Its ONNX engine looks for files by their path from the working directory.
    command = [
        os.path.abspath(shutil.which(options.infinity) or options.infinity),
        "v2",
        "--model-id",
        ".",
        "--engine",
        engine,
        "--port",
        str(port),
    ]
    command += ["--host", "127.0.0.1", "--device", options.device, "--served-model-name", "model"]
    command += ["--url-prefix", "/v1"]
    variables = {"DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0"}
    process = Process(command, log, model, **variables)
    process.wait_until_ready(f"http://127.0.0.1:{port}/health")
    return Contender(f"infinity, {engine}", port, "model", process)


def onnx_folder(options: Any, folder: Path, target: Path) -> Path:
    """The model for infinity's ONNX engine, exported by the optimum that is installed with it."""
    program = Path(shutil.which(options.infinity) or options.infinity).with_name("optimum-cli")
    command = [str(program), "export", "onnx", "--model", str(folder), "--task", "feature-extraction"]
    command += ["--library", "transformers", str(target)]
    result = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    if result.returncode:
        raise RuntimeError(f"optimum-cli: {result.stderr[-2000:]}")
    return target


@contextlib.contextmanager
def contenders(options: Any, folder: Path) -> Iterator[list[Contender]]:
    """Ours first; all run at the same time, and those that are not measured wait for requests."""
    import tempfile

    running: list[Contender] = []
    with tempfile.TemporaryDirectory() as logs, contextlib.ExitStack() as stack:
        running.append(start_ours(options, folder, Path(logs) / "ours"))
        stack.callback(running[0].stop)
        for engine in options.engines.split(",") if options.infinity else ():
            try:
                running.append(start_infinity(options, folder, engine, Path(logs) / engine))
            except RuntimeError as error:
                print(f"infinity, {engine}: not measured: {error}", file=sys.stderr)
                continue
            stack.callback(running[-1].stop)
        yield running


def run_async(coroutine: Any) -> Any:
    """Runs a coroutine on uvloop where it is installed, so that the client takes little of the machine."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(coroutine)
    loop = uvloop.new_event_loop()
    try:
        return loop.run_until_complete(coroutine)
    finally:
        loop.run_until_complete(loop.shutdown_asyncgens())
        loop.close()


def session_of(options: Any, folder: Path) -> Any:
    """A session of the same model in this process, in the precision of ``start_ours``."""
    import torch

    from fasttfm.inference import Session

    dtype = {"float32": torch.float32, "bfloat16": torch.bfloat16}.get(options.precision)
    precision = (options.precision or "auto") if dtype is None else None
    return Session(folder, device=options.device, dtype=dtype, precision=precision)


def sentences(tokens: int | None, count: int = 512) -> list[str]:
    """Sentences of 5 to 60 words, or of ``tokens`` - 2 words, most of which are one token."""
    generator = random.Random(0)
    lengths = [tokens - 2 if tokens else generator.randint(5, 55) for _ in range(count)]
    return [" ".join(generator.choices(_WORDS, k=length)) for length in lengths]


def random_model(name: str, scratch: Path) -> Path:
    """A checkpoint of BERT-base's or MiniLM's shape with random weights and a small tokenizer."""
    from fasttfm.data import train_tokenizer
    from fasttfm.models import BertConfig, BertModel

    sizes = {"hidden_size": 384, "num_hidden_layers": 6, "intermediate_size": 1536} if name == "minilm" else {}
    tokenizer = train_tokenizer("wordpiece", [" ".join(_WORDS)] * 4, 1000)
    folder = scratch / name
    BertModel(BertConfig(**sizes)).save_pretrained(folder)
    tokenizer.save(folder)
    return folder
