// mirrored: a vector of a test with a copy on the device. Needs sequence/token_view and core/cuda_queue.
#pragma once

#include <vector>  // data

#include <tutti/core/buffer.hpp>          // the copy
#include <tutti/core/cuda_queue.hpp>      // upload, download
#include <tutti/sequence/token_view.hpp>  // token_view

namespace tutti::test {

template <class T> using on_device = sequence::token_view<T, device_memory>;

// A vector with a copy on the device, which token_views of the vector are translated to.
template <class T> class mirrored {
    cuda_queue q_;
    std::vector<T>& host_;
    buffer<T, cuda_queue> device_;

public:
    mirrored(const cuda_queue& q, std::vector<T>& host) : q_(q), host_(host), device_(q, host.size()) {
        upload(q_, view<const T>(host_), device_.view());
    }
    on_device<T> operator()(const sequence::token_view<T>& v) const {
        on_device<T> d;
        d.data = device_.data() + (v.data - host_.data());
        d.tokens = v.tokens;
        d.heads = v.heads;
        d.width = v.width;
        d.token_stride = v.token_stride;
        d.head_stride = v.head_stride;
        return d;
    }
    void fetch() { download(q_, view<const T, device_memory>(device_.view()), view<T>(host_)); }
};

}  // namespace tutti::test
