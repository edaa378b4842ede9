"""The Dockerfiles, the unit, the Kubernetes example and the dashboard."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from fasttfm.cli.main import parser_of

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy" / "serve"
DOCKERFILES = sorted(DEPLOY.glob("Dockerfile.*"))


def instructions(path: Path) -> list[tuple[str, str]]:
    """The instructions of a Dockerfile, with their lines joined."""
    text = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", path.read_text(), flags=re.MULTILINE))
    return [(name, rest.strip()) for line in text.splitlines() if line for name, _, rest in [line.partition(" ")]]


def parsed(arguments: list[str]) -> Any:
    """The parsed arguments of ``fasttfm serve``."""
    from fasttfm.cli import serve

    parser, _ = parser_of({"serve": serve})
    return parser.parse_args(["serve", *arguments])


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_dockerfiles(path: Path) -> None:
    found = instructions(path)
    names = [name for name, _ in found]
    assert names.count("FROM") == 2
    users = [rest for name, rest in found if name == "USER"]
    assert users == ["10001"]  # not root
    (entry,) = (json.loads(rest) for name, rest in found if name == "ENTRYPOINT")
    assert entry[:2] == ["fasttfm", "serve"]
    assert parsed([*entry[2:], "--model", "folder"]).port == 8080
    for name, rest in found:
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], capture_output=True).returncode == 0
            extras = re.findall(r"'\.\[(\w+)\]'", rest)
            assert extras in ([], ["serve"])
    (check,) = (rest for name, rest in found if name == "HEALTHCHECK")
    compile(json.loads(check.partition("CMD ")[2])[2], str(path), "exec")


@pytest.mark.slow
@pytest.mark.skipif("FASTTFM_TEST_IMAGE" not in os.environ, reason="builds the package; FASTTFM_TEST_IMAGE=1 runs it")
def test_the_steps_of_the_cpu_image_work(tmp_path: Path, folders: dict[str, Path]) -> None:
    """Runs the steps that install into /opt/fasttfm in an empty environment, and the health check of what they made.
    Steps that change the system (apt-get, useradd) are left out."""
    place = tmp_path / "opt"
    environment = {**os.environ, "PIP_RETRIES": "0", "PIP_DEFAULT_TIMEOUT": "20"}
    for name, rest in instructions(DEPLOY / "Dockerfile.cpu"):
        if name == "RUN" and not re.match(r"apt-get|useradd", rest):
            command = rest.replace("/opt/fasttfm", str(place)).replace("python -m", f"{sys.executable} -m")
            result = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, env=environment)
            if "No matching distribution" in result.stderr:
                pytest.skip("the package index cannot be reached")
            assert result.returncode == 0, result.stderr[-3000:]
    command = [str(place / "bin" / "fasttfm"), "serve", "--model", str(folders["embedder"]), "--port", "0"]
    process = subprocess.Popen([*command, "--hostname", "127.0.0.1"], stdout=subprocess.PIPE, text=True, cwd=tmp_path)
    assert process.stdout is not None
    port = process.stdout.readline().split()[-1]
    for _ in range(300):
        try:
            assert urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5).status == 200
            break
        except OSError:
            assert process.poll() is None
    process.terminate()
    assert process.wait(60) == 0


def test_the_unit() -> None:
    text = (DEPLOY / "fasttfm-serve.service").read_text()
    settings = dict(line.split("=", 1) for line in text.splitlines() if "=" in line and not line.startswith("#"))
    program, command, *arguments = shlex.split(settings["ExecStart"])
    assert (Path(program).name, command) == ("fasttfm", "serve")
    assert parsed(arguments).port == 8080
    assert settings["ExecReload"].endswith("-HUP $MAINPID")
    assert int(settings["TimeoutStopSec"]) > parsed(arguments).drain_timeout


def test_the_kubernetes_example() -> None:
    yaml = pytest.importorskip("yaml")
    deployment, service = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    pod = deployment["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    found = parsed(container["args"])
    assert pod["terminationGracePeriodSeconds"] > found.drain_timeout
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"]["path"] == "/health"
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]


def test_the_dashboard_shows_metrics_that_exist(served: Any) -> None:
    dashboard = json.loads((DEPLOY / "grafana.json").read_text())
    served.client.post("/embed", json={"inputs": ""})  # a failure
    served.post("/embed", {"inputs": "Peace."})
    text = served.client.get("/metrics").text
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    names = {name for each in expressions for name in re.findall(r"\b(?:te|fasttfm)_\w+", each)}
    assert len(names) >= 10
    assert [name for name in names if name not in text] == []
