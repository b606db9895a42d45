// unobserved: bookkeeping of the fakes that ThreadSanitizer does not see: a lock that orders nothing for it.
// Needs nothing else. Without it, the locks of the fakes would order the threads under test and hide their races.
#pragma once

#include <mutex>  // lock

#if defined(__has_feature)
#if __has_feature(thread_sanitizer)
#define TUTTI_TEST_UNDER_TSAN 1
#endif
#endif
#if defined(__SANITIZE_THREAD__)
#define TUTTI_TEST_UNDER_TSAN 1
#endif

#ifdef TUTTI_TEST_UNDER_TSAN
extern "C" {  // of the sanitizer's run-time library
void AnnotateIgnoreSyncBegin(const char* file, int line);
void AnnotateIgnoreSyncEnd(const char* file, int line);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace tutti::test {

/// Holds `mutex`, unseen: what is read and written meanwhile is not checked and orders nothing.
class unobserved {
    struct ignore {
#ifdef TUTTI_TEST_UNDER_TSAN
        ignore() {
            AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
            AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
            AnnotateIgnoreSyncBegin(__FILE__, __LINE__);
        }
        ~ignore() {
            AnnotateIgnoreSyncEnd(__FILE__, __LINE__);
            AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
            AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
        }
#endif
    };
    [[maybe_unused]] ignore ignore_;
    std::lock_guard<std::mutex> lock_;

public:
    explicit unobserved(std::mutex& mutex) : ignore_(), lock_(mutex) {}
    unobserved(const unobserved&) = delete;
    unobserved& operator=(const unobserved&) = delete;
};

}  // namespace tutti::test
