"""Drives CMake. Everything that describes the package is in pyproject.toml."""

import os
import subprocess
import sys
from pathlib import Path

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
        subprocess.run(["cmake", "--build", str(build_directory), "--parallel", jobs], check=True)


kernel_packages = [f"fasttfm.kernels.{name}" for name in find_namespace_packages("kernels")]
setup(
    packages=[*find_packages("python"), "fasttfm.kernels", *kernel_packages],
    package_dir={"": "python", "fasttfm.kernels": "kernels"},
    ext_modules=[CMakeExtension("fasttfm._C")],
    cmdclass={"build_ext": CMakeBuild},
)
