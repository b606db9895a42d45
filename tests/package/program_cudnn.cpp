// A program of a consumer that asked for the component cudnn. The headers of the frontend that take long stay out.
#include <cstdio>

#include <cudnn.h>
#include <cudnn_frontend_version.h>

#include <tutti/sequence/fused_attention.hpp>

int main() {
    const tutti::sequence::fused_call call;
    std::printf("cuDNN %d, frontend %d.%d, %d rows\n", static_cast<int>(cudnnGetVersion() / 10000),
                CUDNN_FRONTEND_MAJOR_VERSION, CUDNN_FRONTEND_MINOR_VERSION, static_cast<int>(call.queries));
}
