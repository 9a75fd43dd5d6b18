#!/usr/bin/env bash
# Make the virtual environment. `make setup` calls this if its stamp file is older than what it depends on.
#   launch/setup.sh run     what training needs
#   launch/setup.sh test    what the tests need on top of it
#   launch/setup.sh extras  the libraries that people bring: Hugging Face, Lightning, accelerate, peft
# Environment:
#   PYTHON  the interpreter; default: python3
#   VENV    the folder of the environment; default: .venv
#   TORCH   pinned (default), or system: reuse the interpreter's own torch
# pip's own settings (indexes, find-links, certificates) stay as they are.
set -euo pipefail
cd "$(dirname "$0")/.."
what=${1:-run}
python=${PYTHON:-python3}
venv=${VENV:-.venv}
torch=${TORCH:-pinned}
log=$venv/setup.log
pins=$venv/constraints.txt
te_version=2.20.2
system='' # version of the torch that is reused; empty when it is installed
print_torch='import torch; print(torch.__version__)'

die() {
  printf 'setup: %s\n' "$@" >&2
  exit 1
}

# stage NAME COMMAND...: run the command and print one line with its seconds. Its output goes to the log.
stage() {
  local name=$1 start=$SECONDS
  shift
  printf 'setup: %s ... ' "$name"
  printf '\n== %s: %s\n' "$name" "$*" >>"$log"
  if "$@" >>"$log" 2>&1; then
    printf '%d s\n' $((SECONDS - start))
  else
    printf 'failed after %d s\n' $((SECONDS - start))
    return 1
  fi
}

# need NAME COMMAND...: a stage without which nothing works; if it fails, show the end of the log and end.
need() {
  stage "$@" || {
    tail -n 25 "$log" >&2
    die "the full log is $log"
  }
}

pip_install() {
  # pip up to 25.2 applies PIP_CONSTRAINT to build environments, newer ones PIP_BUILD_CONSTRAINT: with both, building
  # DeepSpeed from source uses pinned build tools as well.
  PIP_CONSTRAINT=$pins PIP_BUILD_CONSTRAINT=$pins PIP_DISABLE_PIP_VERSION_CHECK=1 \
    "$venv/bin/python" -m pip install -q --no-compile "$@"
}

check_python() {
  command -v "$python" >/dev/null || die "no $python on PATH; install Python 3.11, 3.12 or 3.13, or: make setup PYTHON=/path/to/python3"
  "$python" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' || die \
    "$("$python" -V 2>&1) at $(command -v "$python") cannot be used; this needs Python 3.11, 3.12 or 3.13" \
    "name one: make setup PYTHON=python3.12"
  "$python" -c 'import venv, ensurepip' 2>/dev/null || die \
    "$python has no venv or ensurepip module" "on Debian and Ubuntu: apt install python3-venv"
}

# Refuse a folder that is no environment: it is emptied before the environment is made in it.
check_place() {
  if [ -L "$venv" ]; then
    die "$venv is a link to $(readlink "$venv"), and what lies there would be deleted" \
      "remove the link, or name another folder: make setup VENV=.venv-mine"
  fi
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ ! -e "$venv/setup.log" ] && [ -n "$(ls -A "$venv")" ]; then
    die "$venv is no virtual environment, and what lies there would be deleted" \
      "name a new folder, or delete this one first: make setup VENV=.venv-mine"
  fi
}

make_venv() {
  local options=(--clear)
  [ -z "$system" ] || options+=(--system-site-packages)
  "$python" -m venv "${options[@]}" "$venv"
  # When $python is itself a virtual environment, --system-site-packages shows what lies under it, not its own packages.
  if [ -n "$system" ] && [ "$("$venv/bin/python" -c "$print_torch" 2>/dev/null)" != "$system" ]; then
    "$python" -c 'import sysconfig; print(sysconfig.get_path("purelib")); print(sysconfig.get_path("platlib"))' \
      >"$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/_system_torch.pth"
  fi
}

# A launcher from the interpreter's own packages would start that interpreter, not this environment: make one here.
shim() {
  [ ! -e "$venv/bin/$1" ] || return 0
  printf '#!/bin/sh\nexec "%s/bin/python" -m %s "$@"\n' "$(cd "$venv" && pwd)" "$2" >"$venv/bin/$1"
  chmod +x "$venv/bin/$1"
}

system_torch() {
  "$python" -c "$print_torch" 2>/dev/null || die \
    "TORCH=system, but $python cannot import torch" \
    "name the interpreter that has it (make setup TORCH=system PYTHON=/opt/conda/bin/python), or: make setup"
}

# The best NVIDIA card's compute capability without the dot (90 for an H100), 0 without a card.
compute_capability() {
  command -v nvidia-smi >/dev/null || { echo 0; return; }
  { nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null || true; } | tr -d '. ' | grep -E '^[0-9]+$' | sort -n | tail -1 | grep . || echo 0
}

# The headers and libraries that torch's own wheels brought: the extension must be built against those versions.
nvidia_folders() {
  "$venv/bin/python" - "$1" <<'EOF'
import pathlib, sys, torch
print(":".join(str(path) for path in (pathlib.Path(torch.__file__).parent.parent / "nvidia").glob("*/" + sys.argv[1])))
EOF
}

build_transformer_engine() {
  local cuda line
  [ "$(compute_capability)" -ge 89 ] || return 0
  if "$venv/bin/python" -c 'import transformer_engine.pytorch' >>"$log" 2>&1; then
    echo "setup: Transformer Engine is there already"
    return 0
  fi
  cuda=$("$venv/bin/python" -c 'import torch; print((torch.version.cuda or "").split(".")[0])')
  if [ -z "$cuda" ]; then
    echo "setup: Transformer Engine not built: this torch is a CPU build"
    return 0
  fi
  line="transformer-engine[core_cu$cuda,pytorch]==$te_version"
  CPATH=$(nvidia_folders include)${CPATH:+:$CPATH}
  LIBRARY_PATH=$(nvidia_folders lib)${LIBRARY_PATH:+:$LIBRARY_PATH}
  export CPATH LIBRARY_PATH NVTE_FRAMEWORK=pytorch MAX_JOBS="${MAX_JOBS:-$(nproc)}"
  # Without --no-build-isolation the build pulls a torch of its own, and the extension does not fit the installed one.
  if stage "build tools" pip_install setuptools wheel pybind11 ninja &&
    stage "Transformer Engine, built against the installed torch (minutes)" pip_install --no-build-isolation "$line" &&
    stage "Transformer Engine, import" "$venv/bin/python" -c 'import transformer_engine.pytorch'; then
    return 0
  fi
  tail -n 12 "$log" >&2
  cat >&2 <<EOF
setup: Transformer Engine is not available; everything else works, FP8 takes the next rung of the recipe's ladder.
setup: it needs a C++ compiler and the headers of CUDA $cuda (CUDA_HOME), cuDNN 9.12+ and NCCL. Once they are there:
setup:   $venv/bin/pip install --no-build-isolation '$line'
EOF
}

case $what in
run)
  check_python
  check_place
  [ "$torch" != system ] || system=$(system_torch)
  log=$(mktemp) # the environment's folder is emptied first
  need "environment in $venv ($("$python" -V 2>&1))" make_venv
  mv "$log" "$venv/setup.log"
  log=$venv/setup.log
  if [ -n "$system" ]; then
    # Pinned to what is there, so that nothing replaces the torch of the image, or the triton that belongs to it.
    { grep -Ev '^(torch|triton)==' constraints.txt; echo "torch==$system"; } >"$pins"
    echo "setup: PyTorch $system of $python is reused"
  else
    cp constraints.txt "$pins"
    need "PyTorch" pip_install "$(grep '^torch==' constraints.txt)"
  fi
  need "harness, DeepSpeed, MLflow and what they need" pip_install -e '.[deepspeed,mlflow]'
  shim torchrun torch.distributed.run
  shim deepspeed deepspeed.launcher.runner
  build_transformer_engine
  # Without this, the first run under deepspeed on a machine without a GPU compiles it, which takes a minute.
  [ "$(compute_capability)" -gt 0 ] || stage "DeepSpeed's kernel for CPUs" "$venv/bin/python" -m harness.engines.deepspeed_setup ||
    echo "setup: DeepSpeed's kernel is not built: deepspeed will say why when it starts; everything else works"
  ;;
test) need "test tools" pip_install -e '.[deepspeed,mlflow,test]' ;;
extras) need "Hugging Face, Lightning, accelerate, peft" pip_install -e '.[deepspeed,mlflow,test,hf,peft,lightning,accelerate]' ;;
*) die "run, test or extras, not $what" ;;
esac
