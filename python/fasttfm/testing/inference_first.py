"""``python -m fasttfm.testing.inference_first [DEVICE]``: calls each op in inference mode, then trains with it.

The first call of a process creates the tensors that an op keeps between calls (a seed, a workspace, a flag for errors).
If they were inference tensors, autograd would refuse them in training. The check needs a process in which no op has
run.
"""

from __future__ import annotations

import sys

import torch

from fasttfm.ops.core.backends import BackendRefused
from fasttfm.testing.call import Call, backends_on
from fasttfm.testing.properties import check_inference_first
from fasttfm.testing.specs import every_spec


def main(device: str) -> int:
    failures = 0
    for spec in every_spec():
        for backend in backends_on(spec, device):
            try:
                check_inference_first(Call(spec, spec.cases[0], torch.float32, backend, device))
            except BackendRefused as refusal:
                print(f"{spec.name} {backend}: refused: {refusal}")
            except (AssertionError, RuntimeError) as error:
                failures += 1
                print(f"{spec.name} {backend}: {error}")
    print(f"{failures} failures")
    return int(failures > 0)


if __name__ == "__main__":
    raise SystemExit(main(*(sys.argv[1:2] or ["cpu"])))
