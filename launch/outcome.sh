# shellcheck shell=bash
# The wrappers beside this file source it, to return a run's true exit code:
#   0 done, 2 usage, 3 halted, 4 machine, 75 stopped (resume)
# Launchers swallow it: torchrun turns every failure into 1, and the deepspeed launcher answers SIGTERM with 143 while its
# ranks still save. So the ranks write the code into the file that HARNESS_EXIT_CODE_FILE names.

# supervise COMMAND...: run the command, pass requests to stop on to it, and return the exit code of its run.
supervise() {
  local codes child code word starting ranks signalled=''
  codes=$(mktemp)

  # Start the launcher in a process group of its own.
  # Without job control, bash would start the child with SIGINT ignored. Job control gives the child a process group of
  # its own, so Ctrl-C at the terminal reaches this shell alone. The trap below sends it to the whole group, as the
  # terminal would.
  set -m
  HARNESS_EXIT_CODE_FILE=$codes "$@" &
  child=$!
  set +m

  # SLURM sends SIGUSR1 as well as SIGTERM, and a launcher would die of SIGUSR1. Under nohup, SIGHUP stays ignored.
  trap 'signalled=yes; kill -TERM "$child" 2>/dev/null' TERM USR1 HUP
  trap 'signalled=yes; kill -INT -- "-$child" 2>/dev/null' INT

  # wait returns early at every trapped signal, so wait again while the child is there.
  while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done

  # The launcher may end before its ranks have saved and released the run: give them OUTCOME_WAIT seconds.
  if [ -n "$signalled" ] || [ "$code" -gt 128 ]; then
    wait_for_ranks "$codes" $((SECONDS + ${OUTCOME_WAIT:-120}))
  fi

  # A line of the file is an exit code; a rank that was still starting adds "starting" and the number of all ranks.
  if [ -s "$codes" ]; then
    read -r word starting ranks <"$codes"
    # A rank that is starting takes every signal for a request to stop, and writes 75. But the launcher also sends a
    # signal when another rank has died, and then the next try may end the same. That is so if nobody asked this wrapper
    # to stop, no signal ended the launcher (its code would be 128 + the signal), and not every rank wrote a line.
    if [ -n "$starting" ] && [ -z "$signalled" ] && { [ "$code" -lt 128 ] || [ "$code" -gt 192 ]; } &&
      [ "$code" -ne 0 ] && [ "$code" -ne "$word" ] && [ "$(wc -l <"$codes")" -lt "$ranks" ]; then
      echo "a rank died while the others started (out of memory?): exit $code, not 75" >&2
    else
      code=$word
    fi
  elif [ -n "$signalled" ]; then
    # Rank 0 writes the file as soon as it trains: so nothing was trained.
    echo 'stopped before training began; the same command starts it again' >&2
    code=75
  fi

  trap - TERM INT USR1 HUP
  rm -f "$codes"
  return "$code"
}

# wait_for_ranks FILE DEADLINE: wait until no process runs that was started to write its exit code into FILE. torchrun's
# ranks have sessions of their own, and outlive it. The shipper of the metrics outlives the ranks; nobody waits for it.
wait_for_ranks() {
  while rank_runs "$1" && [ "$SECONDS" -lt "$2" ]; do sleep 0.2; done
}

rank_runs() {
  local file
  # A zombie has no environment, so it does not count.
  # shellcheck disable=SC2013 # names under /proc have no spaces
  for file in $(grep -lzx "HARNESS_EXIT_CODE_FILE=$1" /proc/[0-9]*/environ 2>/dev/null); do
    grep -qs tracking.shipper "${file%environ}cmdline" || return 0
  done
  return 1
}
