#!/bin/sh
# The worker's entry on a node: finds Python, cleans the environment, runs the worker of this folder.
#   sh tune.sh agent --slot SLOT     drain the inbox (what launch.sh does)
#   sh tune.sh GROUP.json            run one group to the end, by hand
#   sh tune.sh follow|probe|canary   see python -m worker --help
set -u
umask 077
caller=$PWD
cd -- "$(dirname -- "$0")" || exit 1

# Clear tuning switches that the image sets, because they would change the measurement: AITER, for example, takes the
# last entry of GPU_ARCHS as the chip. Switches that the inventory sets are the user's own choice and stay.
export GEMMFLEET_INVENTORY_ENV=''
for name in $(env | sed -n 's/^\(AITER_[A-Za-z0-9_]*\)=.*/\1/p; s/^\(TUNE_MOE_[A-Z_]*\)=.*/\1/p; s/^\(HIP_ONLINE_TUNING\)=.*/\1/p; s/^\(GPU_ARCHS\)=.*/\1/p; s/^\(CU_NUM\)=.*/\1/p; s/^\(PYTORCH_TUNABLEOP_[A-Z_]*\)=.*/\1/p'); do
    case " $GEMMFLEET_INVENTORY_ENV " in *" $name "*) continue ;; esac
    case "$name" in
    GPU_ARCHS) word="$name=$(printf %s "$GPU_ARCHS" | tr -d '[:space:]')" ;;
    CU_NUM) word="$name=$(printf %s "$CU_NUM" | tr -d '[:space:]')" ;;
    *) word=$name ;;
    esac
    unset "$name"
    cleared="${cleared:-}${cleared:+ }$word"
done
export GEMMFLEET_CLEARED_ENV="${cleared:-}"
export PYTHONPATH=code/087a3c24d462dc16 PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1

good() { "$1" -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] < (3, 14))' 2>/dev/null; }
for python in @PYTHON@ python3 python3.13 python3.12 python3.11 python3.10 python; do
    [ -n "$python" ] && good "$python" && break
    python=
done
if [ -z "$python" ]; then
    echo "tune.sh: no Python 3.10 to 3.13 found (set \`python:\` of this node in the inventory)" >&2
    exit 3
fi

verb="${1:?usage: sh tune.sh agent --slot SLOT | GROUP.json | follow | probe | canary}"
shift
case "$verb" in
agent) exec "$python" -m worker agent --node-dir . "$@" ;;
*.json)
    case "$verb" in /*) ;; *) verb="$caller/$verb" ;; esac
    exec "$python" -m worker run "$verb" --node-dir . "$@"
    ;;
follow) exec "$python" -m worker follow --node-dir . "$@" ;;
*) exec "$python" -m worker "$verb" "$@" ;;
esac
