#!/usr/bin/env bash
# deepspeed launch/train.py ARGS..., which first checks what DeepSpeed needs, and returns the run's true exit code.
# Environment:
#   RANKS          default: every GPU, or 1 on a CPU
#   LAUNCHER_ARGS  more options for the launcher
# It prints the command, which can be used alone.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
. launch/outcome.sh

missing=''
command -v deepspeed >/dev/null || missing="deepspeed (make setup installs it)"
command -v "${CXX:-c++}" >/dev/null || command -v g++ >/dev/null || missing="${missing:+$missing, }a C++ compiler (apt install g++)"
command -v ninja >/dev/null || missing="${missing:+$missing, }ninja (put .venv/bin first on PATH)"
why="it compiles a part of itself on first use. Missing: $missing"
case ${CUDA_VISIBLE_DEVICES-all} in
'' | -1)
  # On a CPU the launcher sets CUDA_VISIBLE_DEVICES=0 for its ranks (its log shows it), and they would take the card.
  if nvidia-smi -L 2>/dev/null | grep -q GPU; then
    missing=cpu
    why="CUDA_VISIBLE_DEVICES hides the GPUs of this machine, and its launcher would show them again"
  fi
  ;;
esac
if [ -n "$missing" ]; then
  cat >&2 <<EOF
DeepSpeed cannot start here: $why
Without it, the same training runs as:
  torchrun --standalone --nproc_per_node ${RANKS:-1} -- launch/train.py $*
  python launch/train.py $*
(with .venv/bin first on PATH: export PATH="$PWD/.venv/bin:\$PATH")
EOF
  exit 4
fi

# shellcheck disable=SC2086 # LAUNCHER_ARGS is a list of words
set -- deepspeed --log_level warning ${RANKS:+--num_accelerators "$RANKS"} ${LAUNCHER_ARGS:-} launch/train.py "$@"
echo "$*"
supervise "$@"
