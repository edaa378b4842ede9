"""``fasttfm serve``: answers requests over HTTP, with the routes of TEI, OpenAI, Cohere and Jina.

  fasttfm serve --model all-MiniLM-L6-v2
  fasttfm serve --model embedder --model reranker --port 8080 --precision int8
  fasttfm serve --model gpt2 --api-key-file keys.txt

Each model serves the routes of its head: vectors, rankings, labels, entities, answers, masked tokens or continued
prompts. The page at / shows what is loaded and has a playground; /docs lists the routes. SIGTERM ends the server after
the requests in flight, SIGHUP loads models and keys again. Texts are never logged.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from fasttfm import _extras
from fasttfm.cli.options import MODEL_HELP, Formatter, exit_on_user_error

_PACKAGES = ("starlette", "uvicorn", "orjson", "prometheus_client")


def add_parser(subparsers: Any) -> None:
    """Adds the ``serve`` command to a command line."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "serve", help="answer requests over HTTP", description=__doc__, formatter_class=Formatter
    )
    group = parser.add_argument_group("models")
    group.add_argument(
        "--model",
        required=True,
        action="append",
        metavar="MODEL",
        help=f"{MODEL_HELP}; may be repeated",
    )
    group.add_argument(
        "--served-model-name",
        action="append",
        default=[],
        metavar="NAME",
        help="name of a model in requests, in the order of --model (default: the directory's name)",
    )
    group.add_argument(
        "--device",
        default="all",
        metavar="NAMES",
        help="cpu, cuda (every GPU) or cuda:N, or several with commas between them, each with a session; all: every "
        "GPU, or else the CPU",
    )
    group.add_argument(
        "--precision",
        choices=("float32", "bfloat16", "int8", "fp8", "auto"),
        help="int8 on a CPU, fp8 on a GPU with a calibrated model; auto: the fastest on this CPU that keeps the "
        "vectors of sample texts, bfloat16 on a GPU (default: auto; for causal models bfloat16 on a GPU, float32 on a "
        "CPU)",
    )
    group.add_argument("--pooling", choices=("cls", "mean", "last-token"), help="instead of the folder's")
    group.add_argument("--max-batch-tokens", type=int, metavar="N", help="tokens of a batch (default: the session's)")
    group.add_argument(
        "--max-sequences", type=int, default=32, metavar="N", help="sequences that a causal model continues at a time"
    )
    _add_server_options(parser)
    _add_limits(parser)
    parser.set_defaults(refuse=parser.error)


def _add_server_options(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("server")
    group.add_argument("--hostname", default="0.0.0.0", metavar="ADDRESS", help="address to listen on")
    group.add_argument("--port", type=int, default=8080, metavar="N", help="port to listen on; 0 takes a free one")
    group.add_argument("--api-key-file", type=Path, metavar="FILE", help="a file with one API key on each line")
    group.add_argument(
        "--cors-allow-origin",
        action="append",
        metavar="ORIGIN",
        help="origin whose pages may send requests; may be repeated (default: every origin)",
    )
    group.add_argument(
        "--processes",
        type=int,
        default=1,
        metavar="N",
        help="processes that serve the port, each with the models and an equal part of the CPU's threads",
    )
    group.add_argument("--tokenization-workers", type=int, default=4, metavar="N", help="threads that read long texts")
    group.add_argument("--access-log", action="store_true", help="log a line for each request, without its text")
    group.add_argument("--drain-timeout", type=float, default=30.0, metavar="S", help="seconds for requests to end")
    group.add_argument("--otlp-endpoint", metavar="URL", help="collector of OpenTelemetry traces (OTLP over HTTP)")
    group.add_argument("--otlp-service-name", default="fasttfm.serve", metavar="NAME", help="name in traces")


def _add_limits(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("limits")
    for name, default, about in (
        ("max-client-batch-size", 32, "texts of a request"),
        ("max-request-tokens", 131072, "tokens of a request"),
        ("payload-limit", 2_000_000, "bytes of a body"),
        ("max-concurrent-requests", 512, "requests in flight"),
        ("max-queue", 4096, "sequences that wait"),
    ):
        group.add_argument(f"--{name}", type=int, default=default, metavar="N", help=f"maximum {about}")
    group.add_argument("--request-timeout", type=float, default=60.0, metavar="S", help="seconds for a request")
    group.add_argument("--read-timeout", type=float, default=30.0, metavar="S", help="seconds for a body to arrive")
    group.add_argument(
        "--no-auto-truncate",
        action="store_true",
        help="refuse longer texts where a request does not say whether they are truncated",
    )


def run(arguments: argparse.Namespace) -> int:
    """Runs the command."""
    with exit_on_user_error(arguments):
        settings = settings_of(arguments)
        from fasttfm.serve import processes, server

        server.set_up_logging()
        if arguments.processes > 1:
            return processes.run(settings, arguments.processes, started=_say_port)
        return server.run(settings, started=lambda at: _say_port(at.port))


def _say_port(port: int) -> None:
    print(f"listening on port {port}", flush=True)


def settings_of(arguments: argparse.Namespace) -> Any:
    """The settings that the options name; raises ValueError or ImportError."""
    try:
        from fasttfm.serve.limits import Limits
        from fasttfm.serve.models import Source, served_name
        from fasttfm.serve.server import Settings
    except ImportError as error:
        if error.name is None or error.name.partition(".")[0] not in _PACKAGES:
            raise
        raise _extras.missing("fasttfm serve", error.name, "serve") from None
    endpoint = arguments.otlp_endpoint
    limits = ("max_client_batch_size", "max_request_tokens", "payload_limit", "max_concurrent_requests", "max_queue")
    for name in (*limits, "request_timeout", "read_timeout", "max_sequences", "tokenization_workers", "processes"):
        if getattr(arguments, name) <= 0:
            raise ValueError(f"--{name.replace('_', '-')}: expected a number above 0, got {getattr(arguments, name)}")
    if len(arguments.served_model_name) > len(arguments.model):
        got = f"{len(arguments.served_model_name)} names for {len(arguments.model)} models"
        raise ValueError(f"--served-model-name: expected no more names than models, got {got}")
    names = [*arguments.served_model_name, *map(served_name, arguments.model[len(arguments.served_model_name) :])]
    if len(set(names)) < len(names):
        raise ValueError(f"--model: expected different names, got {', '.join(names)}; --served-model-name changes them")
    sources = [
        Source(
            directory,
            name,
            devices_of(arguments),
            precision=arguments.precision,
            pooling=arguments.pooling,
            max_batch_tokens=arguments.max_batch_tokens,
            max_sequences=arguments.max_sequences,
            max_queue=arguments.max_queue,
        )
        for directory, name in zip(arguments.model, names, strict=True)
    ]
    return Settings(
        sources,
        hostname=arguments.hostname,
        port=arguments.port,
        limits=Limits(
            **{name: getattr(arguments, name) for name in (*limits, "request_timeout", "read_timeout")},
            auto_truncate=not arguments.no_auto_truncate,
        ),
        key_file=arguments.api_key_file,
        origins=arguments.cors_allow_origin or ("*",),
        drain_timeout=arguments.drain_timeout,
        tokenization_workers=arguments.tokenization_workers,
        access_log=arguments.access_log,
        traces=None if endpoint is None else (endpoint, arguments.otlp_service_name),
    )


def devices_of(arguments: argparse.Namespace) -> tuple[Any, ...]:
    from fasttfm.inference.sessions import devices_named

    return tuple(devices_named(arguments.device))
