#!/usr/bin/env bash
# Installs nvcc and the static CUDA runtime in a manylinux_2_28 container (AlmaLinux 8); cibuildwheel runs it once.
set -euo pipefail
version=13-0
case "$(uname -m)" in
  x86_64) machine=x86_64 ;;
  aarch64) machine=sbsa ;;
  *) echo "manylinux_cuda: expected x86_64 or aarch64, got $(uname -m)" >&2; exit 1 ;;
esac
dnf install -y 'dnf-command(config-manager)'
dnf config-manager --add-repo "https://developer.download.nvidia.com/compute/cuda/repos/rhel8/$machine/cuda-rhel8.repo"
dnf install -y --setopt=install_weak_deps=False "cuda-nvcc-$version" "cuda-cudart-devel-$version"
/usr/local/cuda-${version/-/.}/bin/nvcc --version
