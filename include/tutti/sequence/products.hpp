// products: the products of matrices that attention on the host is made of, under this module's names.
// Needs core/products; through CBLAS they are in sequence/blas_products.
#pragma once

#include <tutti/core/products.hpp>  // all of it

namespace tutti::sequence {

using tutti::factor;
using tutti::matrix;
using tutti::plain_products;

}  // namespace tutti::sequence
