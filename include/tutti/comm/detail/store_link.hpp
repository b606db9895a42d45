// store_link: any store behind one type, for members that do not know which store their user brought.
// Needs comm/store.
#pragma once

#include <cstddef>      // byte
#include <memory>       // shared stores
#include <optional>     // what may not be there
#include <span>         // values
#include <string>       // causes
#include <string_view>  // keys
#include <utility>      // move
#include <vector>       // values

#include <tutti/comm/store.hpp>     // store
#include <tutti/core/deadline.hpp>  // deadline

namespace tutti::comm::detail {

/// As the concept `store` says.
class store_link {
public:
    virtual ~store_link() = default;
    virtual void set(std::string_view key, std::span<const std::byte> value) = 0;
    [[nodiscard]] virtual std::vector<std::byte> get(std::string_view key, deadline limit) = 0;
    [[nodiscard]] virtual std::optional<std::vector<std::byte>> find(std::string_view key) = 0;
    virtual void forget(std::string_view key) = 0;
    virtual void arrive(std::string_view key, int rank) = 0;
    virtual void leave(std::string_view key, int rank) = 0;
    [[nodiscard]] virtual std::vector<int> missing(std::string_view key, int ranks) = 0;
    virtual void wait_for_all(std::string_view key, int ranks, deadline limit) = 0;
    virtual void fail(std::string_view key, int rank, std::string_view why) = 0;
    [[nodiscard]] virtual std::optional<std::string> failure(std::string_view key) = 0;
};

template <store S> class store_link_to final : public store_link {
    std::shared_ptr<S> store_;

public:
    explicit store_link_to(std::shared_ptr<S> s) : store_(std::move(s)) {}
    void set(std::string_view key, std::span<const std::byte> value) override { store_->set(key, value); }
    std::vector<std::byte> get(std::string_view key, deadline limit) override { return store_->get(key, limit); }
    std::optional<std::vector<std::byte>> find(std::string_view key) override { return store_->find(key); }
    void forget(std::string_view key) override { store_->forget(key); }
    void arrive(std::string_view key, int rank) override { store_->arrive(key, rank); }
    void leave(std::string_view key, int rank) override { store_->leave(key, rank); }
    std::vector<int> missing(std::string_view key, int ranks) override { return store_->missing(key, ranks); }
    void wait_for_all(std::string_view key, int ranks, deadline limit) override {
        store_->wait_for_all(key, ranks, limit);
    }
    void fail(std::string_view key, int rank, std::string_view why) override { store_->fail(key, rank, why); }
    std::optional<std::string> failure(std::string_view key) override { return store_->failure(key); }
};

}  // namespace tutti::comm::detail
