// Timelines: totals, exposed time, steps; a trace that any JSON reader accepts, whatever the names.
#include <doctest/doctest.h>  // checks

#include <chrono>             // times
#include <cstdio>             // the written file
#include <fstream>            // the written file
#include <map>                // events by name
#include <memory>             // shared marks
#include <nlohmann/json.hpp>  // an independent reader
#include <optional>           // marks that could not be made
#include <set>                // names
#include <sstream>            // the written file
#include <stdexcept>          // lost marks
#include <thread>             // concurrent writers

#include <tutti/comm/self.hpp>          // one rank
#include <tutti/schedule/lane.hpp>      // who writes
#include <tutti/schedule/span.hpp>      // scoped_span
#include <tutti/schedule/timeline.hpp>  // timeline

#include <support/failure.hpp>           // expect
#include <support/growing_timeouts.hpp>  // a machine that is busy

using namespace tutti;
using namespace std::chrono_literals;
using nlohmann::json;
using schedule::span_kind;
using schedule::timeline;

namespace {

std::vector<json> events_of(const std::string& text, const std::string& phase) {
    std::vector<json> out;
    const json whole = json::parse(text);
    for (const json& e : whole.at("traceEvents")) {
        if (e.at("ph") == phase) { out.push_back(e); }
    }
    return out;
}

// A mark that is reached when the test says so.
class toy_mark {
    struct state {
        deadline time;
        bool reached = false, lost = false;
    };
    std::shared_ptr<state> state_;

public:
    explicit toy_mark(deadline time) : state_(std::make_shared<state>(state{time})) {}
    void reach() { state_->reached = true; }
    void lose() { state_->lost = true; }
    [[nodiscard]] long uses() const { return state_.use_count(); }
    [[nodiscard]] bool ready() const {
        if (state_->lost) { throw std::runtime_error("lost"); }
        return state_->reached;
    }
    [[nodiscard]] deadline when() const { return state_->time; }
    [[nodiscard]] duration since(const toy_mark& earlier) const { return state_->time - earlier.state_->time; }
};

}  // namespace

TEST_CASE("summaries") {
    const deadline start = clock_type::now();
    timeline t(start);
    const auto main = t.track_of(0, "main");
    const auto lane = t.track_of(0, "lane");
    const auto steps = t.track_of(0, "steps");
    const auto other = t.track_of(1, "main");
    CHECK(main == t.track_of(0, "main"));
    CHECK(main != other);
    const auto at = [&](int ms) { return start + std::chrono::milliseconds(ms); };
    t.add(lane, "reduce", span_kind::communication, at(0), at(8));
    t.add(lane, "reduce", span_kind::communication, at(20), at(24));
    t.add(main, "reduce", span_kind::wait, at(5), at(8));
    t.add(main, "reduce", span_kind::wait, at(9), at(10));
    t.add(main, "gather", span_kind::wait, at(22), at(24));
    t.add(main, "warm-up", span_kind::wait, at(18), at(19));  // between the steps: exposed, but of no step
    t.add(other, "reduce", span_kind::wait, at(0), at(100));
    t.add(steps, "step", span_kind::step, at(20), at(30));
    t.add(steps, "step", span_kind::step, at(0), at(10));
    CHECK(t.exposed(0) == doctest::Approx(0.007));
    CHECK(t.exposed(1) == doctest::Approx(0.1));
    CHECK(t.exposed(2) == 0);
    const auto by_step = t.steps(0);
    REQUIRE(by_step.size() == 2);
    CHECK(by_step[0].seconds == doctest::Approx(0.01));
    CHECK(by_step[0].begin == at(0));
    CHECK(by_step[1].begin == at(20));
    CHECK(by_step[0].exposed == doctest::Approx(0.004));
    CHECK(by_step[1].exposed == doctest::Approx(0.002));
    CHECK(t.steps(1).empty());
    const auto totals = t.totals(0);
    REQUIRE(totals.size() == 4);
    CHECK(totals[0].name == "reduce");
    CHECK(totals[0].kind == span_kind::communication);
    CHECK(totals[0].count == 2);
    CHECK(totals[0].seconds == doctest::Approx(0.012));
    CHECK(totals[1].kind == span_kind::wait);
    CHECK(totals[1].seconds == doctest::Approx(0.004));
    CHECK(totals[2].name == "gather");
    CHECK(totals[3].name == "warm-up");
    CHECK(t.size() == 9);
    CHECK(t.dropped() == 0);
    const auto all = t.spans(1);
    REQUIRE(all.size() == 1);
    CHECK(all[0].track == "main");
    CHECK(all[0].name == "reduce");
    CHECK(all[0].kind == span_kind::wait);
    CHECK(all[0].begin == at(0));
    CHECK(all[0].end == at(100));
    CHECK(by_step[1].end == at(30));
    t.clear();
    CHECK(t.size() == 0);
    CHECK(t.steps(0).empty());
    t.add(steps, "step", span_kind::step, at(40), at(50));  // tracks stay
    CHECK(t.steps(0).size() == 1);
}

TEST_CASE("spans between marks are pending until reached, and dropped when they never will be") {
    const deadline start = clock_type::now();
    const auto at = [&](int ms) { return start + std::chrono::milliseconds(ms); };
    timeline t(start);
    const auto lane = t.track_of(0, "lane");
    const auto stuck = t.track_of(0, "stuck");
    toy_mark a(at(1)), b(at(4)), c(at(6)), d(at(9)), never(at(10));
    t.add<toy_mark>(lane, "first", span_kind::work, a, b);
    t.add<toy_mark>(lane, "second", span_kind::wait, b, c);
    t.add<toy_mark>(stuck, "third", span_kind::wait, c, d);
    CHECK(t.size() == 0);
    CHECK(t.pending() == 3);
    CHECK(t.exposed(0) == 0);
    a.reach();
    CHECK(t.size() == 0);  // its end is missing
    b.reach();
    CHECK(t.size() == 1);
    CHECK(t.pending() == 2);
    d.reach();  // the third, although the second is still pending
    CHECK(t.exposed(0) == doctest::Approx(0.003));
    CHECK(t.totals(0).size() == 2);
    c.reach();
    CHECK(t.exposed(0) == doctest::Approx(0.005));
    CHECK(t.pending() == 0);
    CHECK(t.dropped() == 0);
    const auto spans = events_of(t.chrome_trace(), "X");
    REQUIRE(spans.size() == 3);
    CHECK(spans[0].at("name") == "first");
    CHECK(spans[0].at("ts").get<double>() == doctest::Approx(1000));
    CHECK(spans[0].at("dur").get<double>() == doctest::Approx(3000));

    t.add<toy_mark>(lane, "half captured", span_kind::work, a, std::nullopt);
    t.add<toy_mark>(lane, "captured", span_kind::work, std::nullopt, b);
    CHECK(t.dropped() == 2);
    t.add<toy_mark>(lane, "lost", span_kind::work, a, never);
    CHECK(t.pending() == 1);
    never.lose();
    CHECK(t.dropped() == 3);
    CHECK(t.pending() == 0);

    toy_mark e(at(11));
    t.add<toy_mark>(stuck, "never", span_kind::work, a, e);
    t.add<toy_mark>(stuck, "reached", span_kind::work, a, b);
    t.add<toy_mark>(lane, "of others", span_kind::work, a, e);
    t.abandon(stuck);
    CHECK(t.dropped() == 4);
    CHECK(t.pending() == 1);
    CHECK(t.size() == 4);
    e.reach();
    CHECK(t.size() == 5);
    CHECK(t.pending() == 0);
}

TEST_CASE("every summary sees what has been reached") {
    const deadline now = clock_type::now();
    const auto reached = [&](timeline& t) {
        toy_mark a(now), b(now + 1ms);
        const auto track = t.track_of(0, "main");
        t.add<toy_mark>(track, "x", span_kind::wait, a, b);
        t.add<toy_mark>(track, "x", span_kind::step, a, b);
        b.reach();
    };
    timeline a, b, c, d, e;
    for (timeline* const t : {&a, &b, &c, &d, &e}) { reached(*t); }
    CHECK(a.size() == 2);
    CHECK(b.exposed(0) == doctest::Approx(0.001));
    CHECK(c.totals(0).size() == 1);
    CHECK(d.steps(0).size() == 1);
    CHECK(events_of(e.chrome_trace(), "X").size() == 2);
}

TEST_CASE("pending spans hold their marks no longer than needed") {
    toy_mark a(clock_type::now()), b(clock_type::now()), c(clock_type::now());
    {
        timeline t;
        const auto track = t.track_of(0, "lane");
        for (int i = 0; i < 5; ++i) { t.add<toy_mark>(track, "x", span_kind::work, a, b); }
        CHECK(b.uses() == 6);
        a.reach();
        b.reach();
        t.add<toy_mark>(track, "x", span_kind::work, a, c);  // adding notices what has been reached
        CHECK(b.uses() == 1);
        CHECK(c.uses() == 2);
    }
    CHECK(c.uses() == 1);
}

TEST_CASE("the trace is complete and in microseconds") {
    const deadline start = clock_type::now();
    timeline t(start);
    const auto a = t.track_of(3, "lane \"x\"");
    const auto b = t.track_of(0, "main");
    t.add(a, "all_reduce", span_kind::work, start + 1500us, start + 1750us);
    t.add(b, "wait", span_kind::wait, start - 10us, start + 2s);
    const std::string text = t.chrome_trace();
    const auto spans = events_of(text, "X");
    REQUIRE(spans.size() == 2);
    CHECK(spans[0].at("name") == "all_reduce");
    CHECK(spans[0].at("cat") == "work");
    CHECK(spans[0].at("ts").get<double>() == doctest::Approx(1500));
    CHECK(spans[0].at("dur").get<double>() == doctest::Approx(250));
    CHECK(spans[0].at("pid") == 3);
    CHECK(spans[1].at("cat") == "wait");
    CHECK(spans[1].at("ts").get<double>() == doctest::Approx(-10));
    CHECK(spans[1].at("dur").get<double>() == doctest::Approx(2000010));
    CHECK(spans[0].at("tid") != spans[1].at("tid"));
    std::map<std::pair<int, int>, std::map<std::string, std::string>> names;
    for (const json& e : events_of(text, "M")) {
        names[{e.at("pid"), e.at("tid")}][e.at("name")] = e.at("args").at("name");
    }
    REQUIRE(names.size() == 2);
    const auto& of_a = names.at({3, spans[0].at("tid")});
    CHECK(of_a.at("process_name") == "rank 3");
    CHECK(of_a.at("thread_name") == "lane \"x\"");
    CHECK(names.at({0, spans[1].at("tid")}).at("thread_name") == "main");
}

TEST_CASE("an empty trace is valid") { CHECK(events_of(timeline().chrome_trace(), "X").empty()); }

TEST_CASE("any name is escaped into valid JSON") {
    timeline t;
    std::string all;
    for (int c = 0; c < 128; ++c) { all += static_cast<char>(c); }
    const std::vector<std::string> valid{all, "\"\\\"", "é ü 日本 😀",
                                         "\xf0\x90\x80\x80\xed\x9f\xbf\xee\x80\x80\xf4\x8f\xbf\xbf"};
    const std::vector<std::string> invalid{"\xff",
                                           "a\x80z",
                                           "\xc0\xaf",
                                           "\xe0\x80\xaf",
                                           "\xed\xa0\x80",
                                           "\xf0\x80\x80\x80",
                                           "\xf4\x90\x80\x80",
                                           "\xf5\x80\x80\x80",
                                           "\xe2\x82",
                                           "\xf0\x9f\x98",
                                           "\xc3"};
    const auto track = t.track_of(0, "a\nb\x01");
    const auto now = clock_type::now();
    for (const auto& s : valid) { t.add(track, s, span_kind::work, now, now); }
    for (const auto& s : invalid) { t.add(track, s, span_kind::work, now, now); }
    const auto spans = events_of(t.chrome_trace(), "X");  // the reader rejects malformed UTF-8
    REQUIRE(spans.size() == valid.size() + invalid.size());
    for (std::size_t i = 0; i < valid.size(); ++i) { CHECK(spans[i].at("name") == valid[i]); }
    for (std::size_t i = valid.size(); i < spans.size(); ++i) {
        CHECK(spans[i].at("name").get<std::string>().find("\xef\xbf\xbd") != std::string::npos);
    }
    CHECK(spans[valid.size() + 1].at("name") == "a\xef\xbf\xbdz");
}

TEST_CASE("traces of several processes make one document") {
    const deadline origin = clock_type::now();
    timeline a(origin);
    timeline b(origin);
    timeline nothing(origin);
    a.add(a.track_of(0, "main"), "x", span_kind::work, origin, origin + 1ms);
    b.add(b.track_of(1, "main"), "y", span_kind::work, origin, origin + 1ms);
    const std::vector<std::string> parts{nothing.events(), a.events(), nothing.events(), b.events()};
    const auto spans = events_of(timeline::document(parts), "X");
    REQUIRE(spans.size() == 2);
    CHECK(spans[0].at("pid") == 0);
    CHECK(spans[1].at("pid") == 1);
}

TEST_CASE("write writes the trace or says why not") {
    timeline t;
    t.add(t.track_of(0, "main"), "x", span_kind::work, clock_type::now(), clock_type::now());
    const std::string path = "tutti_timeline_test.json";
    t.write(path);
    std::ostringstream read;
    read << std::ifstream(path).rdbuf();
    CHECK(read.str() == t.chrome_trace());
    std::remove(path.c_str());
    try {
        t.write("no_such_folder/trace.json");
        FAIL("written into a folder that does not exist");
    } catch (const backend_error& e) {
        CHECK(std::string(e.what()) == "timeline: cannot write 'no_such_folder/trace.json': No such file or directory");
        CHECK(e.context().backend_code == 2);
    }
    if (std::FILE* full = std::fopen("/dev/full", "w")) {  // opens, then has no room
        std::fclose(full);
        CHECK_THROWS_AS(t.write("/dev/full"), backend_error);
    }
}

TEST_CASE("several threads write at once") {
    timeline t;
    std::vector<std::thread> writers;
    for (int r = 0; r < 4; ++r) {
        writers.emplace_back([&t, r] {
            for (int i = 0; i < 500; ++i) {
                const schedule::scoped_span span(&t, t.track_of(r, "main"), i % 2 == 0 ? "even" : "odd");
            }
        });
    }
    for (auto& w : writers) { w.join(); }
    CHECK(t.size() == 2000);
    for (int r = 0; r < 4; ++r) {
        const auto totals = t.totals(r);
        REQUIRE(totals.size() == 2);
        CHECK(totals[0].count == 250);
        CHECK(totals[1].count == 250);
    }
}

TEST_CASE("lanes record work where it ran and waits where they blocked") {
    const auto attempt = [](duration length) {
        timeline t;
        using self = comm::self<host_queue>;
        self world{};
        {
            schedule::lane lane(world.duplicate("side"), {.trace = &t, .trace_rank = 5, .consumer = "trainer"});
            auto slow = lane.submit("slow", [=](self&) { std::this_thread::sleep_for(length); });
            slow.wait(host_queue{});
            slow.wait(host_queue{});  // done: not exposed
            auto hidden = lane.submit("hidden", [](self&) { std::this_thread::sleep_for(5ms); });
            lane.drain();
            hidden.wait(host_queue{});
            auto behind = lane.submit(
                "behind", [](self&) {}, hidden);
            lane.drain();
        }
        const auto spans = events_of(t.chrome_trace(), "X");
        std::map<std::string, std::map<std::string, double>> seconds;
        std::map<std::string, std::set<int>> tracks;
        for (const json& e : spans) {
            seconds[e.at("cat")][e.at("name")] += 1e-6 * e.at("dur").get<double>();
            tracks[e.at("cat")].insert(e.at("tid").get<int>());
            CHECK(e.at("pid") == 5);
        }
        CHECK(seconds.at("communication").size() == 3);
        CHECK(seconds.at("communication").at("slow") >= tutti::seconds(length));
        CHECK(seconds.at("communication").at("hidden") >= 0.005);
        const auto& waits = seconds["wait"];
        // Unless the first wait came late.
        test::expect(waits.contains("slow") && waits.at("slow") > 0.75 * tutti::seconds(length), "{} waits are short",
                     waits.size());
        CHECK(waits.size() == 1);
        CHECK(tracks.at("communication") != tracks.at("wait"));
        CHECK(t.exposed(5) == doctest::Approx(waits.at("slow")).epsilon(1e-3));
        std::set<std::string> threads;
        for (const json& e : events_of(t.chrome_trace(), "M")) {
            if (e.at("name") == "thread_name") { threads.insert(e.at("args").at("name").get<std::string>()); }
        }
        CHECK(threads == std::set<std::string>{"self/side", "trainer"});
    };
    test::with_growing_timeouts(attempt, {20ms, 200ms, 2s});
}

TEST_CASE("a null timeline records nothing and costs no clock reading") {
    const schedule::scoped_span span(nullptr, 0, "x");
    schedule::lane lane(comm::self<host_queue>{});
    auto t = lane.submit("x", [](comm::self<host_queue>&) {});
    CHECK_NOTHROW(t.wait(host_queue{}));
}
