#!/usr/bin/env bash
# Puts a snapshot in the place of the data of the member on this machine, whose etcd is stopped. Each member has to begin
# with the same snapshot. The data that it had is kept beside it; if the snapshot is no good, it stays where it is.
#
#   usage: restore.sh SNAPSHOT [VARIABLES]
#
# VARIABLES is the file of the member's variables, by default /etc/swift-etcd/member.env.
set -euo pipefail
[ $# -ge 1 ] && [ -r "$1" ] || { sed -n 's/^# \{0,1\}//; 5p' "$0" >&2; exit 2; }
set -a
# shellcheck disable=SC1090
. "${2:-/etc/swift-etcd/member.env}"
set +a
owner=$(stat -c %u:%g "$ETCD_DATA_DIR")
old=$ETCD_DATA_DIR/before-$(date -u +%Y%m%dT%H%M%SZ) new=$ETCD_DATA_DIR/restored db=$ETCD_DATA_DIR/member/snap/db
runs() { echo "etcd runs, or is about to: stop it first: systemctl stop swift-etcd" >&2; exit 1; }
case $(systemctl is-active swift-etcd 2>/dev/null || true) in active | activating | deactivating | reloading) runs ;; esac
# etcd holds a lock on this file, whoever has started it.
[ ! -e "$db" ] || flock --nonblock "$db" true || runs
tool=etcdctl
if command -v etcdutl >/dev/null; then tool=etcdutl; fi
rm -rf "$new"
trap 'rm -rf "$new"' EXIT
# A token of its own: members that were not restored stay out.
$tool snapshot restore "$1" --name "$ETCD_NAME" --data-dir "$new" \
    --initial-cluster "$ETCD_INITIAL_CLUSTER" --initial-advertise-peer-urls "$ETCD_INITIAL_ADVERTISE_PEER_URLS" \
    --initial-cluster-token "$ETCD_INITIAL_CLUSTER_TOKEN-$(sha256sum "$1" | head -c 8)"
chown -R "$owner" "$new"
mkdir "$old"
[ ! -e "$ETCD_DATA_DIR/member" ] || mv "$ETCD_DATA_DIR/member" "$old"
mv "$new/member" "$ETCD_DATA_DIR/member"
chown "$owner" "$old"
