#!/usr/bin/env bash
# Build libhdfs.so, the C interface of Hadoop's own client, for tests into DIR. Needs a C compiler and a JDK.
#
#   usage: scripts/build_libhdfs.sh DIR
#
# Its sources (Apache-2.0) are in Apache's tarball of 700 MB, and, as of Hadoop 3.2, in the source package of pydoop,
# 0.7 MB. Prints DIR/libhdfs.so; does nothing but print when it is there already.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
mkdir -p "$1"
target=$(realpath "$1")
if [ -s "$target/libhdfs.so" ]; then
    echo "$target/libhdfs.so"
    exit 0
fi
checksum=c7eb2ad8c36d2a75dc1c6cee701928334614f2e862a70798b0cb278e3102f77d
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

java=$(command -v java) || { echo "no java" >&2; exit 1; }
home=$(dirname "$(dirname "$(readlink -f "$java")")")
[ -e "$home/include/jni.h" ] || { echo "no $home/include/jni.h: a JDK is needed" >&2; exit 1; }
# pip asks its setup.py for metadata, which needs a module that newer versions of setuptools lack.
echo "setuptools<81" >"$work/build.txt"
PIP_CONSTRAINT="$work/build.txt" PIP_BUILD_CONSTRAINT="$work/build.txt" python3 -m pip download --quiet \
    --disable-pip-version-check --no-deps --no-binary :all: --dest "$work" pydoop==2.0.0
echo "$checksum  $work/pydoop-2.0.0.tar.gz" | sha256sum --check --quiet
tar -xzf "$work/pydoop-2.0.0.tar.gz" -C "$work"
cd "$work/pydoop-2.0.0/src/libhdfs"
cc -shared -fPIC -O2 -w -I. -Iinclude -Iinclude/hdfs -Icommon -Ios -Ios/posix -I"$home/include" -I"$home/include/linux" \
    -o "$work/libhdfs.so" hdfs.c jni_helper.c exception.c common/htable.c os/posix/mutexes.c \
    os/posix/thread_local_storage.c -L"$home/lib/server" -ljvm "-Wl,-rpath,$home/lib/server" -lpthread
mv "$work/libhdfs.so" "$target/libhdfs.so"
echo "$target/libhdfs.so"
