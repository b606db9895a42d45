// any_ranks: ranks as threads or as processes behind one type, so that the trainer is compiled once for both.
// Needs comm/front. Each call goes through a table once: nanoseconds, beside what the ranks say to each other.
#pragma once

#include <memory>       // the communicator
#include <optional>     // split
#include <span>         // colors
#include <string_view>  // names
#include <type_traits>  // is_same, remove_cv, remove_reference
#include <utility>      // move
#include <vector>       // control records

#include <tutti/comm/call.hpp>       // call, control_record
#include <tutti/comm/decorator.hpp>  // decoratable
#include <tutti/comm/front.hpp>      // typed collectives
#include <tutti/core/queue.hpp>      // host_queue

namespace transformer {

/// A communicator of the host, whichever it is.
///
/// Semantics  the calls are the communicator's own, as are their determinism, costs and errors. The one that is given
///            stays its owner's and must outlive this; what is duplicated or split from it is owned.
class any_ranks : public tutti::comm::front<any_ranks, tutti::host_queue> {
    struct calls {
        virtual ~calls() = default;
        virtual int rank() const noexcept = 0;
        virtual int size() const noexcept = 0;
        virtual std::string_view name() const noexcept = 0;
        virtual tutti::host_queue queue() const noexcept = 0;
        virtual std::unique_ptr<calls> duplicate(std::string_view name) = 0;
        virtual std::unique_ptr<calls> split(std::span<const int> colors, std::string_view name) = 0;
        virtual std::vector<tutti::comm::control_record> gather_control(tutti::comm::control_record mine) = 0;
        virtual void synchronize() = 0;
        virtual void abort(std::string_view why) noexcept = 0;
        virtual void execute(const tutti::comm::call& c) = 0;
    };
    // Of a communicator, or of a reference to one.
    template <class C> struct calls_of final : calls {
        using own = std::remove_reference_t<C>;
        C comm;
        explicit calls_of(C c) : comm(static_cast<C&&>(c)) {}
        int rank() const noexcept override { return comm.rank(); }
        int size() const noexcept override { return comm.size(); }
        std::string_view name() const noexcept override { return comm.name(); }
        tutti::host_queue queue() const noexcept override { return comm.queue(); }
        std::unique_ptr<calls> duplicate(std::string_view name) override {
            return std::make_unique<calls_of<own>>(comm.duplicate(name));
        }
        std::unique_ptr<calls> split(std::span<const int> colors, std::string_view name) override {
            std::optional<own> child = comm.split(colors, name);
            return child ? std::make_unique<calls_of<own>>(std::move(*child)) : nullptr;
        }
        std::vector<tutti::comm::control_record> gather_control(tutti::comm::control_record mine) override {
            return comm.gather_control(mine);
        }
        void synchronize() override { comm.synchronize(); }
        void abort(std::string_view why) noexcept override { comm.abort(why); }
        void execute(const tutti::comm::call& c) override { comm.execute(c); }
    };
    std::unique_ptr<calls> calls_;

    explicit any_ranks(std::unique_ptr<calls> c) noexcept : calls_(std::move(c)) {}

public:
    // In this order: whether any_ranks is a communicator may not be asked while its own constructors are chosen.
    template <class C>
    requires(!std::is_same_v<std::remove_cv_t<C>, any_ranks>) && tutti::comm::decoratable<C> explicit any_ranks(
                                                                     C& ranks)
        : calls_(std::make_unique<calls_of<C&>>(ranks)) {}

    [[nodiscard]] int rank() const noexcept { return calls_->rank(); }
    [[nodiscard]] int size() const noexcept { return calls_->size(); }
    [[nodiscard]] std::string_view name() const noexcept { return calls_->name(); }
    [[nodiscard]] tutti::host_queue queue() const noexcept { return calls_->queue(); }
    [[nodiscard]] any_ranks duplicate(std::string_view name) {
        static_cast<void>(next_collective());  // counts, as everywhere
        return any_ranks(calls_->duplicate(name));
    }
    [[nodiscard]] std::optional<any_ranks> split(std::span<const int> colors, std::string_view name) {
        static_cast<void>(next_collective());
        std::unique_ptr<calls> child = calls_->split(colors, name);
        if (child == nullptr) { return std::nullopt; }
        return any_ranks(std::move(child));
    }
    [[nodiscard]] std::vector<tutti::comm::control_record> gather_control(tutti::comm::control_record mine) {
        static_cast<void>(next_collective());
        return calls_->gather_control(mine);
    }
    void synchronize() { calls_->synchronize(); }
    void abort(std::string_view why) noexcept { calls_->abort(why); }
    /// The byte-level core; called by the typed front.
    void execute(const tutti::comm::call& c) { calls_->execute(c); }
};

static_assert(tutti::comm::decoratable<any_ranks>);

}  // namespace transformer
