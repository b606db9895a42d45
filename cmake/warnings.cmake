# The warnings of this project's own tests, benches and examples. Presets turn them into errors with
# CMAKE_COMPILE_WARNING_AS_ERROR; consumers of the headers never see them.

# tutti_enable_warnings(): for every target of this folder and the folders below it.
macro(tutti_enable_warnings)
  foreach(warning IN ITEMS -Wall -Wextra -Wpedantic -Wshadow -Wconversion -Wsign-conversion -Wnon-virtual-dtor
      -Wold-style-cast -Werror=return-type)
    add_compile_options($<$<COMPILE_LANG_AND_ID:CXX,GNU,Clang,AppleClang>:${warning}>)
  endforeach()
  # GCC 12 at -O3 sees overlapping copies inside std::string where there are none (gcc bug 105651).
  add_compile_options($<$<AND:$<COMPILE_LANG_AND_ID:CXX,GNU>,$<VERSION_LESS:$<CXX_COMPILER_VERSION>,13>>:-Wno-restrict>)
  # nvcc's own code trips over -Wpedantic and -Wold-style-cast; the rest goes to its host compiler.
  add_compile_options("$<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra,-Wshadow,-Wconversion,-Werror=return-type>")
endmacro()
