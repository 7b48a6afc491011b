#!/usr/bin/env bash
# Certificates, and a file of variables for each member, of an etcd cluster with TLS.
#
#   usage: certificates.sh cluster DIR NAME...    an authority (DIR/ca.key: keep it off the members), and DIR/NAME for
#                                                 each member, to be /etc/swift-etcd on the machine of that name
#          certificates.sh member DIR NAME        a new certificate for one member
#          certificates.sh client DIR NAME        DIR/NAME with the certificate of a client, whom etcd knows as NAME
#
# NAME of a member is the name, or the address, by which all machines find it. CLIENT_PORT (2379) and PEER_PORT (2380) may be set, and
# DAYS (730), for which certificates of members and clients are good; that of the authority is for ten years.
set -euo pipefail
umask 077

usage() { sed -n 's/^# \{0,1\}//; 4,8p' "$0" >&2; exit 2; }
[ $# -ge 2 ] || usage
what=$1 dir=$2
shift 2
[ $# -ge 1 ] || usage
client=${CLIENT_PORT:-2379} peer=${PEER_PORT:-2380} days=${DAYS:-730}
[[ $days =~ ^[1-9][0-9]{0,5}$ ]] || { echo "DAYS=$days: must be a number of days, and 1 or more" >&2; exit 2; }

# What openssl says is of use only if it fails.
log=$(mktemp)
trap 'code=$?; [ "$code" = 0 ] || cat "$log" >&2; rm -f "$log"' EXIT

key() { openssl req -new -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -sha256 "$@" 2>>"$log"; }

# sign KIND NAME FILE EXTENSIONS: FILE.key and FILE.crt in DIR/NAME
sign() {
    [ -r "$dir/ca.key" ] || { echo "$dir has no authority (ca.key): name the directory of certificates.sh cluster" >&2; exit 1; }
    mkdir -p "$dir/$1"
    key -keyout "$dir/$1/$2.key" -subj "/CN=$1" |
        openssl x509 -req -CA "$dir/ca.crt" -CAkey "$dir/ca.key" -set_serial "0x$(openssl rand -hex 16)" -sha256 \
            -days "$days" -extfile <(printf '%s\n' 'basicConstraints=CA:FALSE' "$3") -out "$dir/$1/$2.crt" 2>>"$log"
    cp "$dir/ca.crt" "$dir/$1/ca.crt"
}

# A client that is given an address looks for that among the addresses.
member() {
    local kind=DNS
    if [[ $1 =~ ^[0-9.]+$|: ]]; then kind=IP; fi
    sign "$1" member \
        "$(printf 'extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=%s:%s,DNS:localhost,IP:127.0.0.1' "$kind" "$1")"
}

# In a URL the address of IPv6 is in brackets.
host() { if [[ $1 == *:* ]]; then echo "[$1]"; else echo "$1"; fi; }

variables() {
    local name=$1 all any=0.0.0.0 one
    shift
    if [[ $name == *:* ]]; then any=[::]; fi
    all=$(for one in "$@"; do printf ",%s=https://%s:%s" "$one" "$(host "$one")" "$peer"; done)
    cat <<VARIABLES
ETCD_NAME=$name
ETCD_DATA_DIR=/var/lib/swift-etcd
ETCD_INITIAL_CLUSTER=${all#,}
ETCD_INITIAL_CLUSTER_STATE=new
ETCD_INITIAL_CLUSTER_TOKEN=swift-$(openssl x509 -in "$dir/ca.crt" -noout -fingerprint -sha256 | tr -d : | tail -c 9)
ETCD_LISTEN_CLIENT_URLS=https://$any:$client
ETCD_ADVERTISE_CLIENT_URLS=https://$(host "$name"):$client
ETCD_LISTEN_PEER_URLS=https://$any:$peer
ETCD_INITIAL_ADVERTISE_PEER_URLS=https://$(host "$name"):$peer
ETCD_CLIENT_CERT_AUTH=true
ETCD_TRUSTED_CA_FILE=/etc/swift-etcd/ca.crt
ETCD_CERT_FILE=/etc/swift-etcd/member.crt
ETCD_KEY_FILE=/etc/swift-etcd/member.key
ETCD_PEER_CLIENT_CERT_AUTH=true
ETCD_PEER_TRUSTED_CA_FILE=/etc/swift-etcd/ca.crt
ETCD_PEER_CERT_FILE=/etc/swift-etcd/member.crt
ETCD_PEER_KEY_FILE=/etc/swift-etcd/member.key
ETCD_AUTO_COMPACTION_MODE=periodic
ETCD_AUTO_COMPACTION_RETENTION=1h
ETCD_QUOTA_BACKEND_BYTES=2147483648
ETCD_LOG_LEVEL=warn
VARIABLES
}

case $what in
cluster)
    [ ! -e "$dir/ca.key" ] || { echo "$dir has an authority already: take another directory" >&2; exit 1; }
    mkdir -p "$dir"
    key -x509 -keyout "$dir/ca.key" -out "$dir/ca.crt" -days 3650 -subj "/CN=swift-etcd" >/dev/null
    for name in "$@"; do
        member "$name"
        variables "$name" "$@" >"$dir/$name/member.env"
    done
    ;;
member) member "$1" ;;
client) sign "$1" client 'extendedKeyUsage=clientAuth' ;;
*) usage ;;
esac
