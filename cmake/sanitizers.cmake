# TUTTI_SANITIZE names what the tests, benches and examples are instrumented with, as in -fsanitize=<names>.
set(TUTTI_SANITIZE "" CACHE STRING "sanitizers, comma separated: address,undefined or thread")

# What tests run behind, and the environment they get.
set(TUTTI_TEST_LAUNCHER)
set(TUTTI_TEST_ENVIRONMENT)
# An instrumented test runs many times slower; its deadline grows with it.
set(TUTTI_TEST_TIMEOUT_FACTOR 1)

if(TUTTI_SANITIZE)
  set(TUTTI_TEST_TIMEOUT_FACTOR 10)
  set(TUTTI_TEST_ENVIRONMENT
    ASAN_OPTIONS=detect_stack_use_after_return=1:strict_init_order=1
    UBSAN_OPTIONS=print_stacktrace=1
    TSAN_OPTIONS=halt_on_error=1:second_deadlock_stack=1)
endif()

# ThreadSanitizer of GCC 12 and clang 14 knows the address layout of at most 28 random bits; newer kernels use up to 32
# and make it abort at start, now and then. Without randomization it always starts.
if(TUTTI_SANITIZE MATCHES "thread" AND EXISTS /proc/sys/vm/mmap_rnd_bits)
  file(READ /proc/sys/vm/mmap_rnd_bits random_bits)
  if(random_bits GREATER 28)
    execute_process(COMMAND setarch -R true RESULT_VARIABLE failed OUTPUT_QUIET ERROR_QUIET)
    if(failed)
      message(WARNING "vm.mmap_rnd_bits is above 28 and 'setarch -R' is not allowed here: "
        "ThreadSanitizer may abort at start with 'unexpected memory mapping'")
    else()
      set(TUTTI_TEST_LAUNCHER setarch -R)
    endif()
  endif()
endif()

# tutti_enable_sanitizers(): for every target of this folder and the folders below it.
macro(tutti_enable_sanitizers)
  if(TUTTI_SANITIZE)
    add_compile_options(-fsanitize=${TUTTI_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
    add_link_options(-fsanitize=${TUTTI_SANITIZE})
  endif()
endmacro()
