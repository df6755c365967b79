#!/usr/bin/env bash
# Installs what tests need beside Python's packages: PostgreSQL, a proxy, Chromium, Node, promtool, the toolchains of the
# clients (Go, C++, Java), and the second compiler of `make includes-check`, clang with libc++. Does nothing where they are
# there already. Exits with 1 where one cannot be installed: the tests say what they lack.
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

alerts() {
  command -v promtool >/dev/null
}

generates() {
  command -v protoc >/dev/null && command -v grpc_cpp_plugin >/dev/null && command -v grpc_java_plugin >/dev/null &&
    command -v protoc-gen-go >/dev/null && command -v protoc-gen-go-grpc >/dev/null
}

speaks_go() {
  command -v go >/dev/null && [[ -d /usr/share/gocode/src/google.golang.org/grpc ]]
}

speaks_cpp() {
  command -v cmake >/dev/null && [[ -f /usr/include/grpcpp/grpcpp.h && -f /usr/include/nlohmann/json.hpp ]]
}

speaks_java() {
  local jar
  for jar in grpc-netty netty-tcnative gson junit-platform-console perfmark-api geronimo-annotation-1.3-spec; do
    [[ -f /usr/share/java/$jar.jar ]] || return 1
  done
  command -v javac >/dev/null && command -v mvn >/dev/null
}

all() {
  compiles && stores && proxies && browses && scripts && alerts && generates && speaks_go && speaks_cpp && speaks_java
}

all && exit
if [[ $(id -u) != 0 ]] || ! command -v apt-get >/dev/null; then
  echo "ci_packages: something of PostgreSQL, nginx, Chromium, Node, promtool and clang with libc++ is missing, and only root on Debian or Ubuntu can install it here" >&2
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
need alerts prometheus
need generates protobuf-compiler protobuf-compiler-grpc protobuf-compiler-grpc-java-plugin protoc-gen-go-1-5 protoc-gen-go-grpc
need speaks_go golang-go golang-google-grpc-dev golang-google-protobuf-dev golang-github-golang-protobuf-1-5-dev \
  golang-google-genproto-dev
need speaks_cpp cmake g++ libgrpc++-dev libprotobuf-dev libssl-dev nlohmann-json3-dev doctest-dev
need speaks_java openjdk-17-jdk-headless libgrpc-java libprotobuf-java libguava-java libnetty-java libnetty-tcnative-java \
  libperfmark-java libgeronimo-annotation-1.3-spec-java libgoogle-gson-java junit5 maven
# the newest that Debian 12 and 13 have; the default of Debian 12 is older than torch's headers allow
compiles || "${install[@]}" clang-19 libc++-19-dev libc++abi-19-dev >/dev/null || "${install[@]}" clang libc++-dev libc++abi-dev >/dev/null
all
