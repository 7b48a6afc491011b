# shellcheck shell=bash
# For the scripts beside this file: other suites of the Debian archive that this machine already uses.

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
