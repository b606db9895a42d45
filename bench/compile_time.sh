#!/usr/bin/env bash
# What `#include <tutti/tutti.hpp>` costs at -O0: the median time of a translation unit that holds nothing else, against
# one with fmt and the standard headers that the umbrella reaches, which a user's file has anyway. The two are compiled
# in turn, so that a change of the machine's speed meets both; processor time, so that other work does not count.
# Bar: 1 s more.
set -euo pipefail
cd "$(dirname "$(readlink -f "$0")")/.."
export LC_ALL=C
rounds=9
compiler=${CXX:-g++}
TIMEFORMAT='%U %S'
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# All headers of tutti that the umbrella reaches, then the headers of others that those include.
includes() { sed -nE 's/^[[:space:]]*#[[:space:]]*include[[:space:]]*<([^>]+)>.*/\1/p' "$@"; }
reached=() queue=(tutti/tutti.hpp)
declare -A seen=()
while ((${#queue[@]})); do
    header=${queue[0]}
    queue=("${queue[@]:1}")
    [[ -z ${seen[$header]:-} ]] || continue
    seen[$header]=1
    reached+=("include/$header")
    mapfile -t -O "${#queue[@]}" queue < <(includes "include/$header" | grep '^tutti/' || true)
done
includes "${reached[@]}" | grep -v '^tutti/' | sort -u | sed 's/.*/#include <&>/' >"$work/base.cpp"
echo '#include <tutti/tutti.hpp>' >"$work/umbrella.cpp"

compile() { "$compiler" -std=c++20 -O0 -Iinclude -c "$work/$1.cpp" -o "$work/$1.o"; }
milliseconds() {  # of processor time for one compilation
    { time compile "$1"; } 2>"$work/time"
    awk '{ printf "%d\n", ($1 + $2) * 1000 }' "$work/time"
}
median() { sort -n "$1" | sed -n "$(((rounds + 1) / 2))p"; }

compile base  # once each for the caches, and to stop here if one does not compile
compile umbrella
for ((i = 0; i < rounds; ++i)); do
    milliseconds base >>"$work/base.ms"
    milliseconds umbrella >>"$work/umbrella.ms"
done
base=$(median "$work/base.ms") umbrella=$(median "$work/umbrella.ms")
verdict="within the bar of 1000 ms"
((umbrella - base <= 1000)) || verdict="OVER the bar of 1000 ms"
printf 'compile-time (%s, -O0, processor time, median of %d)\n' "$("$compiler" --version | head -n 1)" "$rounds"
printf '  %-58s %6d ms\n' "fmt and the $(wc -l <"$work/base.cpp") headers of others it reaches" "$base" \
    "<tutti/tutti.hpp>, ${#reached[@]} headers of tutti" "$umbrella" "difference: $verdict" "$((umbrella - base))"
