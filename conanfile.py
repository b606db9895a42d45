"""Conan 2 recipe: tutti is header-only, so one package serves every setting.

Consumers get tutti's own CMake package (find_package(tutti COMPONENTS mpi blas cuda cublas cudnn nccl checkpoint)), which
searches MPI, BLAS, CUDA, NCCL, zlib and nlohmann-json only for those who ask; the components below tell the other
generators what to include and link.
"""

import os
import re

from conan import ConanFile
from conan.tools.build import check_min_cppstd
from conan.tools.cmake import CMake, CMakeDeps, CMakeToolchain, cmake_layout
from conan.tools.files import load

required_conan_version = ">=2.3"


class TuttiRecipe(ConanFile):
    name = "tutti"
    description = "Collective communication and compression for distributed training, header-only C++20"
    license = "MIT"
    topics = ("distributed-training", "collectives", "compression", "mpi", "header-only")
    package_type = "header-library"
    settings = "os", "arch", "compiler", "build_type"  # of the machine that configures; package_id() forgets them
    exports_sources = "CMakeLists.txt", "LICENSE", "cmake/*", "include/*"
    no_copy_source = True
    test_package_folder = "tests/package/conan"

    def set_version(self):
        header = load(self, os.path.join(self.recipe_folder, "include", "tutti", "version.hpp"))
        self.version = ".".join(re.findall(r"^#define TUTTI_VERSION_(?:MAJOR|MINOR|PATCH) (\d+)$", header, re.M))

    def requirements(self):
        self.requires("fmt/[>=9.1 <13]", transitive_headers=True, transitive_libs=True)

    def validate(self):
        check_min_cppstd(self, 20)

    def layout(self):
        cmake_layout(self)

    def generate(self):
        CMakeDeps(self).generate()
        toolchain = CMakeToolchain(self)
        for part in ("BUILD_TESTS", "BUILD_BENCH", "BUILD_EXAMPLES"):
            toolchain.cache_variables["TUTTI_" + part] = "OFF"
        for component in ("MPI", "BLAS", "CUDA", "NCCL", "CUDNN", "CHECKPOINT"):
            toolchain.cache_variables["TUTTI_WITH_" + component] = "OFF"
        toolchain.generate()

    def build(self):
        CMake(self).configure()

    def package(self):
        CMake(self).install()

    def package_id(self):
        self.info.clear()

    def package_info(self):
        self.cpp_info.set_property("cmake_find_mode", "none")  # tuttiConfig.cmake is in the package
        for name in ("tutti", "mpi", "blas", "cuda", "cublas", "cudnn", "nccl", "checkpoint"):
            component = self.cpp_info.components[name]
            component.set_property("cmake_target_name", f"tutti::{name}")
            component.requires = {"tutti": ["fmt::fmt"], "cublas": ["cuda"], "cudnn": ["cuda"]}.get(name, ["tutti"])
            component.bindirs = []
            component.libdirs = []
            component.builddirs = ["share/cmake/tutti"]
        self.cpp_info.components["mpi"].defines = ["OMPI_SKIP_MPICXX", "MPICH_SKIP_MPICXX"]
        if self.settings.get_safe("os") in ("Linux", "FreeBSD"):
            self.cpp_info.components["tutti"].system_libs = ["pthread"]
