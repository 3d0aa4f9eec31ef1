#!/bin/sh
# Starts, lists and stops the workers of this folder (run 20250104-102510-f741, node here), one a slot.
#   sh launch.sh [start|list|stop|kill] [SLOT...]
# `start` is safe to repeat. Lines `NAME=VALUE` on its standard input become the workers' environment.
set -u
umask 077
cd -- "$(dirname -- "$0")" || exit 1
verb="${1:-start}"
[ $# -gt 0 ] && shift
[ $# -gt 0 ] || set -- 0
mkdir -p supervisor logs

# Holds supervisor/SLOT.lock while it lives; restarts a worker that dies, 5 times in a row at most.
supervise() {
    exec 9>"supervisor/$1.lock"
    flock -w 2 9 || exit 0
    echo "$$" >"supervisor/$1.pid"
    # on SIGTERM it waits for its worker to close the books
    trap 'stopping=1' TERM
    stopping=0
    failures=0
    while :; do
        began=$(date +%s)
        sh ./tune.sh agent --slot "$1" 9>&-
        code=$?
        [ "$code" -eq 0 ] || [ "$stopping" -eq 1 ] && break
        [ $(($(date +%s) - began)) -ge 10 ] && failures=0
        failures=$((failures + 1))
        echo "[launch] the worker of slot $1 ended with code $code (failure $failures)"
        [ "$failures" -gt 5 ] && break
        sleep 0.5
    done
    echo "$code" >"supervisor/$1.code"
}

held() { [ -e "$1" ] && ! flock -n -s "$1" true; }

# a worker may outlive a supervisor that was killed
running() { held "supervisor/$1.lock" || held "claimed/$1/lock"; }

# Within a lease its holder runs the workers (lease.sh.j2), so that they end with it.
lease=
for above in .. ../.. ../../..; do [ -p "$above/holder" ] && lease=$above; done

# Hand slots of this folder over to the holder, with lines NAME=VALUE from standard input: by a pipe, they are in no file.
hand_over() {
    [ -n "${environment+read}" ] || [ -t 0 ] || environment=$(grep '^[A-Za-z_][A-Za-z0-9_]*=')
    (
        flock -w 60 9 && ! flock -n "$lease/ready" true || exit
        : >"$lease/request"
        printf '%s\n' '' request "$(pwd -P)" "$*" _= \
            "${environment:-_=}" '' 1<>"$lease/holder"
        kill -s USR1 "$(cat "$lease/ready")" 2>/dev/null
        looks=0
        while [ -e "$lease/request" ] && [ "$looks" -lt 300 ]; do
            looks=$((looks + 1))
            sleep 0.05
        done
        ! [ -e "$lease/request" ]
    ) 9>"$lease/lock" && return
    echo "launch.sh: the holder of this lease does not answer" >&2
    exit 1
}

case "$verb" in
start)
    for slot in "$@"; do
        shift
        running "$slot" && continue
        rm -f "supervisor/$slot.code"
        set -- "$@" "$slot"
    done
    if [ -n "$lease" ]; then
        [ $# -eq 0 ] || hand_over "$@"
    elif [ ! -t 0 ]; then
        while IFS= read -r line; do
            case "$line" in [A-Za-z_]*=*) export "${line?}" ;; esac
        done
    fi
    for slot in "$@"; do
        [ -n "$lease" ] || setsid sh ./launch.sh supervise "$slot" </dev/null >>"logs/$slot.log" 2>&1 &
    done
    looks=0
    for slot in "$@"; do
        # whoever looks next has to see it, other runs by the lock of its device: the worker takes it with its own
        until held "claimed/$slot/lock" || [ -e "supervisor/$slot.code" ] || [ "$looks" -ge 100 ]; do
            looks=$((looks + 1))
            sleep 0.05
        done
    done
    ;;
supervise) supervise "$1" ;;
list)
    for slot in "$@"; do
        if running "$slot"; then
            echo "$slot running"
        elif [ -e "supervisor/$slot.code" ]; then
            echo "$slot ended $(cat "supervisor/$slot.code")"
        else
            echo "$slot absent"
        fi
    done
    ;;
stop | kill)
    # TERM lets a worker close its books; its tuner dies with it
    signal=TERM
    [ "$verb" = kill ] && signal=KILL
    for slot in "$@"; do
        held "supervisor/$slot.lock" && kill -s "$signal" -- "-$(cat "supervisor/$slot.pid")"
        held "claimed/$slot/lock" && kill -s "$signal" "$(cat "claimed/$slot/lock")"
    done
    exit 0
    ;;
*)
    echo "usage: sh launch.sh [start|list|stop|kill] [SLOT...]" >&2
    exit 2
    ;;
esac
