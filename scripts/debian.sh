# Debian's packages for tests, unpacked and not installed. Sourced by fetch_*.sh: `unpack_debian DIR PACKAGE...`, and
# `private_apt SUITE DIR` for another suite than the machine's own.
#
# Packages that the named ones need, and that this machine lacks, come with them, but for `--alone`. Without package lists (a slim image) a
# private copy is fetched, which needs no root. Says on stderr what is missing.

# What an installation would bring, whatever the release calls it; those that are installed are wanted all the same.
_wanted() {
    if [ "$1" = --alone ]; then
        shift
        printf '%s\n' "$@"
        return
    fi
    { apt-get install --simulate --no-install-recommends "$@" | awk '$1 == "Inst" { print $2 }'; printf '%s\n' "$@"; } | sort -u
}

_download() {
    local directory=$1
    shift
    # shellcheck disable=SC2046  # a list of words
    (cd "$directory" && apt-get download -qq $(_wanted "$@"))
}

unpack_debian() {
    local target=$1 work apt deb
    shift
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "this takes Debian's apt-get and dpkg" >&2; return 1; }
    work=$(mktemp -d)
    apt=$work/apt
    mkdir -p "$work/debs" "$work/root" "$apt/lists/partial" "$apt/cache/archives/partial"
    if ! _download "$work/debs" "$@" 2>/dev/null; then
        printf 'Dir::State::Lists "%s/lists";\nDir::Cache "%s/cache";\n' "$apt" "$apt" >"$apt/apt.conf"
        [ "$(id -u)" != 0 ] || echo 'APT::Sandbox::User "root";' >>"$apt/apt.conf"
        export APT_CONFIG=$apt/apt.conf
        { apt-get update -qq && _download "$work/debs" "$@"; } || { rm -rf "$work"; return 1; }
    fi
    for deb in "$work"/debs/*.deb; do
        dpkg -x "$deb" "$work/root" || { rm -rf "$work"; return 1; }
    done
    mkdir -p "$target"
    cp -a "$work/root/." "$target"
    rm -rf "$work"
}

# "URI KEYRING" of the first Debian archive in the machine's own sources, in either format; the keyring may be empty.
own_mirror() {
    local file
    for file in /etc/apt/sources.list.d/*.sources; do
        [ -f "$file" ] || continue
        awk 'function out() { if (uri != "" && suites !~ /security/ && comps ~ /main/ && !done) { print uri, key; done = 1 }
                              uri = ""; suites = ""; comps = ""; key = "" }
             /^[ \t]*$/ { out() }
             /^URIs:/ { uri = $2 } /^Suites:/ { suites = $0 } /^Components:/ { comps = $0 }
             /^Signed-By:/ && $2 ~ /^\// { key = $2 }
             END { out() }' "$file"
    done | grep -i 'debian' | head -n 1 || true
}
own_mirror_of_list() {
    # deb [signed-by=/path arch=amd64] http://host/debian bookworm main
    cat /etc/apt/sources.list /etc/apt/sources.list.d/*.list 2>/dev/null |
        awk '$1 == "deb" && / main/ && !/security/ && /debian/ {
                 key = ""; if (match($0, /signed-by=[^] ]+/)) key = substr($0, RSTART + 10, RLENGTH - 10)
                 sub(/\[[^]]*\]/, ""); print $2, key; exit }' || true
}

# private_apt SUITE DIR [deb-src]: package lists of that suite, with deb-src of its sources, too. APT_CONFIG=DIR/apt.conf
# then uses them. Needs no root.
private_apt() {
    local suite=$1 apt=$2 mirror keyring
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || return 1
    read -r mirror keyring < <(own_mirror; own_mirror_of_list) || return 1
    [ -n "$mirror" ] || return 1
    : "${keyring:=/usr/share/keyrings/debian-archive-keyring.gpg}"
    mkdir -p "$apt/lists/partial" "$apt/cache/archives/partial" "$apt/sources"
    printf 'Types: deb%s\nURIs: %s\nSuites: %s\nComponents: main\nSigned-By: %s\n' "${3:+ $3}" "$mirror" "$suite" "$keyring" \
        >"$apt/sources/$suite.sources"
    cat >"$apt/apt.conf" <<CONF
Dir::State::Lists "$apt/lists";
Dir::Cache "$apt/cache";
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "$apt/sources";
Acquire::Languages "none";
CONF
    # apt drops root for downloads to a user who cannot write here; only root may say so.
    [ "$(id -u)" != 0 ] || echo 'APT::Sandbox::User "root";' >>"$apt/apt.conf"
    APT_CONFIG=$apt/apt.conf apt-get update -qq
}
