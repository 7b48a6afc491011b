#!/usr/bin/env bash
# Gives a job a user of its own in etcd, who may read and write the records of that job and nothing else.
#
#   usage: job.sh add JOB       user and role swift-JOB; a client certificate of that name logs in
#          job.sh remove JOB    both are gone
#
# etcdctl must be able to log in as root (ETCDCTL_ENDPOINTS, ETCDCTL_CACERT, ETCDCTL_CERT, ETCDCTL_KEY).
set -euo pipefail
[ $# -eq 2 ] && [[ $2 =~ ^[A-Za-z0-9._-]+$ ]] || { sed -n 's/^# \{0,1\}//; 4,5p' "$0" >&2; exit 2; }
name=swift-$2
case $1 in
add)
    etcdctl role add "$name"
    etcdctl role grant-permission "$name" --prefix=true readwrite "/swift/$2/"
    etcdctl user add "$name" --no-password
    etcdctl user grant-role "$name" "$name"
    ;;
remove)
    etcdctl user delete "$name"
    etcdctl role delete "$name"
    ;;
*) exec "$0" ;;
esac
