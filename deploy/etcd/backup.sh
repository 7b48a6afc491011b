#!/usr/bin/env bash
# A snapshot of the cluster into DIR, checked; the newest KEEP (24) are kept.
#
#   usage: backup.sh DIR
#
# etcdctl must be able to log in as root; one endpoint is asked, the first of ETCDCTL_ENDPOINTS.
set -euo pipefail
umask 077
[ $# -eq 1 ] || { sed -n 's/^# \{0,1\}//; 4p' "$0" >&2; exit 2; }
[[ ${KEEP:-24} =~ ^[1-9][0-9]{0,8}$ ]] || { echo "KEEP=$KEEP: must be a number, and 1 or more" >&2; exit 2; }
snapshot=$1/$(date -u +%Y%m%dT%H%M%SZ).db
mkdir -p "$1"
trap 'rm -f "$snapshot.part"' EXIT # what is no good does not stay
ETCDCTL_ENDPOINTS=${ETCDCTL_ENDPOINTS%%,*} etcdctl snapshot save "$snapshot.part" >/dev/null
# etcdctl has forgotten `snapshot status` in etcd 3.6.
if command -v etcdutl >/dev/null; then etcdutl snapshot status "$snapshot.part"; else etcdctl snapshot status "$snapshot.part"; fi
mv "$snapshot.part" "$snapshot"
find "$1" -name '*.db' | sort | head -n "-${KEEP:-24}" | xargs -r rm --
echo "$snapshot"
