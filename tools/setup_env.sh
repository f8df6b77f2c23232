#!/usr/bin/env bash
# Makes .venv: the stack of requirements.txt with mmcv's compiled ops, and this project (editable).
# Run again, it does only what is missing. From the environment: PYTHON, the interpreter for .venv
# (default: the one .venv already has, else python3), and pip's own variables, e.g. PIP_FIND_LINKS.
set -Eeuo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

readonly supported='3.10 3.11 3.12'
readonly python_hint="name a Python of version ${supported// /, }: make demo PYTHON=python3.11"
readonly venv=.venv
readonly stamp=$venv/setup_env.stamp
readonly venv_python=$venv/bin/python

say() { printf '==> %s\n' "$*"; }
die() { printf 'error: %s\n' "$*" >&2; exit 1; }
pip() { "$venv_python" -m pip --disable-pip-version-check "$@"; }
check() { "$venv_python" tools/check_environment.py "$@"; }

python_version() { "$1" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null; }
is_supported() { [[ -n $1 && " $supported " == *" $1 "* ]]; }

# The version of .venv's Python; empty if .venv is absent, broken or was moved from elsewhere.
usable_venv_version() {
  grep -qsF "$(pwd -P)/$venv" $venv/bin/activate && $venv_python -m pip --version &>/dev/null &&
    python_version $venv_python
}

gpu_is_visible() {
  case ${CUDA_VISIBLE_DEVICES-all} in '' | -1) return 1 ;; esac
  [[ $(nvidia-smi -L 2>/dev/null) == 'GPU '* ]] || compgen -G '/dev/nvidia[0-9]*' >/dev/null
}

# Everything that decides what .venv holds, but not whether a GPU was there.
inputs_key() {
  printf '%s ' "$1" "$(pwd -P)"
  cat requirements.txt setup.cfg pyproject.toml tools/setup_env.sh | sha256sum | cut -d ' ' -f 1
}

nvcc_major() { "$1" --version 2>/dev/null | sed -n 's/.*release \([0-9]*\)\..*/\1/p'; }

# The toolkit folder whose nvcc is of the given major version. As in torch, CUDA_HOME overrides.
find_cuda_home() {
  local candidates=("${CUDA_HOME:-${CUDA_PATH:-}}") home on_path
  if [[ -z ${candidates[0]} ]]; then
    on_path=$(command -v nvcc || true)
    candidates+=("${on_path%/bin/nvcc}" "$(readlink -f "${on_path:-/}" | sed 's|/bin/nvcc$||')")
    candidates+=(/usr/local/cuda /usr/local/cuda-"$1"*)
  fi
  for home in "${candidates[@]}"; do
    # An nvcc alone, such as a link in a bin folder, is no toolkit.
    if [[ $(nvcc_major "$home/bin/nvcc") == "$1" ]] &&
      compgen -G "$home/include/cuda_runtime.h" >/dev/null; then
      printf '%s\n' "$home"
      return
    fi
  done
  return 1
}

# Empty when mmcv's ops can be compiled here, else what is missing.
missing_build_tool() {
  if ! command -v "${CXX%% *}" >/dev/null; then
    echo "no C++ compiler ($CXX) was found: install one, e.g. Debian's g++"
  elif ! "$1" -c 'import os, sysconfig as s
raise SystemExit(not os.path.isfile(os.path.join(s.get_path("include"), "Python.h")))'; then
    echo "the headers of $1 (Python.h) are missing: install them, e.g. Debian's python3-dev"
  fi
}

# Whether a folder of prebuilt wheels, as in PIP_FIND_LINKS, has mmcv for this Python.
has_prebuilt_mmcv() {
  local into found=0
  into=$(mktemp -d)
  pip download --quiet --no-index --no-deps --only-binary :all: --constraint requirements.txt \
    --dest "$into" onedl-mmcv &>/dev/null || found=1
  rm -rf "$into"
  return $found
}

# ---- Is everything there already?

current=$(usable_venv_version || true)
wanted=$current
python=$venv_python
if [[ -n ${PYTHON:-} ]] || ! is_supported "$current"; then
  python=${PYTHON:-python3}
  command -v "$python" >/dev/null || die "'$python' was not found; $python_hint"
  wanted=$(python_version "$python") || die "'$python' does not run as Python; $python_hint"
  is_supported "$wanted" || die "Python $wanted ('$python') is not supported; $python_hint"
fi

device=cpu
! gpu_is_visible || device=cuda
key=$(inputs_key "$wanted")
if [[ $current == "$wanted" && -f $stamp ]] && read -r built_for built_key <$stamp &&
  [[ $built_key == "$key" && ($device == cpu || $built_for == cuda) ]] &&
  check versions 2>/dev/null; then
  say "$venv is complete (Python $wanted), nothing to set up"
  exit 0
fi

# ---- Can it be made? Nothing is downloaded before this is known.

"$python" -c 'import ensurepip, venv' 2>/dev/null ||
  die "'$python' cannot make virtual environments: install the modules venv and ensurepip, e.g." \
    "Debian's python$wanted-venv"

if [[ $device == cuda ]]; then
  # CuPy's pin names the CUDA major version that the pinned torch is built for.
  cuda_major=$(sed -n 's/^cupy-cuda\([0-9]*\)x==.*/\1/p' requirements.txt)
  CUDA_HOME=$(find_cuda_home "$cuda_major") ||
    die "an NVIDIA GPU is present, but no CUDA $cuda_major toolkit with nvcc is in CUDA_HOME," \
      "PATH or /usr/local: install one, or go without the GPU: CUDA_VISIBLE_DEVICES= make demo"
  export CUDA_HOME
fi

export CXX=${CXX:-$(command -v c++ || command -v g++ || echo c++)}
missing=$(missing_build_tool "$python")
# A prebuilt mmcv may lack CUDA ops, so with a GPU a compiler must be there in any case.
[[ -z $missing || $device == cpu ]] || die "mmcv's ops cannot be compiled: $missing"

resumed=yes
if [[ $current != "$wanted" ]]; then
  resumed=no
  say "making $venv with Python $wanted"
  "$python" -m venv --clear $venv
fi
rm -f $stamp
if [[ -n $missing ]] && ! has_prebuilt_mmcv; then
  [[ $resumed == yes ]] || rm -rf $venv
  die "mmcv's ops cannot be compiled: $missing; or add a folder that holds a prebuilt wheel of" \
    "onedl-mmcv to PIP_FIND_LINKS"
fi

# ---- Make it.

trap 'echo "error: the set-up stopped at the step above; run it again to go on from there" >&2' ERR

# Without build isolation packages are built with the pinned tools, and mmcv sees torch:
# otherwise it silently builds without its ops.
install() { pip install --no-build-isolation "$@"; }
install_mmcv() {
  local force_cuda=0
  [[ $device == cpu ]] || force_cuda=1
  MMCV_WITH_OPS=1 FORCE_CUDA=$force_cuda CFLAGS=${CFLAGS:--g0 -O2} \
    install --no-deps --constraint requirements.txt "$@" onedl-mmcv
}

say '[1/6] torch and the build tools (the largest download, about 2 GB; .venv takes 6 GB)'
install --constraint requirements.txt \
  setuptools wheel packaging ninja psutil numpy torch torchvision
[[ $device == cpu ]] || check --torch-cuda "$cuda_major" || exit 1

say '[2/6] mmcv with its ops: a prebuilt wheel if pip finds one, else compiled, once' \
  '(about 10 minutes on 2 cores; longer with CUDA ops)'
install_mmcv

say '[3/6] the rest of requirements.txt'
install --requirement requirements.txt

say '[4/6] OpenCV without libGL'
# Both builds write the same files: the last one installed wins.
check opencv 2>/dev/null ||
  install --no-deps --force-reinstall --constraint requirements.txt opencv-python-headless

say '[5/6] mmlaplacian, editable'
install --no-deps --quiet --editable .

say '[6/6] checking: versions, OpenCV, one NMS on every device'
# Status 3 of check: only mmcv's ops are at fault, as with a wheel for the CPU where a GPU is.
recompile_mmcv() {
  say "the installed mmcv does not serve this machine: compiling it from source"
  [[ -z $missing ]] || die "mmcv's ops cannot be compiled: $missing"
  install_mmcv --no-binary onedl-mmcv --no-cache-dir --force-reinstall
}
if ! { check versions opencv && { check ops || { [[ $? == 3 ]] && recompile_mmcv && check ops; }; }; }; then
  [[ $resumed == yes ]] || die "$venv was made, but does not pass its checks"
  say "$venv is broken, making it anew"
  PYTHON=$(readlink -f $venv_python)
  rm -rf $venv
  PYTHON=$PYTHON exec bash tools/setup_env.sh
fi
printf '%s %s\n' "$device" "$key" >$stamp
say "$venv is ready: source $venv/bin/activate"
