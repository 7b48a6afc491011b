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
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages="slurmctld slurmd slurm-client slurm-wlm-basic-plugins munge libmunge2"

# What an installation would bring, whatever the release calls it; those that are installed are wanted all the same.
wanted() {
    # shellcheck disable=SC2086  # a list of words
    { apt-get install --simulate --no-install-recommends $packages | awk '$1 == "Inst" { print $2 }'; printf '%s\n' $packages; } |
        sort -u
}

download() {
    # shellcheck disable=SC2046
    (cd "$work/debs" && apt-get download -qq $(wanted))
}

fetch() {
    local apt=$work/apt deb name
    set -e # it is called in a subshell of its own
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "this takes Debian's apt-get and dpkg" >&2; return 1; }
    mkdir -p "$work/debs" "$apt/lists/partial" "$apt/cache/archives/partial"
    if ! download 2>/dev/null; then
        # The package lists of a slim image are empty; a private copy needs no root.
        printf 'Dir::State::Lists "%s/lists";\nDir::Cache "%s/cache";\n' "$apt" "$apt" >"$apt/apt.conf"
        [ "$(id -u)" != 0 ] || echo 'APT::Sandbox::User "root";' >>"$apt/apt.conf"
        export APT_CONFIG=$apt/apt.conf
        apt-get update -qq
        download
    fi
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
    # Alternatives, which an installation would choose from.
    for name in slurmctld slurmd slurmstepd; do
        [ -e "$work/root/usr/sbin/$name" ] || ln -s "$name-wlm" "$work/root/usr/sbin/$name"
    done
    cp -a "$work/root/." "$target"
}

(fetch) >&2
echo "$target"
