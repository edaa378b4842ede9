"""``python -m fasttfm.testing.inference_first [DEVICE]``: evaluates with each op before it is first trained with.

What an op keeps between calls (a seed, a workspace, a flag for errors) is made by the first call of a process. Made
under ``torch.inference_mode()``, autograd would refuse it in training; so this runs in a process of its own.
"""

from __future__ import annotations

import sys

import torch

from fasttfm.ops.backends import BackendRefused
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
