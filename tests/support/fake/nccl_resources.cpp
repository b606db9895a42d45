// fake_nccl: what belongs to communicators: operators with a factor, registered memory; and memory by NCCL's hand.
// Needs fake/nccl_state, fake_cuda.
#include <cstddef>  // sizes
#include <cstring>  // scalars
#include <mutex>    // locks

#include <support/fake/nccl_state.hpp>  // declarations

using namespace tutti::test::fake_nccl;

extern "C" {

ncclResult_t ncclRedOpCreatePreMulSum(ncclRedOp_t* op, void* scalar, ncclDataType_t type,
                                      ncclScalarResidence_t residence, ncclComm_t c) {
    if (const ncclResult_t r = check(c, "ncclRedOpCreatePreMulSum"); r != ncclSuccess) { return r; }
    const use in_use(c, "ncclRedOpCreatePreMulSum");
    if (const ncclResult_t r = enter("ncclRedOpCreatePreMulSum", c); r != ncclSuccess) { return r; }
    factor f;
    if (residence == ncclScalarDevice) {
        f.on_device = scalar;
    } else {
        std::memcpy(f.value.data(), scalar, size_of(type));
    }
    const std::lock_guard lock(c->mutex);
    *op = static_cast<ncclRedOp_t>(ncclNumOps + static_cast<int>(c->factors.size()));
    c->factors.emplace_back(f);
    return ncclSuccess;
}
ncclResult_t ncclRedOpDestroy(ncclRedOp_t op, ncclComm_t c) {
    if (const ncclResult_t r = check(c, "ncclRedOpDestroy"); r != ncclSuccess) { return r; }
    const use in_use(c, "ncclRedOpDestroy");
    if (const ncclResult_t r = enter("ncclRedOpDestroy", c); r != ncclSuccess) { return r; }
    const std::lock_guard lock(c->mutex);
    const auto index = static_cast<std::size_t>(op - ncclNumOps);
    if (op < ncclNumOps || index >= c->factors.size() || !c->factors[index]) {
        return fails(ncclInvalidArgument, "ncclRedOpDestroy: unknown operator");
    }
    c->factors[index].reset();
    return ncclSuccess;
}

ncclResult_t ncclMemAlloc(void** p, std::size_t bytes) {
    if (const ncclResult_t r = enter("ncclMemAlloc", any); r != ncclSuccess) { return r; }
    return cudaMalloc(p, bytes) == cudaSuccess ? ncclSuccess : fails(ncclUnhandledCudaError, "ncclMemAlloc");
}
ncclResult_t ncclMemFree(void* p) {
    if (const ncclResult_t r = enter("ncclMemFree", any); r != ncclSuccess) { return r; }
    return cudaFree(p) == cudaSuccess ? ncclSuccess : fails(ncclUnhandledCudaError, "ncclMemFree");
}
ncclResult_t ncclCommRegister(const ncclComm_t c, void* data, std::size_t, void** handle) {
    if (const ncclResult_t r = check(c, "ncclCommRegister"); r != ncclSuccess) { return r; }
    const use in_use(c, "ncclCommRegister");
    if (const ncclResult_t r = enter("ncclCommRegister", c); r != ncclSuccess) { return r; }
    const std::lock_guard lock(c->mutex);
    c->registered.insert(data);
    *handle = data;
    return ncclSuccess;
}
ncclResult_t ncclCommDeregister(const ncclComm_t c, void* handle) {
    if (const ncclResult_t r = check(c, "ncclCommDeregister"); r != ncclSuccess) { return r; }
    const use in_use(c, "ncclCommDeregister");
    if (const ncclResult_t r = enter("ncclCommDeregister", c); r != ncclSuccess) { return r; }
    const std::lock_guard lock(c->mutex);
    if (c->registered.erase(handle) != 0) { return ncclSuccess; }
    return fails(ncclInvalidArgument, "ncclCommDeregister: not registered");
}

}  // extern "C"
