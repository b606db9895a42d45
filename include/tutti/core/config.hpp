// Compiler switches used by the other headers: host/device functions and exact floating point.
// Needs nothing. Each macro adds or removes an attribute; none changes a type.
#pragma once

// A function that runs on the host and, when nvcc compiles it, on the device too.
#if defined(__CUDACC__)
#define TUTTI_HOST_DEVICE __host__ __device__
#else
#define TUTTI_HOST_DEVICE
#endif

// Loops whose bits are promised must not fuse a*b+c on their own. GCC wants an attribute on the function, clang a
// pragma in its body, so such a function is written  TUTTI_EXACT void f() { TUTTI_EXACT_BODY ... }. Neither undoes
// -ffast-math, nor the pragma clang's -ffp-contract=fast: bits are promised without these.
#if defined(__clang__)
#define TUTTI_EXACT
#define TUTTI_EXACT_BODY _Pragma("clang fp contract(off)")
#elif defined(__GNUC__)
#define TUTTI_EXACT __attribute__((optimize("fp-contract=off")))
#define TUTTI_EXACT_BODY
#else
#define TUTTI_EXACT
#define TUTTI_EXACT_BODY
#endif

// Elements of the loop that follows do not depend on each other, although inputs may be the very same array as the
// output.
#if defined(__clang__)
#define TUTTI_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#elif defined(__GNUC__) && !defined(__CUDACC__)
#define TUTTI_INDEPENDENT _Pragma("GCC ivdep")
#else
#define TUTTI_INDEPENDENT
#endif
