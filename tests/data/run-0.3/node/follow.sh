#!/bin/sh
# Streams events and logs of all slots of this folder (run 20250104-102510-f741, node here) to standard output.
#   sh follow.sh [--from JSON]     see worker/protocol/records.py for the frames
cd -- "$(dirname -- "$0")" || exit 1
exec sh ./tune.sh follow "$@"
