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
. "$(dirname "$0")/debian.sh"

# It looks for its libraries and fonts where an installation would have put them.
write_browser() {
    local libraries
    libraries=$(find "$target/usr/lib" -name '*.so*' -not -path '*/lib/chromium/*' -printf '%h\n' | sort -u | paste -sd: -)
    cat >"$target/fonts.conf" <<END
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "fonts.dtd">
<fontconfig><dir>$target/usr/share/fonts</dir><cachedir prefix="xdg">fontconfig</cachedir></fontconfig>
END
    cat >"$browser.part" <<END
#!/bin/sh
export LD_LIBRARY_PATH="$libraries" FONTCONFIG_FILE="$target/fonts.conf"
exec "$target/usr/lib/chromium/chromium-headless-shell" "\$@"
END
    chmod +x "$browser.part"
    mv "$browser.part" "$browser"
}

fetch() {
    unpack_debian "$target" chromium-headless-shell fonts-dejavu-core fontconfig-config || return 1
    write_browser
}

fetch >&2
echo "$browser"
