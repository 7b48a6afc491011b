#!/usr/bin/env bash
# Fetch a Prometheus (and promtool) for tests into DIR without installing anything on the system.
#
#   usage: scripts/fetch_prometheus.sh DIR
#
# Debian's package. Prints DIR; does nothing but print when it is there already.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
mkdir -p "$1"
target=$(realpath "$1")
. "$(dirname "$0")/debian.sh"

[ -x "$target/usr/bin/promtool" ] || unpack_debian "$target" --alone prometheus >&2
echo "$target"
