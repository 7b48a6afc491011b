#!/usr/bin/env bash
# Fetch a headless Chromium for tests into DIR without installing anything on the system.
#
#   usage: scripts/fetch_chromium.sh DIR
#
# Debian's packages, with those that they need and the machine lacks, and a font. Prints the path of the browser; does
# nothing but print when it is there already.
set -euo pipefail

if [ $# -ne 1 ] || [ "${1#-}" != "$1" ]; then
    echo "usage: $0 DIR" >&2
    exit 2
fi
mkdir -p "$1"
target=$(realpath "$1")
browser=$target/headless-chromium
if [ -x "$browser" ]; then
    echo "$browser"
    exit 0
fi
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
packages="chromium-headless-shell fonts-dejavu-core fontconfig-config"

# What an installation would bring; those that are installed are wanted all the same.
wanted() {
    # shellcheck disable=SC2086  # a list of words
    { apt-get install --simulate --no-install-recommends $packages | awk '$1 == "Inst" { print $2 }'; printf '%s\n' $packages; } |
        sort -u
}

download() {
    # shellcheck disable=SC2046
    (cd "$work/debs" && apt-get download -qq $(wanted))
}

# It looks for its libraries and fonts where an installation would have put them.
write_browser() {
    local libraries
    cat >"$work/fonts.conf" <<END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>$target/usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
END
    cp "$work/fonts.conf" "$target/fonts.conf"
    libraries=$(find "$target/usr/lib" -name '*.so*' -not -path '*/lib/chromium/*' -printf '%h\n' | sort -u | paste -sd: -)
    cat >"$work/browser" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$libraries" FONTCONFIG_FILE="$target/fonts.conf"
exec "$target/usr/lib/chromium/chromium-headless-shell" "\$@"
END
    chmod +x "$work/browser"
    mv "$work/browser" "$browser"
}

fetch() {
    local apt=$work/apt deb
    set -e # it is called in a subshell of its own
    command -v apt-get >/dev/null && command -v dpkg >/dev/null || { echo "this takes Debian's apt-get and dpkg" >&2; return 1; }
    mkdir -p "$work/debs" "$apt/lists/partial" "$apt/cache/archives/partial"
    if ! download 2>/dev/null; then
        # The package lists of a slim image are empty; a private copy needs no root.
        printf 'Dir::State::Lists "%s/lists";\nDir::Cache "%s/cache";\n' "$apt" "$apt" >"$apt/apt.conf"
        [ "$(id -u)" != 0 ] || echo 'APT::Sandbox::User "root";' >>"$apt/apt.conf"
        export APT_CONFIG=$apt/apt.conf
        apt-get update -qq
        download
    fi
    for deb in "$work"/debs/*.deb; do dpkg -x "$deb" "$work/root"; done
    cp -a "$work/root/." "$target"
    write_browser
}

(fetch) >&2
echo "$browser"
