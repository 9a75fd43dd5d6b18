# Sourced by the wrappers beside it. Launchers swallow exit codes: torchrun turns every failure into 1, and the
# deepspeed launcher answers SIGTERM with 143 while its ranks are still saving. A rank writes the true code into
# runs/<run>/outcome.json, and that is what a wrapper returns: 0 done, 2 usage, 3 halted, 4 machine, 75 stopped (resume).

# supervise COMMAND...: run it, pass SIGTERM and SIGINT on to it, return the exit code of its run.
supervise() {
  local marker child code signalled=''
  marker=$(mktemp)
  # Job control, or bash would start the child with SIGINT ignored. It also gives the child a process group of its own,
  # so Ctrl-C at the terminal reaches this shell alone: it is sent to the whole group, as the terminal would.
  set -m
  "$@" &
  child=$!
  set +m
  trap 'signalled=yes; kill -TERM "$child" 2>/dev/null' TERM
  trap 'signalled=yes; kill -INT -- "-$child" 2>/dev/null' INT
  # wait returns early at every signal that is trapped.
  while :; do
    code=0
    wait "$child" || code=$?
    kill -0 "$child" 2>/dev/null || break
  done
  # The launcher may be gone before its ranks have saved and let go of the run: give them OUTCOME_WAIT seconds.
  if [ -n "$signalled" ] || [ "$code" -gt 128 ]; then
    wait_for_ranks "$child" $((SECONDS + ${OUTCOME_WAIT:-60}))
  fi
  code=$(outcome_code "$marker" "$code")
  trap - TERM INT
  rm -f "$marker"
  return "$code"
}

newest_outcome() {
  [ -d runs ] || return 0
  find runs -mindepth 2 -maxdepth 2 -name outcome.json -newer "$1" -printf '%T@ %p\n' | sort -n | tail -n 1 | cut -d ' ' -f 2-
}

# wait_for_ranks GROUP DEADLINE: until no process of the launcher's group runs; zombies that nobody reaps do not count.
wait_for_ranks() {
  while group_runs "$1" && [ "$SECONDS" -lt "$2" ]; do sleep 0.2; done
}

group_runs() {
  local file line state group
  for file in /proc/[0-9]*/stat; do
    { line=$(<"$file"); } 2>/dev/null || continue
    # "pid (name) state parent group ...": the name may hold anything.
    read -r state _ group _ <<<"${line##*) }"
    [ "$group" != "$1" ] || [ "$state" = Z ] || return 0
  done
  return 1
}

# outcome_code MARKER CODE: the code in the outcome written since MARKER was, else CODE.
outcome_code() {
  local file
  file=$(newest_outcome "$1")
  if [ -z "$file" ]; then
    echo "$2"
  else
    python3 -c 'import json, sys; print(int(json.load(open(sys.argv[1]))["exit_code"]))' "$file" 2>/dev/null || echo "$2"
  fi
}
