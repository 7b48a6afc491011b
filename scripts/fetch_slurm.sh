#!/usr/bin/env bash
# Fetch a Slurm (and munge) for tests into DIR without installing anything on the system.
#
#   usage: scripts/fetch_slurm.sh DIR
#
# Debian's packages, with those that they need and the machine lacks. Prints DIR; does nothing but print when they are
# there already.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
mkdir -p "$1"
target=$(realpath "$1")
if [ -x "$target/usr/sbin/slurmctld" ]; then
    echo "$target"
    exit 0
fi
. "$(dirname "$0")/debian.sh"

fetch() {
    local name
    unpack_debian "$target" slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2 || return 1
    # Alternatives, which an installation would choose from.
    for name in slurmctld slurmd slurmstepd; do
        [ -e "$target/usr/sbin/$name" ] || ln -s "$name-wlm" "$target/usr/sbin/$name"
    done
}

fetch >&2
echo "$target"
