// What a user's translation unit may have seen before it includes tutti: macros with short names. Each name below
// expands to something that no compiler accepts, so a tutti header that uses one as an identifier fails to compile.
// Needs to come behind the headers of others, which may use these names themselves: all that tutti uses come first.
// Left alone: T, M, Q, C and the other letters that name template parameters in the documented interface, and the
// function-like min and max of windows.h, against which every call would need parentheses.
#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <barrier>
#include <bit>
#include <cassert>
#include <cctype>
#include <cerrno>
#include <cfenv>
#include <cfloat>
#include <charconv>
#include <chrono>
#include <cinttypes>
#include <climits>
#include <cmath>
#include <compare>
#include <complex>
#include <concepts>
#include <condition_variable>
#include <csignal>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <functional>
#include <future>
#include <initializer_list>
#include <iomanip>
#include <ios>
#include <iostream>
#include <istream>
#include <iterator>
#include <latch>
#include <limits>
#include <list>
#include <locale>
#include <map>
#include <memory>
#include <memory_resource>
#include <mutex>
#include <new>
#include <numbers>
#include <numeric>
#include <optional>
#include <ostream>
#include <queue>
#include <random>
#include <ranges>
#include <ratio>
#include <regex>
#include <semaphore>
#include <set>
#include <shared_mutex>
#include <source_location>
#include <span>
#include <sstream>
#include <stack>
#include <stdexcept>
#include <stop_token>
#include <streambuf>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <tuple>
#include <type_traits>
#include <typeindex>
#include <typeinfo>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <valarray>
#include <variant>
#include <vector>
#include <version>

#include <fcntl.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <fmt/chrono.h>
#include <fmt/core.h>
#include <fmt/format.h>
#include <fmt/ostream.h>
#include <fmt/ranges.h>

#define TUTTI_POISON @a macro of another header replaced this name @

// letters: complex.h takes I, termios.h takes B0 and its like, numerical codes take the rest
#undef B0
#define B0 TUTTI_POISON
#undef I
#define I TUTTI_POISON
#undef J
#define J TUTTI_POISON
#undef L
#define L TUTTI_POISON
#undef N
#define N TUTTI_POISON
#undef X
#define X TUTTI_POISON
#undef Y
#define Y TUTTI_POISON
#undef Z
#define Z TUTTI_POISON

// sys/sysmacros.h, sys/param.h
#undef major
#define major TUTTI_POISON
#undef minor
#define minor TUTTI_POISON
#undef makedev
#define makedev TUTTI_POISON
#undef MIN
#define MIN TUTTI_POISON
#undef MAX
#define MAX TUTTI_POISON
#undef howmany
#define howmany TUTTI_POISON
#undef roundup
#define roundup TUTTI_POISON
#undef powerof2
#define powerof2 TUTTI_POISON
#undef isset
#define isset TUTTI_POISON
#undef setbit
#define setbit TUTTI_POISON

// Windows headers
#undef small
#define small TUTTI_POISON
#undef near
#define near TUTTI_POISON
#undef far
#define far TUTTI_POISON
#undef interface
#define interface TUTTI_POISON
#undef pascal
#define pascal TUTTI_POISON
#undef cdecl
#define cdecl TUTTI_POISON
#undef IN
#define IN TUTTI_POISON
#undef OUT
#define OUT TUTTI_POISON
#undef OPTIONAL
#define OPTIONAL TUTTI_POISON
#undef ERROR
#define ERROR TUTTI_POISON
#undef DELETE
#define DELETE TUTTI_POISON
#undef TRUE
#define TRUE TUTTI_POISON
#undef FALSE
#define FALSE TUTTI_POISON
#undef CONST
#define CONST TUTTI_POISON
#undef VOID
#define VOID TUTTI_POISON

// AssertMacros.h, test frameworks, loggers
#undef check
#define check TUTTI_POISON
#undef verify
#define verify TUTTI_POISON
#undef require
#define require TUTTI_POISON
#undef CHECK
#define CHECK TUTTI_POISON
#undef REQUIRE
#define REQUIRE TUTTI_POISON
#undef ASSERT
#define ASSERT TUTTI_POISON
#undef EXPECT
#define EXPECT TUTTI_POISON
#undef TEST
#define TEST TUTTI_POISON
#undef LOG
#define LOG TUTTI_POISON
#undef INFO
#define INFO TUTTI_POISON
#undef WARN
#define WARN TUTTI_POISON
#undef WARNING
#define WARNING TUTTI_POISON
#undef DEBUG
#define DEBUG TUTTI_POISON
#undef FATAL
#define FATAL TUTTI_POISON
#undef OK
#define OK TUTTI_POISON
#undef PASS
#define PASS TUTTI_POISON
#undef FAIL
#define FAIL TUTTI_POISON

// Xlib and Qt
#undef None
#define None TUTTI_POISON
#undef Bool
#define Bool TUTTI_POISON
#undef Status
#define Status TUTTI_POISON
#undef Success
#define Success TUTTI_POISON
#undef Always
#define Always TUTTI_POISON
#undef Complex
#define Complex TUTTI_POISON
#undef emit
#define emit TUTTI_POISON
#undef slots
#define slots TUTTI_POISON
#undef signals
#define signals TUTTI_POISON
#undef foreach
#define foreach TUTTI_POISON

// gnu++ mode
#undef linux
#define linux TUTTI_POISON
#undef unix
#define unix TUTTI_POISON

// math.h, numerical codes
#undef DOMAIN
#define DOMAIN TUTTI_POISON
#undef SING
#define SING TUTTI_POISON
#undef OVERFLOW
#define OVERFLOW TUTTI_POISON
#undef UNDERFLOW
#define UNDERFLOW TUTTI_POISON
#undef HUGE
#define HUGE TUTTI_POISON
#undef PI
#define PI TUTTI_POISON
#undef EPS
#define EPS TUTTI_POISON
#undef SIZE
#define SIZE TUTTI_POISON
#undef LENGTH
#define LENGTH TUTTI_POISON
#undef COUNT
#define COUNT TUTTI_POISON
#undef RANK
#define RANK TUTTI_POISON
#undef ROOT
#define ROOT TUTTI_POISON
#undef SUM
#define SUM TUTTI_POISON
#undef BLOCK
#define BLOCK TUTTI_POISON
#undef BLOCK_SIZE
#define BLOCK_SIZE TUTTI_POISON
#undef PAGE_SIZE
#define PAGE_SIZE TUTTI_POISON
#undef CACHE_LINE
#define CACHE_LINE TUTTI_POISON

// kernel style, function-like so that the attributes keep working
#undef likely
#define likely(x) TUTTI_POISON
#undef unlikely
#define unlikely(x) TUTTI_POISON
