# Sourced by the wrappers beside it. Launchers swallow exit codes: torchrun turns every failure into 1, and the
# deepspeed launcher answers SIGTERM with 143 while its ranks are still saving. The ranks write the true code into the
# file that HARNESS_EXIT_CODE_FILE names, and that is what a wrapper returns: 0 done, 2 usage, 3 halted, 4 machine,
# 75 stopped (resume).

# supervise COMMAND...: run it, pass requests to stop on to it, return the exit code of its run.
supervise() {
  local told child code word starting ranks signalled=''
  told=$(mktemp)
  # Job control, or bash would start the child with SIGINT ignored. It also gives the child a process group of its own,
  # so Ctrl-C at the terminal reaches this shell alone: it is sent to the whole group, as the terminal would.
  set -m
  HARNESS_EXIT_CODE_FILE=$told "$@" &
  child=$!
  set +m
  # Launchers die of SIGUSR1; SLURM sends it as often as SIGTERM. A hang-up is ignored here if nohup ignores it.
  trap 'signalled=yes; kill -TERM "$child" 2>/dev/null' TERM USR1 HUP
  trap 'signalled=yes; kill -INT -- "-$child" 2>/dev/null' INT
  # wait returns early at every signal that is trapped.
  while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  # The launcher may be gone before its ranks have saved and let go of the run: give them OUTCOME_WAIT seconds.
  if [ -n "$signalled" ] || [ "$code" -gt 128 ]; then
    wait_for_ranks "$told" $((SECONDS + ${OUTCOME_WAIT:-120}))
  fi
  if [ -s "$told" ]; then
    read -r word starting ranks <"$told"
    # A rank that starts takes every signal for a request to stop. If nobody asked this wrapper, no signal ended the
    # launcher (128 + its number), and not every rank has a line here, the launcher sent it because another rank had
    # died: the next try may end the same.
    if [ -n "$starting" ] && [ -z "$signalled" ] && { [ "$code" -lt 128 ] || [ "$code" -gt 192 ]; } &&
      [ "$code" -ne 0 ] && [ "$code" -ne "$word" ] && [ "$(wc -l <"$told")" -lt "$ranks" ]; then
      echo "a rank died while the others started (out of memory?): exit $code, not 75" >&2
    else
      code=$word
    fi
  elif [ -n "$signalled" ]; then
    # Rank 0 leaves a word as soon as it trains.
    echo 'stopped before training began; the same command starts it again' >&2
    code=75
  fi
  trap - TERM INT USR1 HUP
  rm -f "$told"
  return "$code"
}

# wait_for_ranks FILE DEADLINE: until no process runs that was started to write its exit code into FILE. torchrun's ranks
# are in sessions of their own and outlive it; the shipper of the metrics outlives the ranks, and needs no waiting for.
wait_for_ranks() {
  while rank_runs "$1" && [ "$SECONDS" -lt "$2" ]; do sleep 0.2; done
}

rank_runs() {
  local file
  # Zombies have no environment.
  for file in $(grep -lzx "HARNESS_EXIT_CODE_FILE=$1" /proc/[0-9]*/environ 2>/dev/null); do
    grep -qs tracking.shipper "${file%environ}cmdline" || return 0
  done
  return 1
}
