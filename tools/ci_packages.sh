#!/usr/bin/env bash
# Installs PostgreSQL, for the tests of the store, and the second compiler of `make includes-check`: clang with libc++.
# Does nothing where they are there already. Exits with 1 where one cannot be installed: a check that needs no clang++
# survives that, and the tests say what they lack.
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

compiles && stores && exit
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "ci_packages: clang with libc++ or PostgreSQL is missing, and only root on Debian or Ubuntu can install it here" >&2
  exit 1
fi
export DEBIAN_FRONTEND=noninteractive
install=(timeout 300 apt-get install -y -qq --no-install-recommends)
timeout 120 apt-get update -qq || true
stores || "${install[@]}" postgresql >/dev/null || echo "ci_packages: PostgreSQL cannot be installed" >&2
# the newest that Debian 12 and 13 have; the default of Debian 12 is older than torch's headers allow
compiles || "${install[@]}" clang-19 libc++-19-dev libc++abi-19-dev >/dev/null || "${install[@]}" clang libc++-dev libc++abi-dev >/dev/null
compiles && stores
