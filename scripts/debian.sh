# Debian's packages for tests, unpacked and not installed. Sourced by fetch_*.sh: `unpack_debian DIR PACKAGE...`.
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
