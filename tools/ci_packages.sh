#!/usr/bin/env bash
# Installs what tests need beside Python's packages: PostgreSQL, a proxy, Chromium, Node, and the second compiler of
# `make includes-check`, clang with libc++. Does nothing where they are there already. Exits with 1 where one cannot be
# installed: the tests say what they lack.
set -euo pipefail

compiles() {
  for compiler in clang++ clang++-19; do
    # libc++ 16 and newer have this header; older ones do not compile torch's
    echo '#include <source_location>' | "$compiler" -std=c++20 -stdlib=libc++ -x c++ -fsyntax-only - 2>/dev/null && return
  done
  return 1
}

stores() {
  command -v pg_ctl >/dev/null || compgen -G '/usr/lib/postgresql/*/bin/pg_ctl' >/dev/null
}

proxies() {
  command -v nginx >/dev/null || [[ -x /usr/sbin/nginx ]]
}

browses() {
  command -v chromium >/dev/null
}

scripts() {
  command -v npm >/dev/null
}

all() {
  compiles && stores && proxies && browses && scripts
}

all && exit
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "ci_packages: something of PostgreSQL, nginx, Chromium, Node and clang with libc++ is missing, and only root on Debian or Ubuntu can install it here" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
install=(timeout 600 apt-get install -y -qq --no-install-recommends)
timeout 120 apt-get update -qq || true
need() {
  local has=$1
  shift
  "$has" || "${install[@]}" "$@" >/dev/null || echo "ci_packages: $* cannot be installed" >&2
}
need stores postgresql
need proxies nginx-light
need browses chromium fonts-liberation
need scripts nodejs npm
# the newest that Debian 12 and 13 have; the default of Debian 12 is older than torch's headers allow
compiles || "${install[@]}" clang-19 libc++-19-dev libc++abi-19-dev >/dev/null || "${install[@]}" clang libc++-dev libc++abi-dev >/dev/null
all
