# conan create, with a consumer as its test package. Conan comes from PyPI into a virtual environment; fmt is a package
# that stands for the system's, so that no remote is asked for anything.
include(${CMAKE_CURRENT_LIST_DIR}/steps.cmake)

find_program(PYTHON python3 REQUIRED)
set(venv ${WORK}-venv)  # kept from run to run; the rest starts from nothing
set(conan ${venv}/bin/conan)
execute_process(COMMAND ${conan} --version RESULT_VARIABLE missing OUTPUT_QUIET ERROR_QUIET)
if(missing)
  file(REMOVE_RECURSE ${venv})
  step(${PYTHON} -m venv ${venv})
  set(install ${venv}/bin/pip install --quiet --disable-pip-version-check "conan>=2.3,<3")
  execute_process(COMMAND ${install} RESULT_VARIABLE result OUTPUT_VARIABLE output ERROR_VARIABLE output)
  if(output MATCHES "from versions: none|ConnectionError|Connection refused|ConnectTimeout|Read timed out|ProxyError")
    message("skipped: PyPI, from where Conan comes, cannot be reached\n${output}")
    return()
  elseif(NOT result STREQUAL "0")
    message(FATAL_ERROR "failed (${result}): ${install}\n${output}")
  endif()
endif()

set(ENV{CONAN_HOME} ${WORK}/home)
step(${conan} profile detect --name tutti)
step(${conan} remote disable "*")
# The system's fmt as a package of the version that Conan would take, the newest that the recipe allows.
file(WRITE ${WORK}/fmt/conanfile.py "
from conan import ConanFile

class Fmt(ConanFile):
    name = 'fmt'
    version = '12.1.0'

    def package_info(self):
        self.cpp_info.includedirs = []
        self.cpp_info.system_libs = ['fmt']
        self.cpp_info.defines = ['FMT_SHARED']
")
step(${conan} create ${WORK}/fmt --profile:all tutti)

# Everything stays below the work folder: the build of the test package, and no presets beside the sources.
step(${conan} create ${SOURCE} --profile:all tutti --settings:all compiler.cppstd=20
  -c tools.cmake.cmaketoolchain:generator=Ninja
  -c tools.cmake.cmaketoolchain:user_presets=
  -c tools.cmake.cmake_layout:test_folder=${WORK}/test)
expect_output("tutti/${VERSION}")
# Both tutti and its consumer found that package, not the system's.
string(REGEX MATCHALL "Target declared 'fmt::fmt'" found "${output}")
list(LENGTH found count)
if(NOT count EQUAL 2)
  message(FATAL_ERROR "Conan's fmt was found ${count} times, not twice:\n${output}")
endif()
expect_output("tutti ${VERSION} from its Conan package: 3 ranks")

# Header-only: another build type is the same package, found without building.
step(${conan} install --requires=tutti/${VERSION} --profile:all tutti --settings:all compiler.cppstd=20
  --settings:all build_type=Debug --output-folder ${WORK}/debug)
# And C++17 is refused.
step_fails("lower than the required C++ standard (20)" ${conan} install --requires=tutti/${VERSION} --profile:all tutti --settings:all
  compiler.cppstd=17 --output-folder ${WORK}/cpp17)
