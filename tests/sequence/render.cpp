// render: the text of a placement word by word, and the picture by what it must contain.
#include <doctest/doctest.h>  // checks

#include <string>  // texts

#include <tutti/sequence/partition/llama_all_gather.hpp>  // a placement without rings
#include <tutti/sequence/render.hpp>                      // text_of, svg_of

#include "sequence/judges.hpp"  // lengths_t

using namespace tutti;
using namespace tutti::test;
using sequence::cluster;
using sequence::zone;

namespace {

sequence::placement example() {
    return sequence::assembled(
        cluster{2, 2}, lengths_t{80, 10, 7, 0},
        {{0, zone::world, {0, 1, 2, 3}}, {1, zone::node, {2, 3}}, {2, zone::local, {1}}, {3, zone::local, {0}}});
}

int count(const std::string& text, std::string_view what) {
    int n = 0;
    for (std::size_t at = text.find(what); at != std::string::npos; at = text.find(what, at + 1)) { ++n; }
    return n;
}

}  // namespace

TEST_CASE("text") {
    CHECK(text_of(example()) == "4 sequences, 97 tokens, on 2 nodes of 2 ranks: 2 local, 1 in a node, 1 over nodes\n"
                                "world ring of sequence 0, 80 tokens: ranks 0, 1, 2, 3\n"
                                "node ring of sequence 1, 10 tokens: ranks 2, 3\n"
                                "rank 0, 20 tokens: 0[0, 10) 0[70, 80)\n"
                                "rank 1, 27 tokens: 0[10, 20) 0[60, 70) 2[0, 3) 2[3, 7)\n"
                                "rank 2, 25 tokens: 0[20, 30) 0[50, 60) 1[0, 2) 1[7, 10)\n"
                                "rank 3, 25 tokens: 0[30, 40) 0[40, 50) 1[2, 5) 1[5, 7)\n");
}

TEST_CASE("picture") {
    const std::string svg = svg_of(example());
    CHECK(svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\""));
    CHECK(svg.ends_with("</svg>\n"));
    for (const char* const tag : {"svg", "g", "title", "text"}) {
        CHECK(count(svg, std::string("<") + tag + " ") + count(svg, std::string("<") + tag + ">") ==
              count(svg, std::string("</") + tag + ">"));
    }
    // 8 pieces of the ring over nodes, 4 inside a node, 2 local; and the legend, which has one of each.
    CHECK(count(svg, "#1f5f8b") == 8 + 1);
    CHECK(count(svg, "#8db9d9") == 4 + 1);
    CHECK(count(svg, "#dfe7ee") == 2 + 1);
    CHECK(count(svg, "<title>") == 14);
    CHECK(count(svg, "<title>sequence 0, tokens [70, 80), world</title>") == 1);
    // 910 wide for the 27 tokens of the fullest rank; rank 1 starts with 10 of them.
    CHECK(count(svg, "x=\"70.00\" y=\"88\" width=\"337.04\"") == 1);
    CHECK(count(svg, "x=\"407.04\" y=\"88\" width=\"337.04\"") == 1);
    // Ranks of the second node stand apart.
    CHECK(count(svg, "x=\"70.00\" y=\"115\"") == 1);
    CHECK(count(svg, ">rank 3</text>") == 1);
}

TEST_CASE("a placement without rings, and one without tokens") {
    const auto p = sequence::partition::llama_all_gather{}(lengths_t{5, 11}, cluster{1, 2});
    CHECK(text_of(p) == "2 sequences, 16 tokens, on 1 nodes of 2 ranks: 0 local, 0 in a node, 0 over nodes\n"
                        "rank 0, 8 tokens: 0[0, 4) 1[7, 11)\n"
                        "rank 1, 8 tokens: 0[4, 5) 1[0, 3) 1[3, 7)\n");
    CHECK(count(svg_of(p), "<title>") == 5);
    CHECK(count(svg_of(sequence::assembled(cluster{1, 2}, lengths_t{}, {})), "<title>") == 0);
}
