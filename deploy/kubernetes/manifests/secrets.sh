#!/usr/bin/env bash
# Make what the plain manifests mount: the job's secret, and certificates of etcd's servers and clients.
#
#   usage: deploy/kubernetes/manifests/secrets.sh NAMESPACE | kubectl apply -f -
#
# Prints three Secrets. Each run makes new ones: run it once, before the job. A ClusterTrainingRuntime needs the secrets
# train-job-secret and train-etcd-client in each namespace that has TrainJobs.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 NAMESPACE | kubectl apply -f -" >&2
    exit 2
fi
umask 077
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
cd "$work"

names=DNS:localhost
for number in 0 1 2; do names+=",DNS:train-etcd-$number.train-etcd.$1.svc"; done
new="openssl req -newkey rsa:2048 -nodes -sha256"
{
    $new -x509 -days 3650 -keyout ca.key -out ca.crt -subj /CN=train-etcd-ca
    $new -keyout server.key -out server.csr -subj /CN=train-etcd
    $new -keyout client.key -out client.csr -subj /CN=train
    printf 'extendedKeyUsage=serverAuth,clientAuth\nsubjectAltName=%s' "$names" >server.ext
    echo extendedKeyUsage=clientAuth >client.ext
    for who in server client; do
        openssl x509 -req -in $who.csr -CA ca.crt -CAkey ca.key -CAcreateserial -days 3650 -sha256 -out $who.crt \
            -extfile $who.ext
    done
    openssl rand -base64 32 | tr -d '\n' >job-secret
} 2>log || { cat log >&2; exit 1; }

for who in server client; do
    printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: train-etcd-%s, namespace: %s}\ntype: kubernetes.io/tls\n' $who "$1"
    printf 'data:\n  ca.crt: %s\n  tls.crt: %s\n  tls.key: %s\n' "$(base64 -w0 ca.crt)" "$(base64 -w0 $who.crt)" \
        "$(base64 -w0 $who.key)"
done
printf -- '---\napiVersion: v1\nkind: Secret\nmetadata: {name: train-job-secret, namespace: %s}\ndata:\n  job-secret: %s\n' "$1" \
    "$(base64 -w0 job-secret)"
