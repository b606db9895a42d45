// render: a placement to look at: as text, and as a picture of what each rank's memory holds, colored by zone.
// Needs sequence/placement.
#pragma once

#include <algorithm>    // max
#include <array>        // colors
#include <cstddef>      // size_t
#include <cstdint>      // tokens
#include <string>       // results
#include <string_view>  // colors
#include <vector>       // zones

#include <tutti/core/error.hpp>          // list_of
#include <tutti/core/text.hpp>           // formatted
#include <tutti/sequence/placement.hpp>  // placement

namespace tutti::sequence {

namespace detail {
[[nodiscard]] inline std::string heading_of(const placement& p) {
    std::int64_t total = 0;
    for (const std::int64_t s : p.lengths) { total += s; }
    std::array<int, 3> rings{};
    for (const ring& r : p.rings) { ++rings[static_cast<std::size_t>(r.where)]; }
    return formatted("{} sequences, {} tokens, on {} nodes of {} ranks: {} local, {} in a node, {} over nodes",
                     p.lengths.size(), total, p.machines.nodes, p.machines.ranks_per_node, rings[0], rings[1],
                     rings[2]);
}
// The zone of each sequence; local where there are no rings.
[[nodiscard]] inline std::vector<zone> zones_of(const placement& p) {
    std::vector<zone> zones(p.lengths.size(), zone::local);
    for (const ring& r : p.rings) { zones[static_cast<std::size_t>(r.sequence)] = r.where; }
    return zones;
}
}  // namespace detail

/// A line on the whole, a line for each ring of more than one rank, and a line for each rank: its tokens, then its
/// pieces in the order of its memory as sequence[begin, end); empty ones are left out.
[[nodiscard]] inline std::string text_of(const placement& p) {
    std::string text = detail::heading_of(p) + '\n';
    for (const ring& r : p.rings) {
        if (r.where == zone::local) { continue; }
        text += formatted("{} ring of sequence {}, {} tokens: ranks {}\n", name_of(r.where), r.sequence,
                          p.lengths[static_cast<std::size_t>(r.sequence)], list_of(r.ranks));
    }
    for (std::size_t rank = 0; rank < p.pieces.size(); ++rank) {
        text += formatted("rank {}, {} tokens:", rank, tokens_of(p.pieces[rank]));
        for (const piece& q : p.pieces[rank]) {
            if (q.size() > 0) { text += formatted(" {}[{}, {})", q.sequence, q.begin, q.end); }
        }
        text += '\n';
    }
    return text;
}

/// An SVG document: a row for each rank, nodes apart from each other, and in it the pieces of its memory from left to
/// right, as long as they have tokens. Sequences over nodes are dark, those inside a node lighter, local ones pale;
/// each piece has its sequence's number where it fits, and says what it is when pointed at.
[[nodiscard]] inline std::string svg_of(const placement& p) {
    constexpr double width = 1000;
    constexpr double left = 70;
    constexpr double row = 18;
    constexpr double top = 70;
    constexpr std::array<std::string_view, 3> colors{"#dfe7ee", "#8db9d9", "#1f5f8b"};  // by zone
    constexpr std::array<std::string_view, 3> inks{"#333", "#222", "#fff"};
    std::int64_t most = 1;
    for (const auto& pieces : p.pieces) { most = std::max(most, tokens_of(pieces)); }
    const double scale = (width - left - 20) / static_cast<double>(most);
    const double height = top + row * p.machines.ranks() + row / 2 * p.machines.nodes + 10;
    std::string svg = formatted("<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
                                "height=\"{1}\" font-family=\"sans-serif\" font-size=\"11\" fill=\"#333\">\n"
                                "<rect width=\"{0}\" height=\"{1}\" fill=\"#fff\"/>\n"
                                "<text x=\"10\" y=\"24\" font-size=\"14\">{2}</text>\n",
                                width, height, detail::heading_of(p));
    for (const zone z : {zone::world, zone::node, zone::local}) {
        const auto at = static_cast<std::size_t>(z);
        const double x = left + 110 * static_cast<double>(2 - at);
        svg += formatted("<rect x=\"{}\" y=\"38\" width=\"12\" height=\"12\" fill=\"{}\"/><text x=\"{}\" y=\"48\">{}"
                         "</text>\n",
                         x, colors[at], x + 18, name_of(z));
    }
    const auto zones = detail::zones_of(p);
    for (std::size_t rank = 0; rank < p.pieces.size(); ++rank) {
        const int node = p.machines.node_of(static_cast<int>(rank));
        const double y = top + row * static_cast<double>(rank) + row / 2 * node;
        svg += formatted("<text x=\"{}\" y=\"{}\" text-anchor=\"end\">rank {}</text>\n", left - 8, y + 12, rank);
        double x = left;
        for (const piece& q : p.pieces[rank]) {
            if (q.size() == 0) { continue; }
            const auto z = static_cast<std::size_t>(zones[static_cast<std::size_t>(q.sequence)]);
            const double length = static_cast<double>(q.size()) * scale;
            svg += formatted("<g><title>sequence {}, tokens [{}, {}), {}</title>", q.sequence, q.begin, q.end,
                             name_of(static_cast<zone>(z)));
            svg += formatted("<rect x=\"{:.2f}\" y=\"{}\" width=\"{:.2f}\" height=\"{}\" fill=\"{}\" stroke=\"#fff\" "
                             "stroke-width=\"0.5\"/>",
                             x, y, length, row - 3, colors[z]);
            if (length > 24) {
                svg += formatted("<text x=\"{:.2f}\" y=\"{}\" text-anchor=\"middle\" fill=\"{}\">{}</text>",
                                 x + length / 2, y + 11, inks[z], q.sequence);
            }
            svg += "</g>\n";
            x += length;
        }
    }
    return svg + "</svg>\n";
}

}  // namespace tutti::sequence
