"""Which GPUs and drivers a build of the CUDA kernels supports: rules over plain numbers, which query no device.

Versions of CUDA are numbers such as 13000 for 13.0, compute capabilities such as 90 for 9.0, and ``archs`` are the
architectures that the core was built for, for example "80 90a 80-virtual".
"""

from __future__ import annotations


def refuse_driver(driver: int, toolkit: int) -> str | None:
    """Why a core that was built with the toolkit cannot run under the driver, which must have the same or a later major
    version; None if it can."""
    if driver // 1000 >= toolkit // 1000:
        return None
    needed = toolkit // 1000 * 1000
    return (
        f"the GPU driver supports CUDA up to {version_text(driver)}, and the native core was built with CUDA "
        f"{version_text(toolkit)}, which needs a driver for {version_text(needed)} or newer"
    )


def refuse_capability(capability: int, archs: str, driver: int, toolkit: int) -> str | None:
    """Why the core has no code for a GPU; None if it has. Machine code runs on GPUs with the same major version and the
    same or a later minor version; PTX on every later GPU, if the driver, which compiles it, is not older than the
    toolkit."""
    names = archs.split()
    machines = [_number(name) for name in names if not name.endswith("-virtual")]
    if any(capability // 10 == machine // 10 and capability >= machine for machine in machines):
        return None
    oldest = min(_number(name) for name in names if name.endswith("-virtual"))
    built = f"the native core was built for compute capability {', '.join(map(capability_text, sorted(machines)))}"
    if capability < oldest:
        return f"{built} and newer, the GPU has {capability_text(capability)}"
    if driver < toolkit:
        return (
            f"{built}; for {capability_text(capability)} the GPU driver would have to compile PTX of CUDA "
            f"{version_text(toolkit)}, and it supports CUDA up to {version_text(driver)}"
        )
    return None


def refuse_block_memory(needed: int, limit: int) -> str | None:
    """Why a kernel whose blocks take ``needed`` bytes of shared memory cannot run on a GPU."""
    if needed <= limit:
        return None
    return f"takes {needed} bytes of shared memory for a block of its backward, the GPU has {limit}"


def _number(arch: str) -> int:
    """80 for "80-virtual", 90 for "90a"."""
    return int(arch.removesuffix("-virtual").rstrip("abcdefghijklmnopqrstuvwxyz"))


def version_text(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def capability_text(capability: int) -> str:
    return f"{capability // 10}.{capability % 10}"
