#!/bin/sh
# The publishing rehearsal: puts the jars and the pom into a Maven repository as `mvn deploy` lays it out, and compiles
# and loads a consumer that has only what is in there, and what the pom names.
set -eu
version=$1 build=$2 needs=$3
repository=$build/repository
folder=$repository/io/github/omni-grpc/omni-grpc-client/$version
rm -rf "$repository" "$build/consumer"
mkdir -p "$folder" "$build/consumer"
name=omni-grpc-client-$version
cp "$build/$name.jar" "$build/$name-sources.jar" "$build/$name-javadoc.jar" "$folder"
cp pom.xml "$folder/$name.pom"
(cd "$folder" && for file in *; do sha256sum "$file" > "$file.sha256"; done && sha256sum --quiet -c ./*.sha256)
grep -q "<version>$version</version>" pom.xml
if jar --list --file "$folder/$name.jar" | grep -q '^com/google/'; then
    echo "the jar has classes of proto-google-common-protos, which its users get from there" >&2
    exit 1
fi
javac --release 11 -Xlint:all,-options,-classfile,-path -Werror -cp "$folder/$name.jar:$needs" -d "$build/consumer" \
    examples/Generate.java
# where nobody is: the client must load, and refuse with its own error (exit code 1)
code=0
java -cp "$build/consumer:$folder/$name.jar:$needs" Generate localhost:1 "a red circle" out.png 2> "$build/said" || code=$?
if [ "$code" != 1 ] || ! grep -q '^UNAVAILABLE SERVER_UNREACHABLE: ' "$build/said"; then
    cat "$build/said" >&2
    exit 1
fi
