#!/usr/bin/env bash
# Build the image of deploy/docker/Dockerfile without a daemon and without a registry, on Debian, as root.
#
#   usage: scripts/build_image.sh DIR [BUILD-ARG...]      e.g. scripts/build_image.sh .cache/image EXTRAS=etcd,s3
#
# buildah and mmdebstrap are Debian's, unpacked into DIR; the base image is made of this machine's own release, from the
# mirror that it uses. pip is configured as here, by a file that is in no layer. Prints the directory of the finished
# file system, DIR/rootfs; DIR/size has its size in bytes. Layers are kept in DIR/storage.
set -euo pipefail

if [ $# -lt 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 DIR [BUILD-ARG...]" >&2
    exit 2
fi
repository=$(realpath "$(dirname "$0")/..")
mkdir -p "$1"
target=$(realpath "$1")
shift
tools=$target/tools
say() { echo "build_image: $*" >&2; }

if ! buildah --version >/dev/null 2>&1 || ! command -v mmdebstrap >/dev/null; then
    mkdir -p "$target/debs" "$tools"
    [ -x "$tools/usr/bin/buildah" ] || (cd "$target/debs" && apt-get download -qq uidmap libsubid4 libgpgme11 golang-github-containers-image \
        golang-github-containers-common crun buildah mmdebstrap)
    for deb in "$target"/debs/*.deb; do dpkg -x "$deb" "$tools"; done
    # They look as if they were installed, to this script only.
    # shellcheck disable=SC2016
    exec unshare --mount --propagation private bash -c \
        'mount -t overlay tools -o "lowerdir=$1/usr:/usr" /usr && exec "$2" "${@:3}"' - \
        "$tools" "$repository/scripts/build_image.sh" "$target" "$@"
fi

# Everything below DIR: nothing of this machine's own images is touched.
printf '{"default": [{"type": "insecureAcceptAnything"}]}\n' >"$target/policy.json"
printf 'unqualified-search-registries = []\n' >"$target/registries.conf"
printf '[storage]\ndriver = "vfs"\nrunroot = "%s/run"\ngraphroot = "%s/storage"\n' "$target" "$target" >"$target/storage.conf"
export CONTAINERS_STORAGE_CONF=$target/storage.conf CONTAINERS_REGISTRIES_CONF=$target/registries.conf TMPDIR=$target/tmp
mkdir -p "$TMPDIR"
policy=(--signature-policy "$target/policy.json")

if ! buildah images -q localhost/base >/dev/null 2>&1; then
    say "the base image, of $(. /etc/os-release && echo "$PRETTY_NAME")"
    # shellcheck disable=SC1091
    mmdebstrap --mode=root --variant=minbase --quiet --include=ca-certificates "$(. /etc/os-release && echo "$VERSION_CODENAME")" \
        "$target/base.tar" /etc/apt/sources.list.d/debian.sources
    base=$(buildah from scratch)
    buildah add --quiet "$base" "$target/base.tar" / >/dev/null
    buildah commit "${policy[@]}" --quiet "$base" localhost/base >/dev/null
    buildah rm "$base" >/dev/null
    rm "$target/base.tar"
fi

# Where pip finds packages here: its settings, and the directories that they name.
umask 077
python3 -m pip config list | sed -n "s/^[^.]*\.\([a-z-]*\)='\(.*\)'$/\1 = \2/p" | sort -u -t= -k1,1 |
    { echo "[global]"; cat; } >"$target/pip.conf"
umask 022
volumes=()
for path in /etc/ssl/certs /usr/local/share/ca-certificates \
    $(grep -oE '(^|[ =]|file://)/[^ ]+' "$target/pip.conf" | grep -oE '/[^/:].*' | sed 's#/simple/*$##' | sort -u); do
    [ ! -d "$path" ] || volumes+=(--volume "$path:$path:ro") # an index of files has them beside it
done
arguments=()
for one in "$@"; do arguments+=(--build-arg "$one"); done

say "the image"
buildah build "${policy[@]}" --isolation chroot --quiet --pull-never --layers \
    --file "$repository/deploy/docker/Dockerfile" --build-arg BASE=localhost/base --secret "id=pip.conf,src=$target/pip.conf" \
    "${volumes[@]}" "${arguments[@]}" --tag localhost/swift-agent "$repository" >&2
rm -f "$target/pip.conf"
box=$(buildah from "${policy[@]}" --pull-never localhost/swift-agent)
mounted=$(buildah mount "$box")
rm -rf "$target/rootfs"
cp -a "$mounted" "$target/rootfs"
buildah inspect --type image localhost/swift-agent >"$target/image.json"
buildah umount "$box" >/dev/null
buildah rm "$box" >/dev/null
du -sb "$target/rootfs" | cut -f1 >"$target/size"
echo "$target/rootfs"
