"""Drives CMake. Everything that describes the package is in pyproject.toml."""

import os
import re
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path
from typing import TextIO

from setuptools import Extension, find_namespace_packages, find_packages, setup
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).parent.resolve()


class CMakeExtension(Extension):
    def __init__(self, name: str) -> None:
        super().__init__(name, sources=[])


class CMakeBuild(build_ext):
    """Configures and builds the native core with CMake and Ninja, straight to where setuptools wants the module."""

    def build_extension(self, extension: Extension) -> None:
        import pybind11

        destination = Path(self.get_ext_fullpath(extension.name)).resolve().parent
        # The core does not depend on the Python that it is built for: builds for several share their objects here.
        build_directory = Path(os.environ.get("FASTTFM_BUILD_DIR", self.build_temp)).resolve()
        build_directory.mkdir(parents=True, exist_ok=True)
        # Objects are reused, settings are not: an earlier build's tools may be gone with its isolated environment, and
        # an option that is no longer set means its default again.
        (build_directory / "CMakeCache.txt").unlink(missing_ok=True)
        definitions = {
            "CMAKE_BUILD_TYPE": "Debug" if self.debug else "Release",
            "CMAKE_LIBRARY_OUTPUT_DIRECTORY": destination,
            "FASTTFM_VERSION": self.distribution.get_version(),
            "Python_EXECUTABLE": sys.executable,
            "pybind11_DIR": pybind11.get_cmake_dir(),
        }
        options = ("CUDA", "NVCC", "CUDA_ARCHS", "SANITIZE", "SANITIZE_GPU")
        for option in (f"FASTTFM_{name}" for name in options):
            if option in os.environ:
                definitions[option] = os.environ[option]
        flags = [f"-D{name}={value}" for name, value in definitions.items()]
        jobs = os.environ.get("CMAKE_BUILD_PARALLEL_LEVEL", str(os.cpu_count() or 1))
        subprocess.run(["cmake", "-G", "Ninja", "-S", str(ROOT), "-B", str(build_directory), *flags], check=True)
        build(["cmake", "--build", str(build_directory), "--parallel", jobs])


def build(command: list[str]) -> None:
    """Runs the build, whose lines begin with [1/90], and prints how many files are compiled."""
    begun = printed = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, terminal() or nullcontext() as output:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            counted = re.match(r"\[(\d+)/(\d+)\]", line)
            if counted and output is not None and time.monotonic() - printed > 5:
                printed = time.monotonic()
                output.write(f"\r  fasttfm: {counted[1]} of {counted[2]} files compiled, {printed - begun:.0f} s\n")
                output.flush()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def terminal() -> TextIO | None:
    """The terminal, if there is one and output goes elsewhere: pip shows nothing of what a build prints, which takes
    minutes."""
    try:
        return None if sys.stdout.isatty() else open("/dev/tty", "w")
    except OSError:
        return None


kernel_packages = [f"fasttfm.kernels.{name}" for name in find_namespace_packages("kernels")]
setup(
    packages=[*find_packages("python"), "fasttfm.kernels", *kernel_packages],
    package_dir={"": "python", "fasttfm.kernels": "kernels"},
    ext_modules=[CMakeExtension("fasttfm._C")],
    cmdclass={"build_ext": CMakeBuild},
)
