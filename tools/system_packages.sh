#!/bin/sh
# The few things that pip can't install: Debian packages, put in only where they are missing and we are root.
set -eu
missing=""
python3 -c 'import ensurepip' 2>/dev/null || missing="$missing python3-venv"
command -v git >/dev/null || missing="$missing git"
command -v tesseract >/dev/null || missing="$missing tesseract-ocr"
command -v redis-server >/dev/null || missing="$missing redis-server"
command -v prometheus >/dev/null || missing="$missing prometheus"
command -v chromium >/dev/null || missing="$missing chromium"
[ -z "$missing" ] && exit 0
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "missing:$missing; install them to have everything (Debian: apt-get install$missing)" >&2
    exit 0
fi
apt-get update -qq
# Recommended packages would bring Chromium a desktop's worth of others.
# shellcheck disable=SC2086 # a list of words on purpose
DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
# Debian starts a Prometheus of its own on port 9090; only the program is wanted.
case "$missing" in *prometheus*) systemctl disable --now prometheus >/dev/null 2>&1 || true ;; esac
