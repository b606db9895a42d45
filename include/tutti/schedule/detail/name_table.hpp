// name_table: numbers for names that come again and again.
// Needs nothing. A sorted list: names are few, and a map costs every includer compile time.
#pragma once

#include <cstddef>      // ptrdiff_t
#include <cstdint>      // numbers
#include <string>       // names
#include <string_view>  // names
#include <vector>       // both orders

namespace tutti::schedule::detail {

class name_table {
    std::vector<std::string> names_;     // by number
    std::vector<std::uint32_t> sorted_;  // numbers in the order of their names

public:
    [[nodiscard]] std::size_t size() const noexcept { return names_.size(); }
    [[nodiscard]] const std::string& operator[](std::uint32_t number) const noexcept { return names_[number]; }

    /// The number of a name, from 0, made at its first use.
    [[nodiscard]] std::uint32_t number_of(std::string_view name) {
        std::size_t low = 0;
        for (std::size_t high = sorted_.size(); low < high;) {
            const std::size_t middle = (low + high) / 2;
            const int order = names_[sorted_[middle]].compare(name);
            if (order == 0) { return sorted_[middle]; }
            if (order < 0) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        const auto number = static_cast<std::uint32_t>(names_.size());
        names_.emplace_back(name);
        sorted_.insert(sorted_.begin() + static_cast<std::ptrdiff_t>(low), number);
        return number;
    }
};

}  // namespace tutti::schedule::detail
