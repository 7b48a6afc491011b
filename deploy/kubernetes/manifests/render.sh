#!/usr/bin/env bash
# Render the plain manifests from the chart, into DIR (by default: beside this file).
#
#   usage: deploy/kubernetes/manifests/render.sh [DIR]
set -euo pipefail

here=$(realpath "$(dirname "$0")")
out=$(realpath "${1:-$here}")

# render FILE KIND TEMPLATE...: only these templates.
render() {
    local file=$1 kind=$2 only=()
    shift 2
    for name in "$@"; do only+=(--show-only "templates/$name.yaml"); done
    {
        echo "# Made by render.sh from the chart and values.yaml; for the namespace training, with images of your own."
        helm template train "$here/../swift-agent" --namespace training --values "$here/values.yaml" --set "kind=$kind" \
            "${only[@]}" | sed '/^# Source: /d'
    } >"$out/$file"
}

render common.yaml Job rbac networkpolicy pdb
render etcd.yaml Job etcd
render job.yaml Job job
render jobset.yaml JobSet jobset
render cluster-training-runtime.yaml ClusterTrainingRuntime runtime networkpolicy
