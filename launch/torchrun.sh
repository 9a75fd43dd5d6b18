#!/usr/bin/env bash
# torchrun launch/train.py ARGS..., returning the run's true exit code. It trains under DDP; engine.name=fsdp shards the model.
# Environment:
#   RANKS          default: every GPU, or 1 on a CPU
#   LAUNCHER_ARGS  default: one machine. On several, start it on each of them with
#                  "--nnodes 2 --node_rank 0 --master_addr HOST --master_port 29500" (node_rank 1 on the second machine).
#                  All must see one folder runs/.
#   OUTCOME_WAIT   seconds that ranks have to finish a step and save when asked to stop; default: 120
# It prints the command, which can be used alone.
set -uo pipefail
cd "$(dirname "$0")/.." || exit
. launch/outcome.sh

command -v torchrun >/dev/null || {
  # shellcheck disable=SC2016 # for the reader's shell to expand
  echo 'no torchrun on PATH: make setup, then export PATH="$PWD/.venv/bin:$PATH"' >&2
  exit 4
}
ranks=${RANKS:-$(python -c 'import torch; print(max(1, torch.cuda.device_count()))')}
# torchrun would kill ranks after 30 s, while they still save. A rank that hangs is killed later, too.
export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=${TORCH_ELASTIC_SHUTDOWN_TIMEOUT:-${OUTCOME_WAIT:-120}}
# On one machine no port is open to others: the agent's rendezvous is a file, and rank 0 hosts the ranks' on loopback.
# torchrun --standalone would open two ports on every interface.
if [ -z "${LAUNCHER_ARGS:-}" ]; then
  rendezvous=$(mktemp)
  trap 'rm -f "$rendezvous"' EXIT
  export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
  LAUNCHER_ARGS="--rdzv_backend c10d --rdzv_conf store_type=file --rdzv_endpoint $rendezvous --local_addr 127.0.0.1"
fi
# The -- keeps torchrun from taking our options for abbreviations of its own.
# shellcheck disable=SC2086 # LAUNCHER_ARGS is a list of words
set -- torchrun ${LAUNCHER_ARGS} --nproc_per_node "$ranks" -- launch/train.py "$@"
echo "$*"
supervise "$@"
