"""Launches Triton kernels from C++: a launch takes the host a few microseconds, where Triton's own takes tens.

Triton compiles and loads the kernels. csrc/triton_launch.cpp finds the compiled kernel of a call by everything that
Triton specializes kernels for, and calls the driver as Triton's launcher does, with the same parameters. Calls that it
does not know, and kernels that need more than it can give them, are launched by Triton.
"""

from __future__ import annotations

import threading
from typing import Any

import triton
from triton.runtime.jit import JITFunction

from fasttfm import _native

# Versions whose launcher, specialization and hooks csrc/triton_launch.cpp repeats; others launch their kernels
# themselves.
_VERSIONS = ("3.6.",)

# Triton's types of arguments, as letters of triton_launch.cpp. A constexpr is not an argument of the compiled kernel.
_LETTERS = {"constexpr": "-", "i32": "i", "i64": "l", "u1": "b", "fp32": "f"}

# Held while Triton loads a kernel: it sets the launcher first and the function later, and threads share both.
_loading = threading.Lock()


class LaunchedKernel(JITFunction):
    """A function of ``triton.jit`` whose ``kernel[grid](...)`` launches from C++. All else is Triton's: ``run``
    launches in Triton's way."""

    def __getitem__(self, grid: Any) -> Any:
        return self._at_grid(grid)

    def _prepare(self, grid: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """Compiles and loads the kernel of a call. Returns what a launch needs, or None if it has to be Triton's."""
        from triton.backends.nvidia.driver import CudaLauncher

        compiled = self.run(*args, grid=grid, warmup=True, **kwargs)
        with _loading:
            launcher = getattr(compiled, "run", None)  # loads it; a hook may have kept Triton from compiling it
        if type(launcher) is not CudaLauncher:
            return None
        if launcher.num_ctas != 1 or launcher.global_scratch_size > 0 or launcher.profile_scratch_size > 0:
            return None
        types = compiled.src.signature.values()
        letters = ["p" if str(type_name).startswith("*") else _LETTERS.get(type_name) for type_name in types]
        if None in letters:
            return None
        num_warps, _, shared_bytes = compiled.packed_metadata
        return (
            compiled,
            compiled.function,
            num_warps * compiled.metadata.target.warp_size,
            shared_bytes,
            bool(launcher.launch_cooperative_grid),
            bool(launcher.launch_pdl),
            "".join(letters),
            [(scope, name, scope[name]) for (name, _), (_, scope) in self.used_global_vals.items()],
        )


def launched_kernel(kernel: JITFunction) -> JITFunction:
    """Decorates a function of ``triton.jit``: ``kernel[grid](...)`` then launches from C++. Functions of Triton's
    interpreter remain as they are, and all of them without the native core."""
    prepare = _native.triton_kernel
    if prepare is None or type(kernel) is not JITFunction or not triton.__version__.startswith(_VERSIONS):
        return kernel
    kernel.__class__ = LaunchedKernel
    kernel._at_grid = prepare(kernel, triton.knobs)
    return kernel
