#include "support/precompiled.hpp"  // the one unit that it is precompiled for
