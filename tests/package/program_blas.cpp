// What a consumer of tutti::blas builds: a product through cblas.
#include <tutti/tutti.hpp>  // the headers must come too

#include <cblas.h>  // cblas_sgemm

#include <cstdio>  // printf

int main() {
    const float a = 2;
    const float b = 3;
    float c = 0;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, 1, 1, 1, 1.0F, &a, 1, &b, 1, 0.0F, &c, 1);
    std::printf("%g * %g = %g\n", static_cast<double>(a), static_cast<double>(b), static_cast<double>(c));
}
