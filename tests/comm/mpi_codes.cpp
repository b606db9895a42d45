// mpi: every return code of MPI is looked at. MPI's profiling interface lets this program stand in for MPI's functions:
// each of them fails once, and the call that needed it must say so.
#include <doctest/doctest.h>  // test cases

#include <tutti/comm/mpi.hpp>  // what is tested

#include <array>       // transfers
#include <chrono>      // deadlines
#include <functional>  // calls
#include <string>      // function names
#include <vector>      // data

using namespace std::chrono_literals;
using namespace tutti;
using comm::mpi;
using comm::mpi_options;
using comm::receive_from;
using comm::send_to;

namespace {

std::string failing;  // the function that fails next
bool fails(const char* function) {
    if (failing != function) { return false; }
    failing.clear();
    return true;
}
constexpr int code = MPI_ERR_INTERN;

}  // namespace

// One stand-in: parameters as declared, arguments as passed on.
#define STAND_IN(name, parameters, arguments)                                                                          \
    extern "C" int name parameters {                                                                                   \
        if (fails(#name)) { return code; }                                                                             \
        return P##name arguments;                                                                                      \
    }

STAND_IN(MPI_Iallreduce, (const void* a, void* b, int n, MPI_Datatype t, MPI_Op o, MPI_Comm c, MPI_Request* r),
         (a, b, n, t, o, c, r))
STAND_IN(MPI_Ireduce, (const void* a, void* b, int n, MPI_Datatype t, MPI_Op o, int root, MPI_Comm c, MPI_Request* r),
         (a, b, n, t, o, root, c, r))
STAND_IN(MPI_Ireduce_scatter,
         (const void* a, void* b, const int n[], MPI_Datatype t, MPI_Op o, MPI_Comm c, MPI_Request* r),
         (a, b, n, t, o, c, r))
STAND_IN(MPI_Ibcast, (void* a, int n, MPI_Datatype t, int root, MPI_Comm c, MPI_Request* r), (a, n, t, root, c, r))
STAND_IN(MPI_Iallgather,
         (const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c, MPI_Request* r),
         (a, n, t, b, m, u, c, r))
STAND_IN(MPI_Iallgatherv,
         (const void* a, int n, MPI_Datatype t, void* b, const int m[], const int d[], MPI_Datatype u, MPI_Comm c,
          MPI_Request* r),
         (a, n, t, b, m, d, u, c, r))
STAND_IN(MPI_Igather,
         (const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, int root, MPI_Comm c, MPI_Request* r),
         (a, n, t, b, m, u, root, c, r))
STAND_IN(MPI_Iscatter,
         (const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, int root, MPI_Comm c, MPI_Request* r),
         (a, n, t, b, m, u, root, c, r))
STAND_IN(MPI_Ialltoall,
         (const void* a, int n, MPI_Datatype t, void* b, int m, MPI_Datatype u, MPI_Comm c, MPI_Request* r),
         (a, n, t, b, m, u, c, r))
STAND_IN(MPI_Ibarrier, (MPI_Comm c, MPI_Request* r), (c, r))
STAND_IN(MPI_Isend, (const void* a, int n, MPI_Datatype t, int p, int tag, MPI_Comm c, MPI_Request* r),
         (a, n, t, p, tag, c, r))
STAND_IN(MPI_Irecv, (void* a, int n, MPI_Datatype t, int p, int tag, MPI_Comm c, MPI_Request* r),
         (a, n, t, p, tag, c, r))
STAND_IN(MPI_Request_get_status, (MPI_Request r, int* done, MPI_Status* s), (r, done, s))
STAND_IN(MPI_Wait, (MPI_Request * r, MPI_Status* s), (r, s))
STAND_IN(MPI_Comm_idup, (MPI_Comm c, MPI_Comm* d, MPI_Request* r), (c, d, r))
STAND_IN(MPI_Comm_split, (MPI_Comm c, int color, int key, MPI_Comm* d), (c, color, key, d))
STAND_IN(MPI_Comm_set_name, (MPI_Comm c, const char* n), (c, n))
STAND_IN(MPI_Comm_test_inter, (MPI_Comm c, int* flag), (c, flag))
STAND_IN(MPI_Comm_rank, (MPI_Comm c, int* r), (c, r))
STAND_IN(MPI_Comm_size, (MPI_Comm c, int* n), (c, n))
STAND_IN(MPI_Query_thread, (int* level), (level))
STAND_IN(MPI_Op_create, (MPI_User_function * f, int commutes, MPI_Op* op), (f, commutes, op))
STAND_IN(MPI_Type_contiguous, (int n, MPI_Datatype t, MPI_Datatype* u), (n, t, u))
STAND_IN(MPI_Type_create_struct, (int n, const int l[], const MPI_Aint d[], const MPI_Datatype t[], MPI_Datatype* u),
         (n, l, d, t, u))
STAND_IN(MPI_Type_commit, (MPI_Datatype * t), (t))
STAND_IN(MPI_Get_elements_x, (const MPI_Status* s, MPI_Datatype t, MPI_Count* n), (s, t, n))
STAND_IN(MPI_Improbe, (int p, int tag, MPI_Comm c, int* found, MPI_Message* m, MPI_Status* s), (p, tag, c, found, m, s))

namespace {

std::vector<float> a(8, 1.0f);
std::vector<float> b(8);
const std::vector<std::size_t> counts{8};

struct case_of {
    const char* function;
    std::function<void(mpi&)> run;
};
const std::vector<case_of> calls = {
    {"MPI_Iallreduce", [](mpi& c) { c.all_reduce(view(a), view(b), sum{}); }},
    {"MPI_Request_get_status", [](mpi& c) { c.all_reduce(view(a), view(b), sum{}); }},
    {"MPI_Wait", [](mpi& c) { c.all_reduce(view(a), view(b), sum{}); }},
    {"MPI_Op_create", [](mpi& c) { c.all_reduce(view(a), view(b), tutti::max{}); }},
    {"MPI_Ireduce", [](mpi& c) { c.reduce(view(a), view(b), sum{}, 0); }},
    {"MPI_Ireduce_scatter", [](mpi& c) { c.reduce_scatter(view(a), view(b), sum{}); }},
    {"MPI_Ibcast", [](mpi& c) { c.broadcast(view(b), 0); }},
    {"MPI_Iallgather", [](mpi& c) { c.all_gather(view(a), view(b)); }},
    {"MPI_Iallgatherv", [](mpi& c) { c.all_gather_v(view(a), view(b), counts); }},
    {"MPI_Igather", [](mpi& c) { c.gather(view(a), view(b), 0); }},
    {"MPI_Iscatter", [](mpi& c) { c.scatter(view(a), view(b), 0); }},
    {"MPI_Ialltoall", [](mpi& c) { c.all_to_all(view(a), view(b)); }},
    {"MPI_Ibarrier", [](mpi& c) { c.barrier(); }},
    {"MPI_Isend",
     [](mpi& c) {
         c.exchange(std::array{send_to(0, view(a)), receive_from(0, view(b))});
     }},
    {"MPI_Irecv",
     [](mpi& c) {
         c.exchange(std::array{send_to(0, view(a)), receive_from(0, view(b))});
     }},
    {"MPI_Get_elements_x",
     [](mpi& c) {
         c.exchange(std::array{send_to(0, view(a)), receive_from(0, view(b))});
     }},
    {"MPI_Type_contiguous",
     [](mpi& c) {
         c.exchange(std::array{send_to(0, view(a)), receive_from(0, view(b))});
     }},
    {"MPI_Type_create_struct",
     [](mpi& c) {
         c.exchange(std::array{send_to(0, view(a)), receive_from(0, view(b))});
     }},
    {"MPI_Type_commit",
     [](mpi& c) {
         c.exchange(std::array{send_to(0, view(a)), receive_from(0, view(b))});
     }},
    {"MPI_Comm_split", [](mpi& c) { static_cast<void>(c.duplicate("d")); }},
    {"MPI_Comm_set_name", [](mpi& c) { static_cast<void>(c.duplicate("d")); }},
};

mpi_options throwing(std::size_t largest) {
    mpi_options o;
    o.timeout = 20s;
    o.on_failure = comm::failure_policy::throw_error;
    o.largest_call = largest;
    return o;
}

}  // namespace

// kokkos/kokkos-comm#184: unchecked return codes
TEST_CASE("mpi: each function that fails once is a backend_error with MPI's code and words") {
    for (const case_of& one : calls) {
        // Messages of 32 bytes need a derived type where a call may move 16.
        mpi world(throwing(std::string(one.function).starts_with("MPI_Type") ? 16 : 1u << 20));
        CAPTURE(one.function);
        failing = one.function;
        try {
            one.run(world);
            FAIL("nothing was thrown");
        } catch (const backend_error& e) {
            CHECK(e.context().backend_code == code);
            CHECK(e.context().backend_text == comm::detail::mpi_text(code));
            CHECK(std::string(e.what()).find(e.context().backend_text) != std::string::npos);
            const bool by_operator = std::string(one.function) == "MPI_Op_create";
            if (!by_operator) { CHECK(e.context().communicator == "world"); }
        }
        CHECK(failing.empty());
        CHECK_THROWS_AS(world.barrier(), aborted_error);  // failed is failed
    }
}

TEST_CASE("mpi: a function that fails while a root is made") {
    for (const char* const function : {"MPI_Query_thread", "MPI_Comm_test_inter", "MPI_Comm_rank", "MPI_Comm_size",
                                       "MPI_Comm_idup", "MPI_Request_get_status", "MPI_Wait", "MPI_Comm_set_name"}) {
        CAPTURE(function);
        failing = function;
        CHECK_THROWS_AS(mpi(throwing(1u << 20)), backend_error);
        CHECK(failing.empty());
    }
    mpi world(throwing(1u << 20));
    CHECK_NOTHROW(world.barrier());
}

TEST_CASE("mpi: a control plane that fails aborts") {
    mpi world(throwing(1u << 20));
    failing = "MPI_Improbe";
    CHECK_THROWS_AS(world.barrier(), aborted_error);
}
